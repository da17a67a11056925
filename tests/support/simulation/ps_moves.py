"""Runs on a simulated cluster whose ps join and leave: their variables move.

What decides and asks is what servers have: ``RunRescaler`` and ``Mover``. Simulated is
what a ps does with variables: it keeps them by container, copies, renames and drops
them; and each program says for how many ps it was cut.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from jgraph.cluster.polling import Polling
from jgraph.errors import (
    CopyLostError,
    InvalidProgramError,
    JGError,
    TaskLostError,
    UninitializedError,
)
from jgraph.graph.device import is_ps, is_worker
from jgraph.graph.ir import TaskName
from jgraph.plan.placement.rearrange import arrangements
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.resumable.dialing import RESUME_S
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.program_codec import encode_program
from jgraph.server.runs.ps_setup import ps_task
from jgraph.server.runs.saving.checkpointer import STEP
from tests.support.simulation.members import ElasticWorld
from tests.support.simulation.run_tasks import EMPTY, RUN, RunProcess

LEAST: Final = 1
MOST: Final = 3
SIZES: Final = {STEP: 8, "a": 500, "b": 400, "c": 300, "d": 200, "e": 100}
"""Bytes of each variable."""
HOMES: Final = arrangements(SIZES, [ps_task(n) for n in range(MOST)], LEAST, [STEP])
CONTAINER: Final = "c"
SLOW_S: Final = 1.0
"""An update takes so long at most; most take a hundredth of that."""
LET_GO_S: Final = 120.0
"""A ps that is told to end waits so long for who holds it."""
HEARD_S: Final = 0.02
"""Longer than a message takes: who holds a task instead of another does so at once."""

Updates = list[tuple[int, ...]]


class MovingProcess(RunProcess):
    """A start of a task, whose variables move.

    Attributes:
      containers: updates of each variable, by container and name.
      first: for how many ps the first programs are cut.
      cuts: the same for each other program.
      streams: who gives what this one takes.
      sent: what it has sent of each variable, by stream.
      numbers: how many records it has sent, or taken, of each stream.
      under_way: updates of each program that are begun, and not made yet.
      rescaled: where it is.
    """

    def __init__(
        self, world: "RescaledWorld", task: TaskName, incarnation: int
    ) -> None:
        super().__init__(world, task, incarnation)
        self.first = world.first
        self.containers: dict[str, dict[str, Updates]] = {}
        self.cuts: dict[str, int] = {}
        self.streams: dict[str, TaskName] = {}
        self.sent: dict[str, dict[str, Updates]] = {}
        self.numbers: dict[str, int] = {}
        self.under_way: dict[str, set[asyncio.Task[None]]] = {}
        self.rescaled = world
        self.methods |= {
            "TakeRecords": self.take,
            "CopyAhead": self.copy_ahead,
            "EndRecords": self.end_records,
            "MoveVariables": self.move,
            "Reset": self.reset,
        }

    @property
    def own(self) -> dict[str, Updates]:
        """The variables of the run."""
        return self.containers.setdefault(CONTAINER, {})

    async def leave(self, grace_s: float) -> None:
        """As any task; but a ps is held until what it had is elsewhere."""
        if not is_ps(self.task):
            await super().leave(grace_s)
            return
        until = self.world.clock.now() + LET_GO_S
        if self.incarnation % 2:  # who told it to leave ends it when it has nothing
            await self.gave_away(until)
        self.runs.hand_over()
        self.drained.set()
        free = 0
        while free < 2 and self.world.clock.now() < until:
            free = 0 if self.held_by else free + 1  # who takes over holds it at once
            await asyncio.sleep(HEARD_S)

    async def gave_away(self, until: float) -> None:
        """Waits until it has no variable of the run."""
        polling = Polling(0.1, until - self.world.clock.now(), self.world.clock)
        while self.own and await polling.again():
            pass

    async def register(self, request: Frame) -> Frame:
        body = body_of(request)
        self.cuts[body.handle] = int(body.program.name)
        return await super().register(request)

    async def unregister(self, request: Frame) -> Frame:
        """What was begun of its steps changes something yet, unless that settles."""
        body = body_of(request)
        reply = await super().unregister(request)
        if body.settle and (begun := self.under_way.get(body.handle)):
            await asyncio.wait(begun)
        return reply

    async def make(
        self, handle: str, step: int, batches: tuple[int, ...], version: int | None
    ) -> None:
        """Makes an update, for as long as that takes, whoever waits for it.

        Raises:
          TaskLostError: this process is gone before it is made.
        """
        if handle not in self.handles:
            raise InvalidProgramError(f"no program '{handle}'", task=self.task)
        work = self.spawn(self.computed(handle, step, batches, version))
        begun = self.under_way.setdefault(handle, set())
        begun.add(work)
        work.add_done_callback(begun.discard)
        await asyncio.wait({work, self.dead}, return_when=asyncio.FIRST_COMPLETED)
        if not self.alive:
            raise TaskLostError(f"{self.task} is gone", task=self.task)
        work.result()

    async def computed(
        self, handle: str, step: int, batches: tuple[int, ...], version: int | None
    ) -> None:
        """Computes an update, and applies it."""
        chance = self.world.chance
        slow_s = SLOW_S if chance.random() < self.rescaled.slow_share else 0.01
        await asyncio.sleep(chance.uniform(0.0, slow_s))
        self.apply(handle, step, batches, version)

    def apply(
        self, handle: str, step: int, batches: tuple[int, ...], version: int | None
    ) -> None:
        """Applies an update to the variables that are here as the program says."""
        ps = self.cuts.get(handle, self.first)
        names = [name for name, home in HOMES[ps].items() if home == self.task]
        if lacking := [name for name in names if name not in self.own]:
            raise UninitializedError(f"{lacking[0]} is not here", task=self.task)
        if (handle, step) in self.applied:
            return
        self.applied.add((handle, step))
        for name in names:
            here = self.own[name]
            assert version is None or version == len(here), "not the same everywhere"
            here.append(batches)
            self.rescaled.made[name][batches] += 1
        self.world.updated_at = self.world.clock.now()

    async def variables(self, request: Frame) -> Frame:
        rows = [
            pb.VariableInfo(name=name, version=len(updates))
            for name, updates in self.own.items()
        ]
        return frame(variable_table=pb.VariableTable(variables=rows))

    # ------------------------------------------------------------ copies

    async def take(self, request: Frame) -> Frame:
        order = body_of(request)
        self.streams[order.stream] = TaskName(order.src)
        self.containers[order.stream], self.numbers[order.stream] = {}, 0
        return EMPTY

    async def copy_ahead(self, request: Frame) -> Frame:
        """Sends values that differ from those sent, one after the other."""
        order, sent = body_of(request), 0
        if order.begins:
            self.sent[order.stream] = {}
        if order.stream not in self.sent:
            raise CopyLostError("it was started again", task=self.task)
        number = self.numbers.get(order.stream, 0)
        for name in () if order.begins else order.names:
            known = self.sent.get(order.stream, {}).get(name)
            own = self.own.get(name)
            if own is not None and own != known:
                value = list(own)
                await self.send(order, name, value)
                if order.stream not in self.sent:
                    raise CopyLostError("it records nothing any more", task=self.task)
                self.sent[order.stream][name] = value
                number, sent = number + 1, sent + SIZES[name]
            if not order.ends:
                await asyncio.sleep(self.world.chance.uniform(0.0, 0.2))
        self.numbers[order.stream] = number
        copied = pb.CopyAhead(stream=order.stream, sent=sent, number=number)
        return frame(copy_ahead=copied)

    async def send(self, order: pb.CopyAhead, name: str, value: Updates) -> None:
        """Sends the value of a variable to who takes it."""
        there = TaskName(order.backup)
        await self.world.travel(self, there)
        process = self.world.at(there)
        assert isinstance(process, MovingProcess)
        if process.streams.get(order.stream) != self.task:
            raise CopyLostError("it takes nothing", task=there)
        process.containers[order.stream][name] = value
        process.numbers[order.stream] += 1

    async def end_records(self, request: Frame) -> Frame:
        order = body_of(request)
        if order.stream not in self.streams:
            raise CopyLostError("it keeps no copy", task=self.task)
        number = self.numbers[order.stream]
        ended = pb.EndRecords(stream=order.stream, number=number)
        return frame(end_records=ended)

    async def move(self, request: Frame) -> Frame:
        order = body_of(request)
        assert order.beside
        moved = self.containers.pop(order.container, {})
        self.containers.setdefault(order.into, {}).update(moved)
        return EMPTY

    async def reset(self, request: Frame) -> Frame:
        order = body_of(request)
        for container in order.containers:
            for known in (self.streams, self.sent, self.numbers):
                known.pop(container, None)
            if not order.names:
                self.containers.pop(container, None)
            for name in order.names:
                self.containers.get(container, {}).pop(name, None)
        return EMPTY


@dataclass
class RescaledWorld(ElasticWorld):
    """A run on tasks of which ps and workers join and leave.

    Attributes:
      client_ps: on how many ps the client looks for variables.
      switches: numbers of ps that the run has got.
      slow_share: of updates, which take longer than others.
      made: updates of each variable, since the run went back, if it did.
    """

    client_ps: int = 0
    switches: list[int] = field(default_factory=list)
    slow_share: float = 0.1
    made: dict[str, Counter[tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first = self.client_ps = self.ps
        self.is_over = False
        super().__post_init__()
        self.give({name: [] for name in SIZES})
        self.do(self.replace())

    def process(self, task: TaskName, number: int) -> RunProcess:
        return MovingProcess(self, task, number)

    def moving(self, task: TaskName) -> MovingProcess:
        """Returns the process of a task.

        Raises:
          TaskLostError: there is none.
        """
        process = self.at(task)
        assert isinstance(process, MovingProcess)
        return process

    def shards(self, process: RunProcess, handle: str) -> list[TaskName]:
        assert isinstance(process, MovingProcess)
        ps = process.cuts.get(handle, self.first)
        return [ps_task(index) for index in range(ps)]

    async def replace(self) -> None:
        """Somebody starts a ps where one that the run needs is no member for long."""
        for _ in range(2 * int(LET_GO_S)):
            await asyncio.sleep(5.0)
            master, members = self.master(), self.described.members
            with suppress(JGError):
                members = self.at(self.registrar).arrangement.members
            run = None if master is None else master.runs.find(RUN)
            ps = 0 if run is None else run.rescaler.ps
            if any(ps_task(index) not in members for index in range(ps)):
                self.do(self.join(job="ps"))

    def take(self, task: TaskName, incarnation: int) -> RunProcess:
        """As of any run; one that was given up hears of it soon, and ends."""
        before = self.processes.get(task)
        if before is not None and before.alive:
            self.do(self.hear_late(before))
        return super().take(task, incarnation)

    async def hear_late(self, process: RunProcess) -> None:
        """A process ends that another has the index of."""
        await asyncio.sleep(self.chance.uniform(0.1, 3.0))
        await process.awake()
        self.end(process)

    def kill(self, task: TaskName, away_s: float) -> None:
        """As of any run; a step of the master's own worker is told of by nobody."""
        self.torn += is_worker(task) and self.is_up(task)
        super().kill(task, away_s)

    def cut(self, one: TaskName, other: TaskName, seconds: float) -> None:
        """As of any run; the step of a worker may be on other ps alone.

        The worker is given up then, and if the master is lost as well nobody tells.
        """
        super().cut(one, other, seconds)
        self.torn += seconds > RESUME_S

    def participants(self, program: pb.Program) -> list[TaskName]:
        return [ps_task(index) for index in range(int(program.name))]

    # ------------------------------------------------------------ the client

    def home(self, shard: str) -> TaskName:
        return HOMES[self.client_ps][shard]

    def moved(self, ps: int) -> None:
        self.client_ps = ps

    @property
    def restores(self) -> int:
        """How often the run went back to a checkpoint."""
        master = self.master()
        run = None if master is None else master.runs.find(RUN)
        return 0 if run is None else run.restores

    def held(self) -> dict[str, Updates | None]:
        if self.is_over:  # a ps may have left since
            return dict(self.client.saved.updates)
        found: dict[str, Updates | None] = {}
        for name in SIZES:
            found[name] = None
            with suppress(TaskLostError):
                found[name] = self.moving(self.home(name)).own.get(name)
        return found

    def held_last(self) -> list[Updates | None]:
        return list(self.held().values())

    def give(self, updates: Mapping[str, Updates]) -> None:
        self.made = {name: Counter(one) for name, one in updates.items()}
        for name, one in updates.items():
            self.moving(self.home(name)).own[name] = list(one)

    def order(self) -> pb.OpenRun:
        order = super().order()
        order.ps.now = self.first
        for name, nbytes in SIZES.items():
            order.ps.groups.add(variables=[name], nbytes=nbytes)
        for ps, homes in HOMES.items():
            order.ps.arrangements.add(
                ps=ps,
                homes=[int(home.rpartition(":")[2]) for home in homes.values()],
                shards=[ps_task(index) for index in range(ps)],
            )
        return order

    def programs(self, handle: str, task: TaskName) -> list[pb.RegisterProgram]:
        found = []
        for ps in HOMES:
            made, _ = encode_program(Program(str(ps), task, (), (), (), ()))
            one = pb.RegisterProgram(handle=handle, run=RUN, program=made, ps=ps)
            found.append(one)
        return found

    # ------------------------------------------------------------ the oracle

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith(f"run '{RUN}' is scaled from "):
            self.switches.append(int(text.split()[7]))

    def check(self, state: str) -> None:
        """As of any run, for each variable where it is; and it is there alone."""
        master = self.master()
        assert master is not None
        run = master.runs.find(RUN)
        assert run is not None
        self.client_ps = now = run.rescaler.ps
        self.is_over = state == "done"
        super().check(state)
        for name, updates in self.held().items():
            assert updates is not None
            differ = (
                self.made[name] - Counter(updates),
                Counter(updates) - self.made[name],
            )
            assert not any(differ), (
                f"of {name} {differ[0]} are lost, {differ[1]} double"
            )
        for name in SIZES:
            home = HOMES[now][name]
            has = {task for task in self.tasks if self.has(task, name)}
            assert has <= {home}, f"{name} is on {has}, and not on {home} alone"

    def has(self, task: TaskName, name: str) -> bool:
        """Whether a variable is at a task."""
        try:
            return name in self.moving(task).own
        except TaskLostError:
            return False

    def check_gates(self) -> None:
        if self.synchronous:
            return
        shards = [ps_task(index) for index in range(self.client_ps)]
        for task in shards:
            gate = self.processes[task].gate
            if gate is None:
                assert self.client_ps == self.first, f"no gate at {task}"
            else:
                assert list(gate.shards) == shards, f"{task} has another gate"

    def staying_ps(self) -> list[TaskName]:
        """Returns the ps that are members, there, and not told to leave."""
        try:
            members = self.at(self.registrar).arrangement.members
        except JGError:
            return []
        return [
            task
            for task, one in members.items()
            if is_ps(task) and self.answers(task) and not one.leaves
        ]
