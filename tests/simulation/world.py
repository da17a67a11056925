"""A run of asynchronous training on simulated tasks, with a ledger of every update.

What decides is real: who gets which batches (``Dispatch``), when a replica begins a
step (``ReplicaLoop``), whether a run goes back (``Recoveries``). The tasks only do what
these say, with messages over a network that goes wrong.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from jgraph.coordination.dispatch import (
    Asked,
    Deal,
    Dispatch,
    Event,
    Expel,
    Fail,
    Over,
    Progressed,
    TimePassed,
    WaitEnded,
    WorkerEnded,
    WorkerLost,
)
from jgraph.coordination.recovery import ATTEMPTS, GoBack, Recoveries
from jgraph.coordination.slots import DEATHS, Lease, Part, SlotPlan
from jgraph.graph.ir import TaskName
from tests.simulation.network import Message, Network, Simulation
from tests.simulation.tasks import MASTER, Shard, Worker

ANSWER_S: Final = 10.0
LEASE_S: Final = 20.0
REJOIN_S: Final = 0.5
RESTART_S: Final = 2.0


@dataclass
class Checkpoint:
    """What a run goes back to."""

    position: dict[str, Any]
    counts: dict[TaskName, Counter[int]]
    dealt: Counter[int]

    @property
    def step(self) -> int:
        done: int = self.position["done"]
        return done


@dataclass
class Ledger:
    """What must hold of the updates, kept beside everything."""

    acknowledged: set[int] = field(default_factory=set)
    dealt: Counter[int] = field(default_factory=Counter)


class World:
    """One run, from its begin to its end.

    Args:
      seed: decides everything.
      shards: how many ps.
      workers: how many workers.
      batches: of the run.
      delay_s: the longest that a message takes.
    """

    def __init__(
        self, seed: int, *, shards: int, workers: int, batches: int, delay_s: float
    ) -> None:
        self.sim = Simulation(seed)
        self.net = Network(self.sim, delay_s)
        self.batches = batches
        self.plan = SlotPlan([Part("a", batches)], 1, seed, slot_batches=5)
        self.workers = {
            name: Worker(self, name)
            for name in (TaskName(f"/job:worker/task:{i}") for i in range(workers))
        }
        names = [TaskName(f"/job:ps/task:{i}") for i in range(shards)]
        self.shards: dict[TaskName, Shard] = {}
        for name in names:
            self.shards[name] = Shard(self, name)
        self.master = self.net.start(MASTER, self.receive, self.lost)
        self.ledger = Ledger()
        self.recoveries = Recoveries(0)
        self.life = -1
        self.attempts = self.losses = 0
        self.state = "running"
        self.going_back = False
        self.checkpoint: Checkpoint | None = None
        self.restored = 0
        self.begin(None)
        self.checkpoint = Checkpoint(
            self.dispatch.state(), {task: Counter() for task in names}, Counter()
        )
        self.keep_looking()

    # ------------------------------------------------------------ the run

    def begin(self, back_to: Checkpoint | None) -> None:
        """Makes all variables, and starts a loop on every worker."""
        self.life += 1
        self.going_back = False
        self.loops: dict[str, TaskName] = {}
        self.asked: dict[str, int] = {}
        position = None if back_to is None else back_to.position
        left = self.batches - (0 if back_to is None else back_to.step)
        self.dispatch = Dispatch(
            self.plan,
            budget=left,
            workers=len(self.workers),
            lease_s=LEASE_S,
            position=position,
        )
        self.ledger = Ledger()
        for task, shard in self.shards.items():
            shard.life = self.life
            shard.counts = Counter(back_to.counts[task] if back_to else ())
        if back_to is not None:
            self.ledger.dealt = Counter(back_to.dealt)
        for task in self.workers:
            self.start_loop(task)

    def start_loop(self, task: TaskName) -> None:
        self.attempts += 1
        name = f"loop-{self.attempts}"
        self.loops[name] = task
        self.net.send(self.master, task, ("run", name, self.life))

    def acknowledge(self, batch: int, life: int) -> None:
        """A worker heard from every ps that an update of this batch is applied."""
        if life == self.life:
            self.ledger.acknowledged.add(batch)

    def receive(self, src: TaskName, message: Message) -> None:
        kind, loop, done, *rest = message
        if self.loops.get(loop) != src:
            return
        if kind == "ask":
            batches, idle, number = rest
            self.asked[loop] = number
            self.handle(Asked(loop, done, batches, idle))
            if idle:
                self.sim.later(ANSWER_S, partial(self.wait_ended, loop, number))
            return
        state, lost = rest
        self.handle(Progressed(loop, done))
        if lost in self.shards:
            self.go_back()  # a worker that does not reach a ps cannot train
        elif state == "failed":
            self.loop_lost(loop)
        elif state != "running":
            self.handle(WorkerEnded(loop))
            del self.loops[loop]
        self.look()

    def wait_ended(self, loop: str, number: int) -> None:
        if self.asked.get(loop) == number:
            del self.asked[loop]
            self.handle(WaitEnded(loop))
            self.answer(loop, number, ())

    def handle(self, event: Event) -> None:
        for instruction in self.dispatch.handle(event, self.sim.now):
            match instruction:
                case Deal(loop, leases):
                    for lease in leases:
                        for batch in lease.each():
                            self.ledger.dealt[self.plan.number(*batch)] += 1
                    self.answer(loop, self.asked.pop(loop), leases)
                case Over(loop):
                    self.answer(loop, self.asked.pop(loop), None)
                case Expel(loop, _):
                    if loop in self.loops:
                        self.net.send(self.master, self.loops[loop], ("stop", loop))
                        self.loop_lost(loop)
                case Fail(error):
                    self.state = f"failed: {error}"

    def answer(self, loop: str, number: int, leases: tuple[Lease, ...] | None) -> None:
        if loop in self.loops:
            self.net.send(self.master, self.loops[loop], ("deal", loop, number, leases))

    # ------------------------------------------------------------ losses

    def lost(self, task: TaskName) -> None:
        """The master does not reach a task any more."""
        for loop in [name for name, at in self.loops.items() if at == task]:
            self.loop_lost(loop)
        self.look()

    def loop_lost(self, loop: str) -> None:
        task = self.loops.pop(loop)
        self.losses += 1
        self.asked.pop(loop, None)
        self.handle(WorkerLost(loop))
        self.sim.later(REJOIN_S, partial(self.rejoin, task, self.life))

    def rejoin(self, task: TaskName, life: int) -> None:
        if life != self.life or self.state != "running" or self.going_back:
            return
        if task in self.loops.values():
            return
        if self.net.is_up(task):
            self.start_loop(task)
        else:
            self.sim.later(REJOIN_S, partial(self.rejoin, task, life))

    def keep_looking(self) -> None:
        self.handle(TimePassed())
        self.look()
        self.sim.later(LEASE_S / 4, self.keep_looking)

    def look(self) -> None:
        """Ends the run when all is done; goes back when a ps is not the one it was."""
        if self.state != "running" or self.going_back:
            return
        if any(shard.life != self.life for shard in self.shards.values()):
            self.go_back()
        elif self.dispatch.done == self.batches:
            self.state = "done"

    def go_back(self) -> None:
        if self.state != "running" or self.going_back:
            return
        newest = self.checkpoint.step if self.checkpoint is not None else None
        match self.recoveries.lost(newest):
            case GoBack():
                self.going_back = True
                self.wait_for_all()
            case instruction:
                self.state = f"gave up: {instruction.why}"

    def wait_for_all(self) -> None:
        if not all(map(self.net.is_up, [*self.shards, *self.workers])):
            self.sim.later(REJOIN_S, self.wait_for_all)
            return
        for loop, task in self.loops.items():
            self.net.send(self.master, task, ("stop", loop))
        self.restored += 1
        self.begin(self.checkpoint)

    def save(self) -> None:
        """Takes the position first: what is applied meanwhile comes again."""
        if self.state != "running" or self.going_back:
            return
        position, dealt = self.dispatch.state(), Counter(self.ledger.dealt)
        life, counts = self.life, dict[TaskName, Counter[int]]()

        def take(task: TaskName) -> None:
            shard = self.shards[task]
            if life != self.life or shard.life != life:
                return
            counts[task] = Counter(shard.counts)
            if len(counts) == len(self.shards):
                # What was dealt until now may be in what was taken.
                self.checkpoint = Checkpoint(
                    position, counts, self.ledger.dealt | dealt
                )

        for task in self.shards:
            self.sim.later(self.sim.chance.random() * 0.3, partial(take, task))

    # ------------------------------------------------------------ faults

    def kill(self, task: TaskName) -> None:
        """SIGKILL; the launcher starts it again, empty."""
        there = self.workers.get(task) or self.shards.get(task)
        assert there is not None
        if not self.net.is_up(task) or self.state != "running":
            return
        self.sim.note(f"kill {task}")
        self.net.kill(there.process)
        if isinstance(there, Worker):
            there.loops.clear()
        else:
            there.life, there.counts, there.applied = -1, Counter(), set()
        self.sim.later(
            RESTART_S * self.sim.chance.random(), partial(self.restart, task)
        )

    def restart(self, task: TaskName) -> None:
        if task in self.workers:
            self.workers[task] = Worker(self, task)
        else:
            self.shards[task] = Shard(self, task)

    # ------------------------------------------------------------ the oracle

    def check(self) -> None:
        """What must hold when the run is over."""
        if self.state.startswith("gave up: it went back"):
            assert self.restored >= ATTEMPTS
        elif self.state.startswith("failed: JG-215"):  # a batch that all had is blamed
            assert self.losses >= DEATHS
        else:
            self.check_updates()

    def check_updates(self) -> None:
        assert self.state == "done", self.state
        numbers = set(range(self.batches))
        assert self.dispatch.done == self.batches
        for task, shard in self.shards.items():
            left_out = numbers - set(shard.counts)
            assert not left_out, f"{task} never got batches {sorted(left_out)}"
            for batch, times in shard.counts.items():
                dealt = self.ledger.dealt[batch]
                assert times <= dealt, f"{batch}: {times} times, dealt {dealt} times"
            lost = self.ledger.acknowledged - set(shard.counts)
            assert not lost, f"{task} lost acknowledged updates of {sorted(lost)}"
        again = sum(self.ledger.dealt.values()) - self.batches
        assert again == 0 or self.dispatch.again or self.attempts > len(self.workers)
