"""Simulated tasks: shards that count, and workers whose loops the machines drive."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from jgraph.coordination.data.slots import Lease, SlotPlan
from jgraph.coordination.run.succession import MasterTerms
from jgraph.coordination.step.replica_loop import (
    End,
    Event,
    LoopStarted,
    ReplicaLoop,
    Report,
    StartStep,
    StepAcknowledged,
    StepComputed,
    StepFailed,
    StepNotStarted,
    StepUnwanted,
    StopAsked,
)
from jgraph.errors import FencedError, TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.testing.virtual_time import Simulation
from tests.support.simulation.network import Message, Network, Process

if TYPE_CHECKING:
    from tests.support.simulation.world import World


RUN: Final = "run"
_AHEAD: Final = 2
_ASK_AGAIN_S: Final = 0.1


class Run(Protocol):
    """A simulated run, as its tasks see it."""

    sim: Simulation
    net: Network
    plan: SlotPlan
    prefetch: int

    @property
    def shards(self) -> Collection[TaskName]:
        """The ps."""

    @property
    def loops_with(self) -> "type[Loop]":
        """What loops are made of."""

    def dealer_of(self, master: TaskName) -> TaskName:
        """Returns whom a loop that this master began asks for data."""

    def acknowledge(self, batch: int, life: int) -> None:
        """A worker heard from every ps that a step is over there."""

    def unreached(self, worker: TaskName, master: TaskName) -> None:
        """The call that reports of a worker answer has ended."""


class Shard:
    """A ps: how often each batch was applied to the variables that it holds.

    Attributes:
      life: of the variables; what is older writes to ones that nobody reads.
      dropped: loops whose steps are refused.
    """

    def __init__(self, world: "World", task: TaskName) -> None:
        self.world = world
        self.task = task
        self.counts: Counter[int] = Counter()
        self.life = -1
        self.applied: set[tuple[str, int]] = set()
        self.dropped: set[str] = set()
        self.process = world.net.start(task, self.receive, lambda _: None)

    def forget(self) -> None:
        """Loses what it holds."""
        self.life, self.counts, self.applied = -1, Counter(), set()
        self.dropped = set()

    def receive(self, src: TaskName, message: Message) -> None:
        kind, loop, life, step, *rest = message
        if kind == "read":
            self.world.net.send(self.process, src, ("value", loop, life, step, 0))
        elif kind == "push":
            if loop in self.dropped:
                return
            if life == self.life:
                assert (loop, step) not in self.applied, f"applied twice: {message}"
                self.applied.add((loop, step))
                self.counts[rest[0]] += 1
            self.world.net.send(self.process, src, ("done", loop, life, step))


@dataclass(eq=False)
class Step:
    """A step under way on a worker."""

    batch: int
    versions: dict[TaskName, int] = field(default_factory=dict)
    read: dict[TaskName, tuple[Any, ...]] = field(default_factory=dict)
    done: int = 0


class Loop:
    """The loop of one replica, as ``LoopRun`` and ``DataFeed`` make it of machines.

    A run with an odd number reads ahead, if it may.

    Args:
      worker: where it runs.
      name: of the loop.
      life: of the variables.
      master: who hears its reports.
      dealer: who deals out its data.
    """

    def __init__(
        self,
        worker: "Worker",
        name: str,
        life: int,
        master: TaskName,
        dealer: TaskName,
    ) -> None:
        self.worker = worker
        self.name = name
        self.life = life
        self.master = master
        self.dealer = dealer
        self.world = worker.world
        self.machine = ReplicaLoop(
            first_step=0,
            steps=10**6,
            report_every_s=0.05,
            prefetch=self.world.prefetch,
        )
        self.leases: deque[Lease] = deque()
        self.steps: dict[int, Step] = {}
        self.waiting: deque[int] = deque()
        self.uncomputed: deque[int] = deque()
        self.is_computing = False
        self.acknowledged: set[int] = set()
        self.begun: list[Lease] = []
        self.accounts: list[TaskName] = []
        self.taken = self.done = self.asked = 0
        self.asking = self.is_over = self.is_dry = self.has_ended = False

    def take(self, event: Event) -> None:
        for instruction in self.machine.handle(event, self.world.sim.now):
            match instruction:
                case StartStep(step):
                    self.waiting.append(step)
                    self.go_on()
                case Report():
                    self.report("running")
                case End(state, error):
                    self.has_ended = True
                    self.worker.loops.pop(self.name, None)
                    self.worker.ended[self.name] = self
                    lost = "" if error is None else str(error.details["task"])
                    self.report(state, lost)
                    for master in self.accounts:
                        self.account(master)

    def report(self, state: str, lost: str = "") -> None:
        told = ("report", self.name, self.done, self.leases_done(), state, lost)
        self.send(self.master, told)

    def leases_done(self) -> tuple[Lease, ...]:
        return tuple(self.begun[: self.done])

    def account(self, master: TaskName) -> None:
        """Tells another master what was done, when no more will be."""
        if self.has_ended:
            self.send(master, ("account", self.name, self.leases_done()))
        else:
            self.accounts.append(master)
            self.stop()

    def go_on(self) -> None:
        while self.waiting and self.leases:
            self.begin(self.waiting.popleft())
        if self.is_over:
            self.start_none(over=True)
        held = sum(lease.batches for lease in self.leases)
        idle = not held and self.done == self.taken
        wants = idle or (not self.is_dry and held < _AHEAD)
        if wants and not (self.asking or self.is_over or self.has_ended):
            self.asking = True
            self.asked += 1
            want = self.world.sim.chance.randint(1, 4)
            ask = ("ask", self.name, self.done, want, idle, self.asked)
            self.send(self.dealer, ask)

    def start_none(self, *, over: bool) -> None:
        while self.waiting:
            self.waiting.pop()
            self.take(StepNotStarted(over=over))

    def begin(self, step: int) -> None:
        self.uncomputed.append(step)
        lease, rest = self.leases.popleft().cut(1)
        if rest is not None:
            self.leases.appendleft(rest)
        number = self.world.plan.number(lease.epoch, lease.slot, lease.first)
        self.steps[step] = Step(number)
        self.begun.append(lease)
        self.taken += 1
        for shard in self.world.shards:
            self.send(shard, ("read", self.name, self.life, step))

    def send(self, task: TaskName, message: Message) -> None:
        self.world.net.send(self.worker.process, task, message)

    def given(self, step: Step, shard: TaskName) -> Message:
        """Returns what else a step contributes to a ps."""
        return ()

    def dealt(self, leases: Sequence[Lease] | None, number: int = 0) -> None:
        self.is_over = self.is_over or leases is None
        self.is_dry = not leases
        self.leases.extend(leases or ())
        self.world.sim.later(0.0 if leases else _ASK_AGAIN_S, self.ask_again)
        self.go_on()

    def ask_again(self) -> None:
        self.asking = False
        self.go_on()

    def value(self, shard: TaskName, number: int, version: int, *more: Any) -> None:
        step = self.steps.get(number)
        if step is None:
            return  # refused by another
        step.versions[shard] = version
        step.read[shard] = more
        self.compute()

    def compute(self) -> None:
        """Computes the oldest step, once all its values are there."""
        while self.uncomputed and self.uncomputed[0] not in self.steps:
            self.uncomputed.popleft()  # refused
        if self.is_computing or not self.uncomputed:
            return
        number = self.uncomputed[0]
        if len(self.steps[number].versions) == len(self.world.shards):
            self.is_computing = True
            seconds = self.compute_s(self.steps[number])
            self.world.sim.later(seconds, partial(self.computed, number))

    def compute_s(self, step: Step) -> float:
        """Returns how long a step takes."""
        return self.world.sim.chance.random() * 0.05

    def computed(self, number: int) -> None:
        if self.has_ended or not self.worker.process.alive:
            return
        self.is_computing = False
        self.uncomputed.popleft()
        step = self.steps[number]
        versions = tuple(step.versions.values())
        for shard in self.world.shards:
            pushed = ("push", self.name, self.life, number, step.batch, versions)
            self.send(shard, (*pushed, *self.given(step, shard)))
        self.take(StepComputed(number))
        self.compute()

    def part_done(self, number: int) -> None:
        step = self.steps[number]
        step.done += 1
        if step.done < len(self.world.shards):
            return
        self.acknowledged.add(number)
        while self.done in self.acknowledged:
            self.acknowledged.remove(self.done)
            self.done += 1
        self.world.acknowledge(step.batch, self.life)
        self.take(StepAcknowledged(number))
        self.go_on()

    def told(self, kind: str, *what: Any) -> None:
        """Takes what else is told to it."""

    def fail(self, task: TaskName) -> None:
        self.take(StepFailed(0, TaskLostError(f"{task} is gone", task=task)))

    def refused(self, number: int, lost: str) -> None:
        """The run needs no more steps, or lost a task."""
        if lost:
            self.fail(TaskName(lost))
        elif self.steps.pop(number, None) is not None:
            self.take(StepUnwanted(number))
            self.compute()

    def stop(self) -> None:
        self.take(StopAsked())
        self.start_none(over=False)
        self.is_over = True


class Worker:
    """A worker: its loops."""

    def __init__(self, world: Run, task: TaskName) -> None:
        self.world = world
        self.task = task
        self.loops: dict[str, Loop] = {}
        self.ended: dict[str, Loop] = {}
        self.terms = MasterTerms()
        self.process: Process = world.net.start(task, self.receive, self.lost)

    def receive(self, src: TaskName, message: Message) -> None:
        kind, name, *rest = message
        if kind in ("run", "stop", "account"):
            self.order(src, kind, name, rest)
            return
        loop_ = self.loops.get(name)
        if loop_ is None:
            return
        match kind:
            case "deal":
                if rest[0] == loop_.asked:
                    loop_.dealt(*rest[1:])
            case "value":
                loop_.value(src, *rest[1:])
            case "done":
                loop_.part_done(rest[1])
            case "refused":
                loop_.refused(rest[1], rest[2])
            case _:
                loop_.told(kind, *rest)

    def order(self, src: TaskName, kind: str, name: str, rest: list[Any]) -> None:
        """Carries out an order of a master, unless another took its place."""
        *of, term = rest
        try:
            self.terms.check(RUN, term)
        except FencedError:
            return
        if kind == "run":
            dealer = self.world.dealer_of(src)
            loop = self.world.loops_with(self, name, of[0], src, dealer)
            self.loops[name] = loop
            loop.take(LoopStarted())
        elif name in self.loops:
            known = self.loops[name]
            known.stop() if kind == "stop" else known.account(src)
        elif kind == "account":
            if name in self.ended:
                self.ended[name].account(src)
            else:
                self.world.net.send(self.process, src, ("account", name, None))

    def lost(self, task: TaskName) -> None:
        for loop in list(self.loops.values()):
            if task == loop.master or task in self.world.shards:
                loop.fail(task)
        self.world.unreached(self.task, task)
