"""A run of synchronous training on simulated tasks, with each update written down.

What decides is real: which contributions make up an update (``Arbiter``), who reads
when (``SyncGate``), who gets which batch (``SyncData``), when a replica begins a step
(``ReplicaLoop``), whether a run goes back (``Recoveries``).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from jgraph.coordination.batch_order import BatchOrder
from jgraph.coordination.recovery import GoBack, Recoveries
from jgraph.coordination.slots import Part, SlotPlan
from jgraph.errors import JGError, TaskLostError
from jgraph.graph.ir import TaskName
from tests.simulation.faulty_run import FaultyRun
from tests.simulation.network import Message, Network, Simulation
from tests.simulation.sync_tasks import GatedShard, Leader
from tests.simulation.tasks import Worker

MASTER: Final = TaskName("/job:master/task:0")
REJOIN_S: Final = 0.5
LOOK_S: Final = 5.0
BATCHES: Final = 30
"""Of an epoch."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes back to: of one moment between two updates."""

    position: dict[str, Any]
    history: list[tuple[int, ...]]


class SyncWorld(FaultyRun[GatedShard]):
    """One run, from its begin to its end.

    Args:
      seed: decides everything.
      shards: how many ps.
      workers: how many workers.
      backups: how many of them an update does not wait for.
      steps: updates of the run.
      delay_s: the longest that a message takes.
    """

    def __init__(
        self,
        seed: int,
        *,
        shards: int,
        workers: int,
        backups: int,
        steps: int,
        delay_s: float,
    ) -> None:
        self.sim = Simulation(seed)
        self.net = Network(self.sim, delay_s)
        self.plan = SlotPlan([Part("a", BATCHES)], 1, seed, slot_batches=5)
        self.backups = backups
        self.steps = steps
        self.shards: dict[TaskName, GatedShard] = {}
        for i in range(shards):
            name = TaskName(f"/job:ps/task:{i}")
            self.shards[name] = GatedShard(self, name)
        self.workers = {
            name: Worker(self, name)
            for name in (TaskName(f"/job:worker/task:{i}") for i in range(workers))
        }
        self.recoveries = Recoveries(0)
        self.life, self.attempts, self.losses, self.restored = -1, 0, 0, 0
        self.state = "running"
        self.going_back = False
        self.epoch = 0
        self.master = self.net.start(MASTER, self.receive, self.lost)
        self.checkpoint = Checkpoint({}, [])
        self.begin()
        self.checkpoint = Checkpoint(self.leader.data.state(), [])
        self.keep_looking()

    def dealer_of(self, master: TaskName) -> TaskName:
        """Returns whom a loop asks for data: who decides what counts."""
        return self.leader.task

    def acknowledge(self, batch: int, life: int) -> None:
        """A worker heard from every ps that its step is over."""

    def unreached(self, worker: TaskName, master: TaskName) -> None:
        """The call that reports of a worker answer has ended."""
        if master == MASTER:
            self.lost(worker)

    # ------------------------------------------------------------ the run

    def begin(self) -> None:
        """Makes all variables, and starts a loop on every worker."""
        self.life += 1
        self.going_back = False
        if not self.master.alive:
            self.epoch += 1
            self.master = self.net.start(MASTER, self.receive, self.lost)
        for shard in self.shards.values():
            shard.begin(self.life, self.checkpoint.history)
        self.loops = {
            f"loop-{self.life}-{i}": task for i, task in enumerate(self.workers)
        }
        left = self.steps - len(self.checkpoint.history)
        position = self.checkpoint.position or None
        self.leader = Leader(self, dict(self.loops), position, left)
        for loop, task in self.loops.items():
            run = ("run", loop, self.life, self.epoch)
            self.net.send(self.master, task, run)

    def receive(self, src: TaskName, message: Message) -> None:
        """The client hears of a loop."""
        _, loop, _, _, state, lost = message
        if self.loops.get(loop) != src:
            return
        if lost in self.shards:
            self.go_back()  # a worker that does not reach a ps cannot train
        elif state == "failed":
            self.loop_lost(loop)
        elif state != "running":
            del self.loops[loop]
        self.look()

    def ended(self, leader: Leader, state: str, error: JGError | None) -> None:
        """Who decides has decided the last update, or cannot go on."""
        if leader.life != self.life or self.state != "running" or self.going_back:
            return
        if state == "alone" or isinstance(error, TaskLostError):
            self.go_back()
        else:
            self.state = state if error is None else f"failed: {error}"

    # ------------------------------------------------------------ losses

    def lost(self, task: TaskName) -> None:
        """The master does not reach a task any more."""
        if task == self.leader.task:
            self.go_back()  # it has a loop there: that of who decides
        for loop in [name for name, at in self.loops.items() if at == task]:
            self.loop_lost(loop)
        self.look()

    def loop_lost(self, loop: str) -> None:
        del self.loops[loop]
        self.losses += 1
        self.net.send(self.master, self.leader.task, ("gone", loop, self.life))

    def keep_looking(self) -> None:
        self.look()
        if self.state == "running" and not self.going_back:
            self.leader.look()
        self.sim.later(LOOK_S, self.keep_looking)

    def look(self) -> None:
        """Goes back when a ps or the master is not the one it was."""
        if self.state != "running" or self.going_back:
            return
        there = [shard.life == self.life for shard in self.shards.values()]
        if not all(there) or not self.master.alive:
            self.go_back()

    def go_back(self) -> None:
        if self.state != "running" or self.going_back:
            return
        match self.recoveries.lost(len(self.checkpoint.history)):
            case GoBack():
                self.going_back = True
                self.wait_for_all()
            case instruction:
                self.state = f"gave up: {instruction.why}"

    def wait_for_all(self) -> None:
        if not all(map(self.net.is_up, [*self.shards, *self.workers])):
            self.sim.later(REJOIN_S, self.wait_for_all)
            return
        self.restored += 1
        self.begin()

    def save(self) -> None:
        """Between two updates; what replicas hold then counts as not done."""
        if self.state != "running" or self.going_back or self.leader.is_applying:
            return
        history = self.shards[self.leader.task].history
        if all(shard.life == self.life for shard in self.shards.values()):
            self.checkpoint = Checkpoint(self.leader.data.state(), list(history))

    # ------------------------------------------------------------ faults

    def restart(self, task: TaskName) -> None:
        if task in self.workers:
            self.workers[task] = Worker(self, task)
        else:
            self.shards[task] = GatedShard(self, task)

    def kill_master(self) -> None:
        """Another takes its place, and the run goes back to its checkpoint."""
        self.net.kill(self.master)

    # ------------------------------------------------------------ the oracle

    def check_updates(self) -> None:
        histories = [shard.history for shard in self.shards.values()]
        made = histories[0]
        assert len(made) == self.steps
        assert all(history == made for history in histories), "not the same everywhere"
        wanted = len(self.workers) - self.backups
        assert all(1 <= len(batches) <= wanted for batches in made)
        counted = [batch for batches in made for batch in batches]
        twice = [batch for batch, times in Counter(counted).items() if times > 1]
        assert not twice, f"counted twice: {twice}"
        order = BatchOrder(self.plan)
        end, unfinished = order.restored(self.leader.data.state())
        due = set(map(order.number, set(range(end)) - set(unfinished)))
        assert due == set(counted), f"left out: {due ^ set(counted)}"
        assert len(unfinished) <= 12 * len(self.workers), f"kept back: {unfinished}"
