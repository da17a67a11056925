"""A run whose masters, standbys, ps, workers and client die, in virtual time.

Real is all that looks after the run, on each task; see ``run_tasks``. The client
follows it as ``RunFollower`` does, and answers from a checkpoint in memory.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import Lease, Part, SlotPlan
from jgraph.coordination.liveness.members import Arrangement, Member
from jgraph.errors import (
    ClusterUnreachableError,
    CopyLostError,
    FencedError,
    JGError,
    TaskLostError,
)
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.resumable.dialing import RESUME_S
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.program_codec import encode_program
from jgraph.server.runs import calls, links, standby, supervisor
from jgraph.train.state.durability import Durability
from tests.support.simulation.run_tasks import (
    RUN,
    RunProcess,
    SimulatedLoop,
    copied,
)
from tests.support.simulation.virtual_loop import VirtualClock

LEASE_S: Final = 10.0
UPDATES: Final = 40
EVERY: Final = 10
"""Updates between two saves."""
_MOST_S: Final = 900.0
AT_ONCE_S: Final = 0.5
"""Two standbys that hear at once that a master leaves may both take over: the later
term counts."""
HEARD_S: Final = 1.0
"""After so long without another master the client names the one that it misses."""

Updates = list[tuple[int, ...]]


@dataclass
class Saved:
    """A checkpoint in the memory of the client."""

    position: dict[str, Any]
    updates: dict[str, Updates]

    @property
    def step(self) -> int:
        return len(next(iter(self.updates.values())))


@dataclass
class RunWorld:
    """One run on simulated tasks.

    Args:
      seed: decides all that happens by chance.
      synchronous: how it trains.
      durability: what is kept of its ps.
      has_client: it ends with its client; else it is detached.
      max_staleness: of asynchronous training: no gradient is older.
      ps, workers: how many.
      least: workers that the run needs; None: none join it, or leave.
      updates: of the run.

    Attributes:
      story: what happened.
      masters: those that it has had, the last one now.
      begun: the loops that began, in order.
      all_died: no task was there at some moment: nobody knows of the run any more.
    """

    seed: int
    synchronous: bool
    durability: Durability
    has_client: bool = True
    max_staleness: int | None = None
    ps: int = 2
    workers: int = 2
    least: int | None = None
    updates: int = UPDATES
    story: list[str] = field(default_factory=list)
    masters: list[RunProcess] = field(default_factory=list)
    dealt: Counter[int] = field(default_factory=Counter)
    begun: list[str] = field(default_factory=list)
    all_died: bool = False

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.clock = VirtualClock()
        self.plan = SlotPlan([Part("a", 200)], 1, self.seed, slot_batches=5)
        names = [f"/job:ps/task:{n}" for n in range(self.ps)]
        names += [f"/job:worker/task:{n}" for n in range(self.workers)]
        self.tasks = [TaskName(name) for name in names]
        described = {task: Member(address_of(task)) for task in self.tasks}
        self.described = Arrangement(0, described)
        self.processes: dict[TaskName, RunProcess] = {}
        self.starts = 0
        self.cuts: dict[frozenset[TaskName], float] = {}
        self.streams: dict[frozenset[TaskName], list[Callable[[Any], None]]] = {}
        self.losing_halts_until = 0.0
        self.unread_until = 0.0  # no standby hears what its master has done
        self.torn = self.forgotten = 0
        self.updated_at = 0.0
        self.led_since = 0.0
        self.deciding: SimulatedLoop | None = None
        self.kept: dict[TaskName, Updates] = {t: [] for t in self.tasks if is_ps(t)}
        self.client = RunClientThere(self)
        self.named = False
        self.terms: dict[int, RunProcess] = {}  # of which master each is
        for task in self.tasks:
            self.start(task)
        for task in self.tasks:
            if is_ps(task):
                self.processes[task].updates = []

    # ------------------------------------------------------------ tasks

    def note(self, text: str) -> None:
        self.story.append(f"{self.clock.now():.3f} {text}")

    def start(self, task: TaskName) -> None:
        self.starts += 1
        self.processes[task] = self.process(task, self.starts)

    def process(self, task: TaskName, number: int) -> RunProcess:
        """Makes a start of a task."""
        return RunProcess(self, task, number)

    def is_up(self, task: TaskName) -> bool:
        return task in self.processes and self.processes[task].alive

    def answers(self, task: TaskName) -> bool:
        """Whether a task is there, and not frozen."""
        return self.is_up(task) and not self.processes[task].is_frozen

    def arranged(self, process: RunProcess) -> None:
        """Takes note that a process has heard of another arrangement."""

    def is_cut(self, one: TaskName, other: TaskName) -> bool:
        return self.clock.now() < self.cuts.get(frozenset({one, other}), 0.0)

    def at(self, task: TaskName) -> RunProcess:
        """Returns the process of a task.

        Raises:
          TaskLostError: there is none.
        """
        if not self.is_up(task):
            raise TaskLostError(f"{task} is gone", task=task)
        return self.processes[task]

    def kill(self, task: TaskName, away_s: float) -> None:
        """SIGKILL; its launcher starts it again."""
        if self.is_up(task):
            self.note(f"kill {task} for {away_s:.1f} s")
            if is_ps(task):
                self.tear()
            self.processes[task].kill()
            self.all_died |= not any(map(self.is_up, self.tasks))
            if self.synchronous and not self.is_up(self.tasks[0]):
                self.forget_updates(anew=task == self.tasks[0])
            asyncio.get_running_loop().call_later(away_s, self.start_again, task)

    def tear(self) -> None:
        """A ps may be lost while the steps of the workers are on other ps alone."""
        if self.durability != "checkpoint":
            self.torn += self.workers

    def forget_updates(self, *, anew: bool) -> None:
        """Whoever knew of the newest updates may be gone, and the arbiter is."""
        before = 0 if anew else self.forgotten
        self.forgotten = max(before, self.untold())
        self.torn += self.workers * (self.forgotten - before)

    def untold(self) -> int:
        """Returns how many updates nobody knows of whose arbiter is gone."""
        made = max(map(len, self.kept.values()))
        known = (one.known_updates() for one in self.processes.values() if one.alive)
        return max(0, made - max(known, default=0))

    def start_again(self, task: TaskName) -> None:
        self.note(f"start {task}")
        self.start(task)

    def cut(self, one: TaskName, other: TaskName, seconds: float) -> None:
        """Breaks the link between two tasks for a while."""
        self.note(f"cut {one} from {other} for {seconds:.1f} s")
        self.cuts[frozenset({one, other})] = self.clock.now() + seconds
        if seconds > RESUME_S:
            self.tear()
            loop = asyncio.get_running_loop()
            loop.call_later(RESUME_S, self.end_streams, frozenset({one, other}))

    def end_streams(self, ends: frozenset[TaskName]) -> None:
        """A connection is not made again in time."""
        for end in list(self.streams.get(ends, ())):
            end(None)

    async def travel(self, src: RunProcess | None, task: TaskName) -> None:
        """Takes the time of a message.

        Raises:
          TaskLostError: it does not arrive.
        """
        await asyncio.sleep(self.chance.uniform(0.0, 0.01))
        if src is not None:
            await src.awake()
        until = self.clock.now() + RESUME_S
        while self.is_silent(src, task):
            if self.clock.now() < until:
                await asyncio.sleep(0.1)
                continue
            raise TaskLostError(f"{task} is not reached", task=task)
        self.at(task)

    def is_silent(self, src: RunProcess | None, task: TaskName) -> bool:
        """Whether nothing comes through now from one task to another."""
        if src is None or src.task == task:
            return False
        frozen = self.is_up(task) and self.processes[task].is_frozen
        return frozen or self.is_cut(src.task, task)

    async def ask(
        self,
        src: RunProcess | None,
        task: TaskName,
        method: str,
        request: Frame,
        *,
        timeout_s: float = 20.0,
    ) -> Frame:
        """Makes a call; ``src`` None: it is of the client."""
        await self.travel(src, task)
        body = body_of(request)
        if method == "StopLoop" and body.halt and self.is_losing_halts:
            self.note(f"lose the order to halt {body.loop}")
            raise TaskLostError(f"{task} did not get it", task=task)
        there = self.at(task)
        if method == "InheritRun" and src is not None and self.masters:
            first = self.terms.setdefault(body.term, src)
            assert first is src, f"two masters have the term {body.term}"
            if body.term == max(self.terms):  # else another has taken over since
                self.invites(src)

        async def last() -> Frame:
            await there.awake()
            answers = there.answers(method, copied(request))
            return [copied(one) async for one in answers][-1]

        answering = there.spawn(last())
        try:
            await asyncio.wait(
                {answering, there.dead},
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        except asyncio.CancelledError:
            answering.cancel()  # it is told that nobody waits for the answer
            raise
        if not there.alive:
            raise TaskLostError(f"{task} is gone", task=task)
        if not answering.done():
            answering.cancel()
            raise TaskLostError(f"{task} does not answer in time", task=task)
        reply: Frame = answering.result()
        await self.travel(src, task)
        return reply

    def invites(self, master: RunProcess) -> None:
        """A master invites a standby: the one before it is gone, or was named."""
        last = self.masters[-1]
        if master not in self.masters:
            self.note(f"{master.task} is the master")
            is_gone = not last.alive or last.leaves or self.is_given_up(last)
            is_gone |= self.clock.now() - self.led_since < AT_ONCE_S
            assert self.named or is_gone, f"{last.task} is there, and replaced"
            self.masters.append(master)
            self.led_since = self.clock.now()
            self.named = False

    def is_given_up(self, process: RunProcess) -> bool:
        """Whether another process may have the place of one."""
        return False

    @property
    def is_losing_halts(self) -> bool:
        """Whether an order to halt is lost now: one of two, for a while."""
        return self.clock.now() < self.losing_halts_until and self.chance.random() < 0.5

    async def stream(
        self, src: RunProcess | None, task: TaskName, method: str, request: Frame
    ) -> AsyncIterator[Frame]:
        """Makes a call with many replies."""
        await self.travel(src, task)
        there, replies = self.at(task), asyncio.Queue[Frame | JGError | None]()

        async def pump() -> None:
            try:
                async for reply in there.answers(method, copied(request)):
                    await there.awake()
                    unread_s = self.unread_until - self.clock.now()
                    if method == "RunJournal" and unread_s > 0.0:
                        await asyncio.sleep(unread_s)
                    replies.put_nowait(copied(reply))
                replies.put_nowait(None)
            except JGError as error:
                replies.put_nowait(error)

        def end(_: Any) -> None:
            replies.put_nowait(TaskLostError(f"{task} is not reached", task=task))

        pumping = there.spawn(pump())
        there.dead.add_done_callback(end)
        ends = self.streams.setdefault(frozenset({src.task if src else task, task}), [])
        ends.append(end)
        there.ends.append(end)
        try:
            while (reply := await replies.get()) is not None:
                if isinstance(reply, JGError):
                    raise reply
                yield reply
        finally:
            pumping.cancel()
            ends.remove(end)
            there.ends.remove(end)
            there.dead.remove_done_callback(end)

    # ------------------------------------------------------------ steps

    def numbers(self, lease: Lease) -> list[int]:
        """Returns the numbers of the batches of a lease."""
        return [self.plan.number(*one) for one in lease.each()]

    def begins(self, loop: SimulatedLoop) -> None:
        """A loop decides from now on: the one before has ended."""
        before = self.deciding
        if before is not None and before.process.alive:
            assert before.order.loop not in before.process.loops, "two decide at once"
        self.deciding = loop

    def applied(self, process: RunProcess) -> None:
        """An update of a process is applied."""

    def decides(self, loop: str) -> bool:
        """Whether a loop decides, or is about to."""
        first = self.tasks[0]
        return self.is_up(first) and loop not in self.processes[first].ended

    def keep(self, task: TaskName, updates: Updates) -> None:
        """Keeps what a ps holds a second time."""
        if self.durability != "checkpoint":
            self.kept[task] = list(updates)

    def shards(self, process: RunProcess, handle: str) -> list[TaskName]:
        """Returns the ps of a program, as a process has it."""
        return [task for task in self.tasks if is_ps(task)]

    def participants(self, program: pb.Program) -> list[TaskName]:
        """Returns the ps that have a part of a program."""
        return [task for task in self.tasks if is_ps(task)]

    def held(self) -> dict[str, Updates | None]:
        """Returns what each ps holds, as the client finds it; None: nothing."""
        shards = [task for task in self.tasks if is_ps(task)]
        return {
            task: self.processes[task].updates if self.is_up(task) else None
            for task in shards
        }

    def held_last(self) -> list[Updates | None]:
        """Returns what each ps holds, or held when it was killed after the run."""
        return [self.processes[task].updates for task in self.tasks if is_ps(task)]

    def home(self, shard: str) -> TaskName:
        """Returns where the client looks for a shard."""
        return TaskName(shard)

    def moved(self, ps: int) -> None:
        """The client hears that there are so many ps."""

    def give(self, updates: Mapping[str, Updates]) -> None:
        """Gives each ps what the client has saved of it.

        Raises:
          TaskLostError: one is not there.
        """
        for task, one in updates.items():
            self.at(TaskName(task)).updates = list(one)

    # ------------------------------------------------------------ the run

    def master(self) -> RunProcess | None:
        """Returns who looks after the run: the newest master that is there."""
        there = dict[RunProcess, tuple[int, bool]]()
        for process in self.processes.values():
            run = process.runs.find(RUN) if process.alive else None
            if run is not None and not isinstance(run.record.error, FencedError):
                there[process] = run.record.term, not run.is_of_standby
        return max(there, key=lambda one: there[one], default=None)

    def state(self) -> str:
        """Returns how the run is; "lost": nobody knows it."""
        master = self.master()
        if master is None:
            return "lost"
        found = master.runs.find(RUN)
        assert found is not None
        return str(found.record.row().state)

    def why(self) -> str:
        """Returns why the run failed."""
        master = self.master()
        run = None if master is None else master.runs.find(RUN)
        return "nobody knows it" if run is None else str(run.record.error)

    def order(self) -> pb.OpenRun:
        """Returns what the client says of the run."""
        info = {
            "first_step": 0,
            "steps": self.updates,
            "batch_size": 1,
            "metrics": [],
            "container": "c",
            "synchronous": self.synchronous,
            "checkpoints": "",
        }
        order = pb.OpenRun(run=RUN, info=json.dumps(info), wait_s=300.0)
        if self.least is not None:
            order.elastic.least = self.least
        if self.durability != "checkpoint":
            order.copies.SetInParent()
        if self.has_client:
            order.client.lease_s, order.client.halt_s = LEASE_S, 1e6
            order.client.gives_data = True
            if self.durability == "checkpoint":
                order.client.directory, order.client.unsaved = "memory", "in memory"
                order.client.halt_every.append(EVERY)
        if not self.synchronous:
            shards = [task for task in self.tasks if is_ps(task)]
            gate = pb.OpenGate(gate="c", shards=shards)
            if self.max_staleness is not None:
                gate.max_staleness = self.max_staleness
            order.gate.CopyFrom(gate)
        return order

    def loop_orders(self) -> list[pb.RunLoop]:
        """Returns the loops that begin with the run."""
        plan = json.dumps(self.plan.to_dict())
        workers = [task for task in self.tasks if not is_ps(task)]
        orders = [
            pb.RunLoop(
                loop=f"{RUN}-{n}",
                task=task,
                handle=f"h{n}",
                replica=n,
                steps=self.updates,
                data_run=RUN,
                data_plan=plan,
                batch_feed="slot" if self.synchronous else "",
                step_timeout_s=10.0,
                data="d",
            )
            for n, task in enumerate(workers)
        ]
        if self.synchronous:
            arbiter = pb.RunLoop(
                loop=f"{RUN}-{len(workers)}",
                task=self.tasks[0],
                handle="apply",
                replica=len(workers),
                steps=self.updates,
                data_plan=plan,
                step_timeout_s=10.0,
            )
            sync = arbiter.sync
            sync.gate, sync.wanted = "c", len(workers)
            sync.handles.extend(order.handle for order in orders)
            sync.tasks.extend(workers)
            sync.shards.extend(task for task in self.tasks if is_ps(task))
            sync.data_position = json.dumps(beginning_of(self.plan))
            if self.has_client and self.durability == "checkpoint":
                sync.halt_every.append(EVERY)
            orders.insert(0, arbiter)
            for order in orders:
                order.data_run, order.dealer = arbiter.loop, self.tasks[0]
        for order in orders:
            order.run, order.term = RUN, 1
        return orders

    def programs(self, handle: str, task: TaskName) -> list[pb.RegisterProgram]:
        """Returns what is kept of a program."""
        made, _ = encode_program(Program(handle, task, (), (), (), ()))
        return [pb.RegisterProgram(handle=handle, run=RUN, program=made)]

    async def begin(self) -> None:
        """Submits the run to the first worker."""
        first = TaskName("/job:worker/task:0")

        async def ask(method: str, **body: Any) -> None:
            await self.ask(None, first, method, frame(**body))

        await ask("Master.OpenRun", open_run=self.order())
        if not self.synchronous:
            plan = json.dumps(self.plan.to_dict())
            data = pb.OpenDataRun(run=RUN, plan=plan, budget=self.updates)
            data.workers, data.lease_s = self.workers, 120.0
            await ask("OpenDataRun", open_data_run=data)
        for order in self.loop_orders():
            task = TaskName(order.task)
            for program in self.programs(order.handle, task):
                await ask("Master.KeepProgram", register_program=program)
            for process in self.processes.values():
                process.handles.add(order.handle)
            await ask("OrderLoop", run_loop=order)
        await ask("Master.BeginRun", run_query=pb.RunQuery(run=RUN))
        self.masters.append(self.processes[first])
        if self.has_client:
            self.client.work = asyncio.ensure_future(self.client.follow(first, 1))

    async def to_its_end(self) -> str:
        """Waits until the run is over; returns how."""
        lost_at: float | None = None
        while True:
            await asyncio.sleep(0.5)
            now, state = self.clock.now(), self.state()
            if state not in {"running", "lost"}:
                return state
            if state == "running":
                lost_at = None
            elif lost_at is None:
                lost_at = now
            elif now - lost_at > 120.0:
                return state
            assert now < _MOST_S, "the run stands still"

    # ------------------------------------------------------------ the oracle

    def check_gates(self) -> None:
        """Each ps that was started again has its gate, with the bound of the run."""
        for task in self.order().gate.shards:
            process = self.processes[TaskName(task)]
            first = process.incarnation <= len(self.described.members)
            assert first or process.gate == self.order().gate, f"no gate at {task}"

    def check(self, state: str) -> None:
        """What must hold when the run is over."""
        master = self.master()
        assert master is not None
        run = master.runs.find(RUN)
        assert run is not None
        position = run.position()
        order = BatchOrder(self.plan)
        end, unfinished = order.restored(position)
        due = set(map(order.number, set(range(end)) - set(unfinished)))
        held = self.held_last()
        self.check_gates()
        for updates in held:
            assert updates is not None, "a ps holds nothing"
            counted = Counter(batch for update in updates for batch in update)
            assert due <= counted.keys(), f"left out: {due - counted.keys()}"
            twice = sum(counted.values()) - len(due)
            if self.synchronous:
                assert updates == held[0], "not the same everywhere"
                # Where a run goes on is told with a report: who goes on from a copy may
                # have made one update more.
                assert 0 <= twice <= self.torn, f"{twice} batches too many"
                assert state != "done" or len(updates) == self.updates
            else:
                again = int(position["again"]) + self.torn
                assert twice <= again, f"{twice} twice, and {again} are told of"
                assert state != "done" or len(due) == self.updates


def address_of(task: TaskName, incarnation: int = 0) -> Address:
    """Returns where a process listens.

    Example:
      >>> address_of(TaskName("/job:worker/task:1"), 7)
      'worker-1:7'
    """
    job, _, index = task.removeprefix("/job:").partition("/task:")
    return Address(f"{job}-{index}:{incarnation or 1}")


def beginning_of(plan: SlotPlan) -> dict[str, Any]:
    """Returns the position of the beginning."""
    return BatchBook(plan).position()


class RunClientThere:
    """The client of a run: follows it, saves it in memory, and answers.

    Attributes:
      answered: numbers of questions that have an answer.
      is_gone: it never comes back.
      has_finished: it did what is done at the end.
    """

    def __init__(self, world: RunWorld) -> None:
        self.world = world
        self.saved = Saved(
            beginning_of(world.plan),
            {shard: [] for shard in world.held()},
        )
        self.answered = set[int]()
        self.is_gone = self.has_finished = False
        self.looks = False  # for another master
        self.work: asyncio.Task[None] | None = None
        self.at: tuple[TaskName, int] = (TaskName("/job:worker/task:0"), 1)
        self.answers = set[asyncio.Task[None]]()

    async def away(self, seconds: float | None) -> None:
        """Follows no more for a while; None: for ever."""
        if self.work is None:
            return
        self.world.note(f"client is away for {seconds} s")
        for work in [self.work, *self.answers]:
            work.cancel()
        self.is_gone = seconds is None
        if seconds is not None:
            await asyncio.sleep(seconds)
            self.world.note("client is back")
            self.work = asyncio.ensure_future(self.follow(*self.at))

    async def follow(self, master: TaskName, term: int) -> None:
        """Follows the run from one master to the next."""
        while True:
            self.at = master, term
            if not self.looks and not await self.attach(master):
                return
            self.looks = True  # also when it is back from where it was away
            found = await self.next_master(master, term)
            if found is None:
                return
            self.looks = False
            master, term = found

    async def attach(self, master: TaskName) -> bool:
        """Follows the run at a master; returns whether that was lost."""
        world = self.world
        query = frame(run_query=pb.RunQuery(run=RUN, owner=True))
        try:
            reports = world.stream(None, master, "Master.Attach", query)
            async for report in reports:
                body = body_of(report)
                if body.HasField("rescaled") and not body.rescaled.why:
                    world.moved(body.rescaled.ps)
                if body.HasField("question"):
                    work = asyncio.ensure_future(self.answer(master, body.question))
                    self.answers.add(work)
                    work.add_done_callback(self.answers.discard)
        except (ClusterUnreachableError, TaskLostError, FencedError) as error:
            world.note(f"client is told: {error}")
            is_of_master = error.details.get("task") == master
            return isinstance(error, FencedError) or is_of_master
        except JGError:
            pass
        return False

    async def next_master(
        self, old: TaskName, term: int
    ) -> tuple[TaskName, int] | None:
        """Looks for another master, and names the one that is gone."""
        world, began, names = self.world, self.world.clock.now(), True
        while world.clock.now() - began < 120.0:
            there = next(filter(world.is_up, world.tasks), None)
            rows = list[pb.RunRow]()
            with suppress(JGError):
                if there is not None:
                    nothing = frame(empty=pb.Empty())
                    reply = await world.ask(None, there, "Master.Runs", nothing)
                    rows = list(body_of(reply).runs)
            for row in rows:
                if row.term > term:
                    return TaskName(row.task), row.term
                if row.term == term and row.state != "running":
                    return None
            if names and world.clock.now() - began > HEARD_S:
                names = False
                query = frame(run_query=pb.RunQuery(run=RUN, master=old))
                for task in world.tasks:
                    if world.is_up(task) and task != old:
                        world.note("client names the master that it misses")
                        world.named = True
                        with suppress(JGError):
                            await world.ask(None, task, "Master.SucceedRun", query)
                        break
            await asyncio.sleep(0.2)
        return None

    async def answer(self, master: TaskName, question: pb.RunQuestion) -> None:
        """Does what is asked, and answers."""
        world = self.world
        assert question.number not in self.answered, f"{question.kind} is asked again"
        world.note(f"asked {question.kind} {question.number & 0xFFFF}")
        answer = pb.RunAnswer(run=RUN, number=question.number)
        if question.ps:
            world.moved(question.ps)
        saved: Saved | None = None
        match question.kind:
            case "waits":
                return  # somebody starts them
            case "newest":
                answer.step = self.saved.step
            case "state":
                await asyncio.sleep(world.chance.uniform(0.0, 0.2))
                try:
                    world.give(self.saved.updates)
                except TaskLostError as error:
                    await self.tell(master, answer, error)
                    return
                answer.step = self.saved.step
                answer.position = json.dumps(self.saved.position)
            case "halted" | "finish" | "rest":
                await asyncio.sleep(world.chance.uniform(0.0, 0.1))
                try:
                    saved = self.read(question)
                except TaskLostError as lost:
                    ends = question.kind == "finish"
                    await self.tell(master, answer, lost if ends else None)
                    return
        if question.kind == "finish":
            self.has_finished, self.saved = True, saved or self.saved
        stood = await self.tell(master, answer, None)
        if saved is not None and (stood or question.kind != "halted"):
            self.saved = saved

    def read(self, question: pb.RunQuestion) -> Saved:
        """Returns what the ps hold.

        Raises:
          TaskLostError: one of them holds nothing.
        """
        held = dict[str, Updates]()
        for shard, updates in self.world.held().items():
            if updates is None:
                raise TaskLostError("gone", task=self.world.home(shard))
            held[shard] = list(updates)
        return Saved(json.loads(question.position), held)

    async def tell(
        self, master: TaskName, answer: pb.RunAnswer, error: JGError | None
    ) -> bool:
        if error is not None:
            answer.error.CopyFrom(to_status(error))
        with suppress(JGError):
            request = frame(run_answer=answer)
            reply = await self.world.ask(None, master, "Master.AnswerRun", request)
            self.answered.add(answer.number)
            return bool(body_of(reply).stood)
        return False


class KeptInMemory:
    """What is kept of the ps of a run, as ``RunCopies``; the world has it."""

    world: RunWorld

    def __init__(self, order: pb.OpenRun, *_: Any) -> None:
        self.order, self.began = order, 0

    @property
    def is_kept(self) -> bool:
        return self.order.HasField("copies")

    async def admit(self, handle: str, number: int) -> None:
        """Keeps what a program changes: the world does so anyway."""

    async def restore(self, lost: Any) -> int | None:
        """Gives lost ps what is kept, and in synchronous training all one version."""
        world = self.world
        for task in lost:
            if task not in world.kept:
                raise CopyLostError(f"nothing is kept of {task}")
            world.at(task).updates = list(world.kept[task])
        if not world.synchronous:
            return None
        holders = [world.at(task) for task in world.tasks if is_ps(task)]
        version = min(len(one.updates or ()) for one in holders)
        for one in holders:
            one.updates = (one.updates or [])[:version]
            world.keep(one.task, one.updates)
        return version

    async def open(self, name: str, step: int) -> None:
        self.began = step

    def next(self, ps: int, number: int) -> None:
        """Runs whose ps join and leave keep nothing here."""
        assert not self.is_kept

    async def tidy(self, most: int, number: int) -> None:
        """There is nothing to drop."""

    async def close(self) -> None:
        """There is nothing to drop."""


@contextmanager
def in_world(world: RunWorld) -> Iterator[None]:
    """Lets masters find out of the world who is there, and what is kept."""

    async def is_refused(address: str) -> bool:
        return not world.is_up(TaskName(address))

    KeptInMemory.world = world
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "is_refused", is_refused)
        patch.setattr(links, "is_refused", is_refused)
        patch.setattr(standby, "is_refused", is_refused)
        patch.setattr(supervisor, "RunCopies", KeptInMemory)
        yield
