"""Tasks of a simulated run: processes that have its real masters, and simulated loops.

What looks after the run is what a server has: ``Runs``, with supervisors, journals,
standbys, questions and halts, ``Dealers``, ``MasterTerms`` and the reports of loops.
Simulated are the steps: a batch is computed by sleeping, and each ps notes it down.
"""

import asyncio
import json
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
)
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from jgraph.cluster.loop_messages import dealt_of, rows_of
from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import Lease, SlotPlan
from jgraph.coordination.data.sync_data import SyncData
from jgraph.coordination.liveness.members import Arrangement
from jgraph.coordination.run.succession import MasterTerms
from jgraph.errors import (
    InvalidProgramError,
    JGError,
    TaskLostError,
    UninitializedError,
)
from jgraph.graph.device import is_ps, is_worker
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Address, Frame
from jgraph.server.loops.dealer import Dealers
from jgraph.server.loops.reports import LoopReports
from jgraph.server.loops.task_loops import known_of_run
from jgraph.server.members.messages import arrangement_in, members_message
from jgraph.server.runs.calls import Runs
from jgraph.server.runs.saving.checkpointer import STEP
from jgraph.server.runs.standby import StandbyPeers

if TYPE_CHECKING:
    from tests.support.simulation.run_world import RunWorld

RUN: Final = "run"
EMPTY: Final = frame(empty=pb.Empty())
LEASE_S: Final = 5.0
"""The loop that decides begins no update when its master is silent for so long."""
END_S: Final = 10.0
"""It ends when its master is silent for so long."""
SILENT_S: Final = 60.0
"""A loop that has not heard from its master for so long ends."""
STOOD_S: Final = 60.0
"""A loop that stands still goes on sooner, whoever is lost meanwhile."""
WAITED_S: Final = 60.0
"""The loop that decides waits less for contributions of one that has left."""


def copied(message: Frame) -> Frame:
    """Returns a frame as it arrives elsewhere."""
    header = pb.Frame()
    header.CopyFrom(message.header)
    return Frame(header, message.tensors)


class RunProcess:
    """One start of a task.

    Attributes:
      updates: what is applied here, in order: the batches of each update; None: it has
        lost what the process before held.
      arrangement: the newest that it has heard of.
      leaves: it was told to leave the cluster.
      joined: it was not there from the beginning.
      held_by: how many wait for it to be told to end, and hold it then.
      hangs_at: the call that it does not answer.
      dies_at: the call at which it dies.
    """

    def __init__(self, world: "RunWorld", task: TaskName, incarnation: int) -> None:
        self.world, self.task, self.incarnation = world, task, incarnation
        self.alive, self.leaves = True, False
        self.arrangement: Arrangement = world.described
        self.thawed: asyncio.Event | None = None
        self.ends: list[Callable[[Any], None]] = []
        self.drained = asyncio.Event()
        self.joined = False
        self.held_by = 0
        self.early: dict[str, list[pb.StopLoop]] = {}
        self.hangs_at = self.dies_at = ""
        self.steps = 0
        self.applied = set[tuple[str, int]]()
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.dealers = Dealers(world.clock)
        self.terms = MasterTerms()
        self.handles = set[str]()
        self.gate: pb.OpenGate | None = None
        self.loops: dict[str, SimulatedLoop] = {}
        self.ended: dict[str, LoopReports] = {}
        self.updates: list[tuple[int, ...]] | None = None
        self.works = set[asyncio.Task[Any]]()
        self.runs = Runs(cast("StandbyPeers", RunPeers(self)), world.clock)
        self.methods: dict[str, Callable[[Frame], Awaitable[Frame]]] = {
            "TaskStatus": self.status,
            "Master.Status": self.cluster_status,
            "StopLoop": self.stop_loop,
            "OpenGate": self.open_gate,
            "RegisterProgram": self.register,
            "UnregisterProgram": self.unregister,
            "Variables": self.variables,
            "AskData": self.ask_data,
            "OpenDataRun": self.open_data,
            "OrderLoop": self.order_loop,
        }

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begins work that ends with the process."""
        task = asyncio.ensure_future(work)
        self.works.add(task)
        task.add_done_callback(self.works.discard)
        return task

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False
        self.dead.set_result(None)
        self.runs.close()
        self.dealers.close_all()
        for work in list(self.works):
            work.cancel()

    # ------------------------------------------------------------ members

    @property
    def is_frozen(self) -> bool:
        """Whether it does nothing now, and can be woken."""
        return self.thawed is not None

    async def awake(self) -> None:
        """Waits while it is frozen."""
        while self.thawed is not None:
            await self.thawed.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.thawed = asyncio.Event()

    def thaw(self) -> None:
        """SIGCONT."""
        if self.thawed is not None:
            self.thawed.set()
            self.thawed = None

    def arrange(self, newer: Arrangement) -> None:
        """Takes an arrangement, as ``TaskContext`` and ``Server`` do."""
        if newer.number <= self.arrangement.number or not self.alive:
            return
        self.arrangement = newer
        self.runs.rearranged()
        self.world.arranged(self)

    def workers(self) -> Mapping[TaskName, str]:
        """Returns the workers that stay, each with its process if that joined."""
        return {
            task: f"{member.incarnation:x}" if member.incarnation else ""
            for task, member in self.arrangement.members.items()
            if is_worker(task) and not member.leaves
        }

    async def leave(self, grace_s: float) -> None:
        """SIGTERM: hands over, lets its loops end, and ends, after its grace anyway."""
        self.leaves = True
        self.runs.hand_over()
        self.drained.set()
        for loop in list(self.loops.values()):
            if not loop.order.HasField("sync"):
                loop.leave()
        ending = [loop.over.wait() for loop in self.loops.values()]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ending), grace_s)
        await self.runs.wait_handed_over(grace_s)
        await asyncio.sleep(0.5)  # for what is on its way

    def answers(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        """Answers a call."""
        if method == self.dies_at:
            self.kill()
        if method in self.runs.methods:
            return self.runs.methods[method](request)
        match method:
            case "RunLoop":
                return self.run_loop(request)
            case "DrainHold":
                return self.hold()
        return self.once(method, request)

    async def hold(self) -> AsyncIterator[Frame]:
        self.held_by += 1
        try:
            yield EMPTY
            await self.drained.wait()
            yield EMPTY
            await asyncio.Event().wait()
        finally:
            self.held_by -= 1

    async def once(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        if method == self.hangs_at:
            await asyncio.Event().wait()
        answer = self.methods.get(method)
        yield EMPTY if answer is None else await answer(request)

    async def status(self, request: Frame) -> Frame:
        status = pb.TaskStatus(task=self.task, state="ready")
        if self.leaves:
            status.state = "draining"
        status.incarnation = self.incarnation
        return frame(task_status=status)

    async def cluster_status(self, request: Frame) -> Frame:
        missing = [task for task in self.arrangement.members if not self.reaches(task)]
        return frame(cluster_status=pb.ClusterStatus(missing=missing))

    async def open_gate(self, request: Frame) -> Frame:
        order = body_of(request)
        self.terms.check(order.run, order.term)
        self.gate = order
        return EMPTY

    async def register(self, request: Frame) -> Frame:
        body = body_of(request)
        if body.members.arrangement:
            self.arrange(arrangement_in(body.members))
        self.handles.add(body.handle)
        return EMPTY

    async def unregister(self, request: Frame) -> Frame:
        self.handles.discard(body_of(request).handle)
        return EMPTY

    async def variables(self, request: Frame) -> Frame:
        row = pb.VariableInfo(name=STEP, version=len(self.updates or ()))
        return frame(variable_table=pb.VariableTable(variables=[row]))

    async def ask_data(self, request: Frame) -> Frame:
        return frame(data_deal=await self.dealers.ask(body_of(request)))

    async def open_data(self, request: Frame) -> Frame:
        self.dealers.open(body_of(request))
        self.runs.note(request)
        return EMPTY

    async def order_loop(self, request: Frame) -> Frame:
        order = body_of(request)
        supervisor = self.runs.find(order.run)
        assert supervisor is not None
        supervisor.order(order)
        return EMPTY

    def reaches(self, task: TaskName) -> bool:
        return self.world.answers(task) and not self.world.is_cut(self.task, task)

    def known_updates(self) -> int:
        """Returns how many updates the run has, as a journal here says."""
        standby = self.runs._standbys.get(RUN)
        known = self.runs.find(RUN) if standby is None else standby.supervisor
        return 0 if known is None else known.record.row().steps

    # ------------------------------------------------------------ steps

    async def make(
        self, handle: str, step: int, batches: tuple[int, ...], version: int | None
    ) -> None:
        """Makes an update that has come."""
        self.apply(handle, step, batches, version)

    def apply(
        self, handle: str, step: int, batches: tuple[int, ...], version: int | None
    ) -> None:
        """Applies an update whole, or not at all, and none that had its number."""
        if handle not in self.handles:
            raise InvalidProgramError(f"no program '{handle}'", task=self.task)
        if self.updates is None:
            raise UninitializedError("it was started again", task=self.task)
        assert version is None or version == len(self.updates), (
            "not the same everywhere"
        )
        if (handle, step) in self.applied:
            return
        self.applied.add((handle, step))
        self.updates.append(batches)
        self.world.updated_at = self.world.clock.now()
        self.world.keep(self.task, self.updates)

    # ------------------------------------------------------------ loops

    async def run_loop(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        if self.leaves:
            raise TaskLostError(f"{self.task} is being stopped", task=self.task)
        self.terms.begin(order.run, order.term, order.loop)
        if order.handle not in self.handles:
            raise InvalidProgramError(f"no program '{order.handle}'", task=self.task)
        self.world.begun.append(order.loop)
        loop = self.loops[order.loop] = SimulatedLoop(self, order)
        for early in self.early.pop(order.loop, []):
            self.tell(loop, early)
        self.spawn(loop.work())
        async for report in loop.told.stream():
            yield report

    async def stop_loop(self, request: Frame) -> Frame:
        told = body_of(request)
        self.terms.check(told.run, told.term, takes_over=told.takes_over)
        loop = self.loops.get(told.loop)
        if told.account:
            if loop is not None:
                loop.stop(pause=told.pause)
            reports = self.ended.get(told.loop) if loop is None else loop.told
            if reports is None:
                raise TaskLostError("no such loop", task=self.task, loop=told.loop)
            return await reports.account(told.after, told.timeout_s)
        if told.go_on:
            stood = loop is not None and loop.go_on(told.go_on)
            halted = told.go_on if stood else 0
            return frame(loop_report=pb.LoopReport(halted=halted))
        if loop is not None:
            self.tell(loop, told)
        elif told.loop and told.loop not in self.ended:  # before it begins
            self.early.setdefault(told.loop, []).append(told)
        elif not told.loop:
            return frame(loop_report=known_of_run(self.terms, told))
        return EMPTY

    def tell(self, loop: "SimulatedLoop", told: pb.StopLoop) -> None:
        """Tells a loop that there is, or that begins now."""
        if told.lost:
            loop.gone.add(TaskName(told.lost))
        elif told.halt:
            loop.halt_asked = told.halt
        else:
            loop.stop(pause=told.pause)


class SimulatedLoop:
    """A loop of a worker, or the one that decides in synchronous training."""

    def __init__(self, process: RunProcess, order: pb.RunLoop) -> None:
        self.process, self.order, self.world = process, order, process.world
        self.told = LoopReports(process.world.clock)
        self.stops = self.pauses = self.leaves = False
        self.halt_asked = self.halted = 0
        self.gone = set[TaskName]()
        self.news, self.over = asyncio.Event(), asyncio.Event()
        self.done = 0
        self.master = self.world.processes[TaskName(order.master)]
        self.heard_s = self.world.clock.now()

    def leave(self) -> None:
        """Ends after its step, and says that its task does."""
        self.leaves = True
        self.stop(pause=False)

    def stop(self, *, pause: bool) -> None:
        self.pauses |= pause and not self.stops
        self.stops |= not pause or not self.order.HasField("sync")
        self.news.set()

    def go_on(self, number: int) -> bool:
        stood = self.halted == number
        if stood:
            self.halted = 0
        if self.halt_asked == number:
            self.halt_asked = 0
        self.news.set()
        return stood

    async def work(self) -> None:
        error: JGError | None = None
        try:
            if self.order.HasField("sync"):
                await self.decide()
            elif self.order.batch_feed:
                await self.contribute()
            else:
                await self.train()
        except JGError as caught:
            error = caught
        self.process.loops.pop(self.order.loop, None)
        self.process.ended[self.order.loop] = self.told
        self.told.end(error)
        self.over.set()

    def report(self, state: str, **more: Any) -> None:
        self.told.send(pb.LoopReport(state=state, data_done=self.done, **more))

    async def stand(self, number: int) -> None:
        """Stands still until told to go on."""
        self.halted, began = number, self.world.clock.now()
        self.told.tell(
            pb.LoopReport(state="running", data_done=self.done, halted=number)
        )
        while self.halted == number and not (self.stops or self.pauses):
            self.news.clear()
            await self.news.wait()
        self.halted = 0
        stood_s = self.world.clock.now() - began
        assert stood_s < STOOD_S, f"{self.order.loop} stood still for {stood_s} s"

    async def push(self, handle: str, batches: tuple[int, ...], version: Any) -> None:
        """Lets every ps apply an update, each at its time."""

        self.process.steps += 1
        step = self.process.steps

        async def one(task: TaskName) -> None:
            await self.world.travel(self.process, task)
            await self.world.at(task).make(handle, step, batches, version)
            self.world.applied(self.process)
            await self.world.travel(self.process, task)

        pushes = map(one, self.world.shards(self.process, handle))
        for error in await asyncio.gather(*pushes, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    async def train(self) -> None:
        order, heard = self.order, self.world.clock.now()
        leases = list[Lease]()
        step = order.first_step
        while not self.stops:
            if self.halt_asked:
                number, self.halt_asked = self.halt_asked, 0
                await self.stand(number)
                continue
            if not leases:
                ask = pb.AskData(run=order.data_run, loop=order.loop, done=self.done)
                ask.batches, ask.idle = 2, True
                try:
                    reply = await self.world.ask(
                        self.process,
                        TaskName(order.dealer),
                        "AskData",
                        frame(ask_data=ask),
                    )
                except JGError:
                    if self.world.clock.now() - heard > SILENT_S:
                        break
                    await asyncio.sleep(0.5)
                    continue
                heard = self.world.clock.now()
                deal = body_of(reply)
                if deal.over:
                    self.report("done")
                    return
                leases = [*dealt_of(deal, BatchOrder(self.world.plan))]
                for lease in leases:
                    self.world.dealt.update(self.world.numbers(lease))
                continue
            lease, *rest = leases
            first, *others = self.world.numbers(lease)
            await asyncio.sleep(self.world.chance.uniform(0.1, 0.9))
            await self.push(order.handle, (first,), None)
            self.done += 1
            self.told.add(step, [])
            step += 1
            one = Lease(lease.epoch, lease.slot, lease.first, 1)
            self.report("running", done=rows_of([one]))
            more = Lease(lease.epoch, lease.slot, lease.first + 1, lease.batches - 1)
            leases = [more, *rest] if others else rest
        self.report("left" if self.leaves else "stopped")

    async def contribute(self) -> None:
        """Goes on as long as the loop that decides does."""
        decides = partial(self.world.decides, self.order.data_run)
        while not (self.stops or not decides()):
            await asyncio.sleep(0.1)
            for task in self.world.shards(self.process, self.order.handle):
                if not self.process.reaches(task):
                    raise TaskLostError(f"{task} is gone", task=task)
        self.report("left" if self.leaves else "stopped")

    async def decide(self) -> None:
        order, sync = self.order, self.order.sync
        replicas = dict(zip(sync.handles, map(TaskName, sync.tasks), strict=True))
        plan = SlotPlan.from_dict(json.loads(order.data_plan))
        data = SyncData(plan, replicas, json.loads(sync.data_position))
        version, left = sync.version, order.steps
        decided_s = self.world.clock.now()
        self.world.begins(self)
        halts = sync.halt_every[0] if sync.halt_every else 0
        while left and not (self.stops or self.pauses):
            unheard_s = self.unheard_s()
            if unheard_s >= END_S:
                break
            if unheard_s >= LEASE_S:
                await asyncio.sleep(0.5)
                continue
            present = [h for h, t in replicas.items() if self.is_there(t)]
            if not present:
                self.report("alone", data_position=json.dumps(data.state()))
                return
            there = [h for h in present if self.contributes(replicas[h])]
            if len(there) < min(sync.wanted, len(present)):
                waits_s = self.world.clock.now() - decided_s
                assert waits_s < WAITED_S, f"{order.loop} waits for who has left"
                await asyncio.sleep(0.1)
                continue
            decided_s = self.world.clock.now()
            await asyncio.sleep(self.world.chance.uniform(0.1, 0.9))
            counted = list[int]()
            for handle in there[: sync.wanted]:
                together = sync.wanted == len(replicas)
                for lease in data.deal(handle, 1, together=together):
                    counted += self.world.numbers(lease)
            await self.push(order.handle, tuple(counted), version)
            for number in counted:
                data.counted((number,))
            self.told.add(version, [])
            version, left = version + 1, left - 1
            self.report("running", data_position=json.dumps(data.state()))
            if halts and left and version % halts == 0:
                await self.stand(version)
        state = "done" if not left else "stopped" if self.stops else "paused"
        self.report(state, data_position=json.dumps(data.state()))

    def unheard_s(self) -> float:
        """Returns for how long nothing is heard of the master that began this loop."""
        now, task = self.world.clock.now(), self.master.task
        if self.master.alive and not self.world.is_cut(self.process.task, task):
            self.heard_s = now
        return now - self.heard_s

    def contributes(self, task: TaskName) -> bool:
        """Whether a worker has begun to contribute to these updates, and goes on."""
        loops = self.world.processes[task].loops.values()
        return any(one.order.data_run == self.order.loop for one in loops)

    def is_there(self, task: TaskName) -> bool:
        return task not in self.gone and self.process.reaches(task)


class RunPeers:
    """Calls of a process to others, as a ``StandbyPeers``."""

    def __init__(self, process: RunProcess) -> None:
        self.process, self.world = process, process.world
        self.task, self.incarnation = process.task, process.incarnation
        self.dealers = process.dealers

    def tasks(self) -> Iterable[TaskName]:
        return list(self.process.arrangement.members)

    def workers(self) -> Mapping[TaskName, str]:
        return self.process.workers()

    def ps(self) -> Mapping[int, bool]:
        members = self.process.arrangement.members.items()
        return {
            int(task.rpartition(":")[2]): not one.leaves
            for task, one in members
            if is_ps(task)
        }

    def leavers(self) -> Collection[TaskName]:
        members = self.process.arrangement.members.items()
        return [task for task, one in members if one.incarnation or one.leaves]

    def note(self, kind: str, text: str, *, level: int = 0) -> None:
        self.world.note(text)

    def address(self, task: TaskName) -> Address:
        return Address(task)

    async def call(
        self, task: TaskName, method: str, request: Frame, *, timeout_s: float = 5.0
    ) -> Frame:
        return await self.world.ask(
            self.process, task, method, request, timeout_s=timeout_s
        )

    def stream(
        self, task: TaskName, method: str, request: Frame
    ) -> AsyncIterator[Frame]:
        return self.world.stream(self.process, task, method, request)

    async def register(self, request: Frame) -> Frame:
        order = copied(request)
        members = members_message(self.process.arrangement)
        body_of(order).members.CopyFrom(members)
        driver = TaskName(body_of(order).program.driver)
        participants = [driver, *self.world.participants(body_of(order).program)]
        calls = (self.call(t, "RegisterProgram", order) for t in participants)
        await asyncio.gather(*calls)
        return EMPTY

    def loop(self, order: pb.RunLoop) -> AsyncIterator[Frame]:
        watched = bool(order.data_run) and not order.dealer
        order.dealer = order.dealer or self.task
        order.master = self.task
        request = frame(run_loop=order)
        reports = self.stream(TaskName(order.task), "RunLoop", request)
        if watched:
            return self.dealers.get(order.data_run).watch(
                order.loop, TaskName(order.task), reports
            )
        return reports
