"""A run of asynchronous training on simulated tasks, with a ledger of every update.

What decides is real: who gets which batches (``Dispatch``), when a replica begins a
step (``ReplicaLoop``), whether a run goes back (``Recoveries``), what another master
goes on from (``BatchBook``) and whose orders are refused (``MasterTerms``). The tasks
only do what these say, with messages over a network that goes wrong.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.dispatch import Dispatch
from jgraph.coordination.data.slots import Lease, Part, SlotPlan
from jgraph.coordination.run.recovery import GoBack, Recoveries
from jgraph.graph.ir import TaskName
from jgraph.testing.virtual_time import Simulation
from tests.support.simulation.faulty_run import REJOIN_S, FaultyRun
from tests.support.simulation.master import LEASE_S, Master
from tests.support.simulation.network import Network
from tests.support.simulation.tasks import Shard, Worker


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


class World(FaultyRun[Shard]):
    """One run, from its begin to its end: the client, and the tasks that it talks to.

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
        self.prefetch = seed % 2
        self.plan = SlotPlan([Part("a", batches)], 1, seed, slot_batches=5)
        self.workers = {
            name: Worker(self, name)
            for name in (TaskName(f"/job:worker/task:{i}") for i in range(workers))
        }
        names = [TaskName(f"/job:ps/task:{i}") for i in range(shards)]
        self.shards: dict[TaskName, Shard] = {}
        for name in names:
            self.shards[name] = Shard(self, name)
        self.ledger = Ledger()
        self.recoveries = Recoveries(0)
        self.life = -1
        self.attempts = self.losses = self.takeovers = 0
        self.state = "running"
        self.going_back = False
        self.checkpoint: Checkpoint | None = None
        self.restored = 0
        self.master = Master(self, term=0)
        self.begin(None)
        self.checkpoint = Checkpoint(
            self.dispatch.state(), {task: Counter() for task in names}, Counter()
        )

    @property
    def dispatch(self) -> Dispatch:
        """What the master deals."""
        assert self.master.dispatch is not None
        return self.master.dispatch

    def dealer_of(self, master: TaskName) -> TaskName:
        """Returns whom a loop that this master began asks for data."""
        return master

    def unreached(self, worker: TaskName, master: TaskName) -> None:
        """The call that reports of a worker answer has ended."""
        if master == self.master.task:
            self.master.lost(worker)

    # ------------------------------------------------------------ the run

    def begin(self, back_to: Checkpoint | None) -> None:
        """Makes all variables, and starts a loop on every worker."""
        self.life += 1
        self.going_back = False
        self.loops, self.accounts = {}, None
        for task, shard in self.shards.items():
            shard.life = self.life
            shard.counts = Counter(back_to.counts[task] if back_to else ())
        self.ledger = Ledger()
        if back_to is not None:
            self.ledger.dealt = Counter(back_to.dealt)
        if not self.master.process.alive or not self.master.is_heard:
            self.master = Master(self, self.master.term + 1)
        left = self.batches - (0 if back_to is None else back_to.step)
        self.deal(left, None if back_to is None else back_to.position)
        self.done = BatchBook(
            self.plan, self.dispatch.state(), budget=left, updates=self.updates()
        )
        for task in self.workers:
            self.start_loop(task)

    def deal(self, batches: int, position: dict[str, Any] | None) -> None:
        """Makes the master deal out so many."""
        self.master.deal(
            Dispatch(
                self.plan,
                budget=batches,
                workers=len(self.workers),
                lease_s=LEASE_S,
                position=position,
            )
        )

    def updates(self) -> int:
        """Updates applied, as one ps counts them."""
        return sum(next(iter(self.shards.values())).counts.values())

    def start_loop(self, task: TaskName) -> None:
        self.attempts += 1
        name = f"loop-{self.attempts}"
        self.loops[name] = task
        self.master.start_loop(name, task)

    def dealt(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            for batch in lease.each():
                self.ledger.dealt[self.plan.number(*batch)] += 1

    def acknowledge(self, batch: int, life: int) -> None:
        """A worker heard from every ps that an update of this batch is applied."""
        if life == self.life:
            self.ledger.acknowledged.add(batch)

    def reported(self, loop: str, told: Any, state: str, lost: str) -> None:
        if loop not in self.loops:
            return
        self.done.add(told)  # leases
        if lost in self.shards:
            self.go_back()  # a worker that does not reach a ps cannot train
        elif state == "failed":
            self.loop_lost(loop)
        elif state != "running":
            del self.loops[loop]
        self.look()

    # ------------------------------------------------------------ losses

    def loop_lost(self, loop: str) -> None:
        if loop not in self.loops:
            return
        task = self.loops.pop(loop)
        self.losses += 1
        self.master.forget(loop)
        self.sim.later(REJOIN_S, partial(self.rejoin, task, self.life))

    def rejoin(self, task: TaskName, life: int) -> None:
        if life != self.life or self.state != "running" or self.going_back:
            return
        if task in self.loops.values():
            return
        if self.net.is_up(task) and self.is_led:
            self.start_loop(task)
        else:
            self.sim.later(REJOIN_S, partial(self.rejoin, task, life))

    def look(self) -> None:
        """Ends the run when all is done; goes back when a ps is not the one it was."""
        if self.state != "running" or self.going_back:
            return
        if any(shard.life != self.life for shard in self.shards.values()):
            self.go_back()
        elif self.is_led and self.dispatch.done == self.batches:
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
        for loop in self.loops:
            self.master.stop_loop(loop)
        self.restored += 1
        self.begin(self.checkpoint)

    def save(self) -> None:
        """Takes the position first: what is applied meanwhile comes again."""
        if self.state != "running" or self.going_back or not self.is_led:
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

    # ------------------------------------------------------------ another master

    def go_on(self, accounts: dict[str, Any]) -> None:
        """Deals out what is not known to be done, to those that have told."""
        old, loops, self.loops = self.old, self.loops, {}
        there = [loop for loop, leases in accounts.items() if leases is not None]
        for loop in there:
            self.done.add(accounts[loop])
        for shard in self.shards.values():
            shard.dropped |= accounts.keys() - set(there)
        position = self.done.position(self.updates())
        self.deal(self.done.remaining, position)
        for loop, task in loops.items():
            if loop in there:
                self.start_loop(task)
            else:
                self.losses += 1
                self.sim.later(REJOIN_S, partial(self.rejoin, task, self.life))
        if there and old.process.alive:  # it knows nothing of its replacement
            task = loops[there[0]]
            late = partial(self.order_late, old, task, self.workers[task])
            self.sim.later(self.sim.chance.random(), late)
        self.look()

    def order_late(self, old: Master, task: TaskName, worker: Worker) -> None:
        """A master that was replaced orders a worker that has heard of the new one."""
        if self.workers[task] is worker:  # one started since has no data of the run
            old.start_loop(f"late-{old.term}", task, listed=False)

    # ------------------------------------------------------------ faults

    def restart(self, task: TaskName) -> None:
        if task in self.workers:
            self.workers[task] = Worker(self, task)
        else:
            self.shards[task] = Shard(self, task)

    # ------------------------------------------------------------ the oracle

    def check_updates(self) -> None:
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
        more_loops = self.attempts > len(self.workers)
        assert again == 0 or self.dispatch.again or more_loops
