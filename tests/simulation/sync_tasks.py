"""Simulated ps of synchronous training: gates, and on the first of them the arbiter."""

from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from jgraph.coordination import aggregation, sync_gate
from jgraph.coordination.aggregation import Arbiter, Step
from jgraph.coordination.slots import Lease
from jgraph.coordination.sync_data import SyncData
from jgraph.coordination.sync_gate import SyncGate
from jgraph.errors import RunOverError, TaskLostError
from jgraph.graph.ir import TaskName
from tests.simulation.network import Message

if TYPE_CHECKING:
    from tests.simulation.sync_world import SyncWorld

PATIENCE_S: Final = 60.0
_APPLY_S: Final = 0.01


class GatedShard:
    """A ps: what each update of its variables was made of.

    Attributes:
      life: of the variables; what is older is of gates that are no more.
      history: the batches of each update, in the order in which they were averaged.
    """

    def __init__(self, world: "SyncWorld", task: TaskName) -> None:
        self.world = world
        self.task = task
        self.life = -1
        self.history: list[tuple[int, ...]] = []
        self.process = world.net.start(task, self.receive, self.lost)

    def forget(self) -> None:
        """Loses what it holds."""
        self.life = -1

    def begin(self, life: int, history: list[tuple[int, ...]]) -> None:
        """Makes the variables, and a gate for them."""
        self.life = life
        self.history = list(history)
        self.gate = SyncGate(len(history))
        self.readers: dict[Step, TaskName] = {}
        self.came: tuple[int, tuple[int, ...]] = (0, ())
        self.kept: dict[Step, tuple[int, tuple[int, ...]]] = {}
        self.settled: list[tuple[TaskName, Message]] = []

    def receive(self, src: TaskName, message: Message) -> None:
        kind, loop, life, *rest = message
        if kind == "ask":
            _, batches, idle, number = message[2:]
            dealt = self.world.leader.deal(loop, batches, idle=idle)
            self.send(src, ("deal", loop, number, dealt))
            return
        if life != self.life:
            return
        match kind:
            case "read":
                self.readers[loop, rest[0]] = src
                self.take(sync_gate.StepAsked((loop, rest[0])))
            case "push":
                self.contribute(src, (loop, rest[0]), rest[1], rest[2])
            case "decided":
                self.take(sync_gate.Decided(rest[0]))
            case "voided":
                self.take(sync_gate.Voided(rest[0]))
                self.settle()
            case "closed":
                self.settle()
                self.take(sync_gate.Closed(RunOverError("the run is over")))
            case "contributed" | "applied" | "gone":
                self.world.leader.hear(src, kind, loop, rest)

    def contribute(
        self, src: TaskName, step: Step, batch: int, versions: tuple[int, ...]
    ) -> None:
        self.came = batch, versions
        self.take(sync_gate.ContributionCame(step, batch))
        self.take(sync_gate.StepEnded(step))
        done = ("done", step[0], self.life, step[1])
        if step in self.kept:
            self.settled.append((src, done))
        else:
            self.send(src, done)

    def take(self, event: sync_gate.Event) -> None:
        for instruction in self.gate.handle(event):
            match instruction:
                case sync_gate.LetIn((loop, number) as step):
                    value = ("value", loop, self.life, number, self.gate.version)
                    self.send(self.readers.pop(step), value)
                case sync_gate.Refuse((loop, number) as step, error):
                    lost = str(error.details.get("task", ""))
                    refused = ("refused", loop, self.life, number, lost)
                    self.send(self.readers.pop(step), refused)
                case sync_gate.Keep(step):
                    self.kept[step] = self.came
                case sync_gate.Drop(step):
                    self.kept.pop(step, None)
                case sync_gate.Tell(step, version, slot):
                    self.tell("contributed", step, version, slot)
                case sync_gate.Choose(steps):
                    chosen = [(step, *self.kept[step]) for step in steps]
                    self.kept.clear()
                    seconds = self.world.sim.chance.random() * _APPLY_S
                    apply = partial(self.apply, self.life, chosen)
                    self.world.sim.later(seconds, apply)

    def apply(self, life: int, chosen: list[tuple[Step, int, tuple[int, ...]]]) -> None:
        """Applies the mean of these; each was computed from just these variables."""
        if life != self.life or not self.process.alive:
            return
        version = len(self.history)
        for step, batch, versions in chosen:
            read = set(versions)
            assert read == {version}, f"{batch} of {step} was read at {read}"
        replicas = [step[0] for step, _, _ in chosen]
        assert len(set(replicas)) == len(replicas), f"twice of one: {replicas}"
        self.history.append(tuple(batch for _, batch, _ in chosen))
        self.settle()
        self.take(sync_gate.UpdateApplied())
        self.tell("applied", version)

    def settle(self) -> None:
        settled, self.settled = self.settled, []
        for src, message in settled:
            self.send(src, message)

    def tell(self, kind: str, *what: Any) -> None:
        """Tells the arbiter, which may be here."""
        leader = self.world.leader
        if leader.task == self.task:
            leader.hear(self.task, kind, "", list(what))
        else:
            self.send(leader.task, (kind, "", self.life, *what))

    def send(self, task: TaskName, message: Message) -> None:
        self.world.net.send(self.process, task, message)

    def lost(self, task: TaskName) -> None:
        leader = self.world.leader
        if leader.task == self.task:
            leader.lost(task)
        elif task == leader.task and self.life == leader.life:
            self.settle()
            self.take(sync_gate.Closed(TaskLostError(f"{task} was lost", task=task)))


class Leader:
    """The loop of synchronous training, as ``SyncLoop`` makes it of machines.

    Attributes:
      task: the ps that it runs on.
    """

    def __init__(
        self,
        world: "SyncWorld",
        loops: dict[str, TaskName],
        position: dict[str, Any] | None,
        steps: int,
    ) -> None:
        self.world = world
        self.life = world.life
        self.task = next(iter(world.shards))
        self.loops = loops
        self.data = SyncData(world.plan, loops, position)
        self.version = len(world.shards[self.task].history)
        self.machine = Arbiter(
            world.shards,
            loops,
            self.data,
            wanted=len(loops) - world.backups,
            version=self.version,
            steps=steps,
        )
        self.applied: Counter[int] = Counter()
        self.is_applying = False
        self.progress_at = world.sim.now
        self.answer: tuple[Lease, ...] | None = None
        self.events: deque[aggregation.Event] = deque()
        self.handling = False

    def hear(self, src: TaskName, kind: str, loop: str, rest: list[Any]) -> None:
        match kind:
            case "contributed":
                self.take(aggregation.Contributed(src, *rest))
            case "gone":
                self.take(aggregation.ReplicaLost(loop))
            case "applied":
                self.applied[rest[0]] += 1
                if self.applied[rest[0]] == len(self.world.shards):
                    self.version, self.is_applying = rest[0] + 1, False
                    self.progress_at = self.world.sim.now
                    self.take(aggregation.Applied())

    def deal(self, loop: str, batches: int, *, idle: bool) -> tuple[Lease, ...] | None:
        """Answers a replica that asks for batches."""
        self.take(aggregation.DataAsked(loop, batches, idle))
        return self.answer

    def lost(self, task: TaskName) -> None:
        """A task is not reached any more: a ps, or maybe that of a replica."""
        if task in self.world.shards and self.life == self.world.life:
            error = TaskLostError(f"{task} was lost", task=task)
            self.perform(aggregation.End("failed", error))
        for loop, at in self.loops.items():
            if at == task:
                self.take(aggregation.ReplicaLost(loop))

    def look(self) -> None:
        """Time passes."""
        if self.world.sim.now - self.progress_at > PATIENCE_S:
            self.take(aggregation.TimeIsUp(PATIENCE_S))

    def take(self, event: aggregation.Event) -> None:
        self.events.append(event)
        if self.handling:
            return
        self.handling = True
        while self.events:
            for instruction in self.machine.handle(self.events.popleft()):
                self.perform(instruction)
        self.handling = False

    def perform(self, instruction: aggregation.Instruction) -> None:
        match instruction:
            case aggregation.Decide(_, steps):
                self.is_applying = True
                self.tell_all("decided", steps)
            case aggregation.Void(step):
                self.tell_all("voided", step)
            case aggregation.DealData(_, leases):
                self.answer = leases
            case aggregation.End(state, error):
                self.tell_all("closed")
                self.world.ended(self, state, error)

    def tell_all(self, kind: str, *what: Any) -> None:
        here = self.world.shards[self.task]
        message = (kind, "", self.life, *what)
        for shard in self.world.shards:
            if shard == self.task:
                here.receive(shard, message)
            else:
                here.send(shard, message)
