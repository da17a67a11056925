"""A run of synchronous training on simulated tasks, with each update written down.

What decides is real: which contributions make up an update (``Arbiter``), who reads
when (``SyncGate``), who gets which batch (``SyncData``), when a replica begins a step
(``ReplicaLoop``), whether a run goes back (``Recoveries``), whose orders are refused
(``MasterTerms``). A run is a row of loops that decide: each begins at the position that
the one before told, with the workers that are there.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.coordination.liveness.master_lease import END_S, LEASE_S
from jgraph.coordination.run.recovery import GoBack, Recoveries
from jgraph.coordination.run.same_version import Ask, Differ, meet
from jgraph.graph.ir import TaskName
from jgraph.plan.placement.collectors import collectors
from jgraph.plan.program.replay import Record
from jgraph.testing.virtual_time import Simulation
from jgraph.train.state.durability import Durability
from tests.support.simulation.faulty_run import REJOIN_S, FaultyRun
from tests.support.simulation.kept import History, Kept, as_arrays
from tests.support.simulation.leader import NEVER, Leader, Order, Told
from tests.support.simulation.master import Master
from tests.support.simulation.network import Network
from tests.support.simulation.sync_tasks import GatedShard, loop_name
from tests.support.simulation.tasks import Worker

LOOK_S: Final = 5.0
OPEN_S: Final = 20.0
FORGOTTEN_S: Final = 40.0
"""Longer than any loop needs to end for who is back."""
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
      durability: what is kept of each ps; see ``AsyncPS``.
      hosts: each has as many workers, and as many ps, and contributions are summed on
        them; 0: they are not.
      readers: how many read from a ps at a time; 0: all that may.

    Attributes:
      pauses: how often a loop that decides did not hear of its master for too long.
      kept_on: how often it went on from what was kept of a lost ps.
      differed: how often there was no version that all ps could have.
    """

    leads_with: Any = Leader
    shards_with: Any = GatedShard

    def __init__(
        self,
        seed: int,
        *,
        shards: int,
        workers: int,
        backups: int,
        steps: int,
        delay_s: float,
        durability: Durability = "checkpoint",
        hosts: int = 0,
        readers: int = 0,
    ) -> None:
        self.durability = durability
        self.readers = readers
        self.present: dict[TaskName, str] = {}
        self.hosts = hosts
        self.disks: dict[TaskName, list[Record]] = {}
        self.kept_on = self.differed = self.copies_lost = 0
        self.sim = Simulation(seed)
        self.net = Network(self.sim, delay_s)
        self.prefetch = 0
        self.plan = SlotPlan([Part("a", BATCHES)], 1, seed, slot_batches=5)
        self.wanted = workers - backups
        self.steps = steps
        self.shards: dict[TaskName, GatedShard] = {}
        for i in range(shards):
            name = TaskName(f"/job:ps/task:{i}")
            self.shards[name] = self.shards_with(self, name)
        self.deciding = next(iter(self.shards))
        self.workers = {
            name: Worker(self, name)
            for name in (TaskName(f"/job:worker/task:{i}") for i in range(workers))
        }
        roles = (*self.shards, *self.workers)
        at = {task: self.host(task) for task in roles if hosts}
        self.collectors = collectors(list(self.shards), list(self.workers), at)
        self.recoveries = Recoveries(0)
        self.life, self.attempts, self.losses, self.restored = -1, 0, 0, 0
        self.number = self.takeovers = 0
        self.lost_handles = set[str]()
        self.state = "running"
        self.going_back = False
        self.pauses = 0
        self.awaited = ""  # a loop that decides, whose link is waited for
        self.orders: dict[str, Order] = {}
        self.leaders: list[Leader] = []
        self.master = Master(self, term=0)
        start = BatchBook(self.plan).position()
        self.checkpoint = Checkpoint(start, [])
        self.begin(self.checkpoint.position, {task: [] for task in self.shards})
        self.keep_looking()

    def host(self, task: TaskName) -> str:
        """Returns where a task is; neighbours are together."""
        count = len(self.workers if task in self.workers else self.shards)
        return str(int(task.rpartition(":")[2]) * self.hosts // count)

    def collector(self, worker: TaskName, owner: TaskName) -> TaskName:
        """Returns where a worker sends its part for an owner."""
        return self.collectors.get((self.host(worker), owner), owner)

    def dealer_of(self, master: TaskName) -> TaskName:
        """Returns whom a loop asks for data: the arbiter what counts."""
        return self.deciding

    def acknowledge(self, batch: int, life: int) -> None:
        """A worker heard from every ps that its step is over."""

    def unreached(self, worker: TaskName, master: TaskName) -> None:
        """The call that reports of a worker answer has ended."""
        if master == self.master.task:
            self.master.lost(worker)

    # ------------------------------------------------------------ the run

    def begin(
        self, position: dict[str, Any], histories: Mapping[TaskName, History]
    ) -> None:
        """Makes all variables, and lets all workers take part.

        Args:
          position: where in the data.
          histories: the updates that each ps has.
        """
        self.life += 1
        self.going_back = False
        self.loops, self.accounts = {}, None
        if not self.is_led:
            self.master = Master(self, self.master.term + 1)
        for task, shard in self.shards.items():
            shard.begin(self.life, histories[task])
        self.begin_copies()
        self.leaders = []
        self.position = position
        self.version = len(histories[self.deciding])
        self.unopened: set[TaskName] = set()
        self.present = {}
        self.back: dict[TaskName, float] = {}
        for task in self.workers:
            self.admit(task)
        self.open_gates()

    def admit(self, task: TaskName) -> None:
        """Lets a worker take part from the next loop on, under a new handle."""
        self.attempts += 1
        self.present[task] = f"replica-{self.attempts}"
        self.back[task] = self.sim.now

    def open_gates(self) -> None:
        """Begins the next loop that decides: with gates of its own."""
        self.told: Told | None = None
        if self.state != "running" or self.going_back or not self.is_led or self.loops:
            return
        if self.version == self.steps:  # what a lost ps held is done again
            there = self.net.is_up, lambda task: self.shards[task].life == self.life
            if all(holds(task) for task in self.shards for holds in there):
                self.state = "done"
            else:
                self.go_back()
            return
        if not self.present:
            return  # until one is back
        self.number += 1
        self.unopened = set(self.shards)
        for shard in self.shards:
            order = ("open", self.number, self.life, self.version, self.master.term)
            self.master.send(shard, order)
        self.sim.later(OPEN_S, partial(self.unanswered, self.number))

    def unanswered(self, gate: int) -> None:
        """The call that opens gates has a deadline."""
        if gate == self.number and self.unopened:
            self.go_back()

    def opened(self, gate: int, shard: TaskName) -> None:
        if gate != self.number or self.going_back or self.loops:
            return
        self.unopened.discard(shard)
        if not self.unopened:
            self.begin_loops()

    def begin_loops(self) -> None:
        """Begins to decide, with the workers that are there."""
        self.back.clear()
        there, name = self.present, self.leading(self.number)
        self.orders[name] = Order(
            replicas={handle: task for task, handle in there.items()},
            position=self.position,
            version=self.version,
            steps=self.steps - self.version,
        )
        self.loops[name] = self.deciding
        self.master.start_loop(name, self.deciding)
        for task, handle in there.items():
            self.loops[loop_name(handle, self.number)] = task
            self.master.start_loop(loop_name(handle, self.number), task)

    def leading(self, number: int) -> str:
        """Returns the name of a loop that decides."""
        return f"deciding-{number}"

    def reported(self, loop: str, told: Any, state: str, lost: str) -> None:
        if loop not in self.loops:
            return
        if isinstance(told, Told):
            self.decided(loop, told)
        elif lost in self.shards:
            self.go_back()  # a worker that does not reach a ps cannot train
        elif state == "failed":
            self.loop_lost(loop)
        elif state != "running":
            self.over(loop)
        self.look()

    def decided(self, loop: str, told: Told) -> None:
        """Who decides has told how far it is."""
        self.told = told
        self.position, self.version = told.position, told.version
        if told.lost in self.shards:
            self.go_back()
        elif told.state == "failed":
            self.state = f"failed: {told.error}"
        elif told.state != "running":
            self.over(loop)

    def over(self, loop: str) -> None:
        """A loop has ended; after the last one another row of them begins."""
        del self.loops[loop]
        if not self.loops:
            self.open_gates()

    # ------------------------------------------------------------ losses

    @property
    def holders_lost(self) -> int:
        """How many replicas arbiters lost, also while no master was heard."""
        return len(self.lost_handles)

    def lost(self, task: TaskName) -> None:
        name = self.leading(self.number)
        if self.accounts is None and task == self.deciding and name in self.loops:
            self.awaited = name
            self.await_link(name, self.sim.now + END_S)
        super().lost(task)

    def await_link(self, name: str, until: float) -> None:
        """Asks a loop that decides what it did, until its task is reached again."""
        if name not in self.loops or self.awaited != name or not self.is_led:
            return
        shard = self.shards[self.deciding]
        if shard.life != self.life or self.sim.now >= until:
            self.go_back()
            return
        self.master.send(self.deciding, ("account", name, self.master.term))
        self.sim.later(REJOIN_S, partial(self.await_link, name, until))

    def accounted(self, loop: str, told: Any) -> None:
        if loop != self.awaited or self.accounts is not None:
            super().accounted(loop, told)
            return
        self.awaited = ""
        if loop in self.loops and told is NEVER:
            self.over(loop)
        elif loop in self.loops:
            self.decided(loop, told)

    def loop_lost(self, loop: str) -> None:
        task = self.loops.get(loop)
        if task is None or task == self.deciding:
            return
        self.losses += 1
        gone = ("gone", self.leading(self.number), self.life, task)
        self.master.send(self.deciding, gone)
        self.worker_lost(task)
        self.over(loop)

    def worker_lost(self, task: TaskName) -> None:
        """Looks after a worker until it takes part again."""
        self.present.pop(task, None)
        self.back.pop(task, None)
        self.sim.later(REJOIN_S, partial(self.rejoin, task, self.life))

    def rejoin(self, task: TaskName, life: int) -> None:
        if life != self.life or self.state != "running" or self.going_back:
            return
        if not (self.net.is_up(task) and self.is_led):
            self.sim.later(REJOIN_S, partial(self.rejoin, task, life))
            return
        self.admit(task)
        if not self.loops and not self.unopened:
            self.open_gates()  # nobody was left
        elif (name := self.leading(self.number)) in self.loops:
            self.master.send(self.deciding, ("pause", name, self.master.term))

    def go_on(self, accounts: dict[str, Any]) -> None:
        """Begins another loop where the one before ended; who told nothing is lost."""
        loops, self.loops = self.loops, {}
        name = self.leading(self.number)
        # No loops: gates were being opened, or nobody was left.
        told = accounts[name] if name in loops else self.told if loops else NEVER
        if told is None or told.state == "failed":
            self.go_back()
            return
        if told is not NEVER:
            self.position, self.version = told.position, told.version
        for loop, task in loops.items():
            if accounts[loop] is None:
                self.losses += 1
                handle = loop.partition("/")[0]
                for shard in self.shards.values():
                    shard.dropped.add(handle)
                self.worker_lost(task)
        self.open_gates()

    def keep_looking(self) -> None:
        self.look()
        if self.state == "running" and not self.going_back and self.leaders:
            self.leaders[-1].look()
        self.sim.later(LOOK_S, self.keep_looking)

    def look(self) -> None:
        """Goes back when a ps is not the one it was."""
        if self.state != "running" or self.going_back:
            return
        for task, since in self.back.items():
            assert self.sim.now - since < FORGOTTEN_S, f"{task} never takes part again"
        if any(shard.life != self.life for shard in self.shards.values()):
            self.go_back()

    def go_back(self) -> None:
        if self.state != "running" or self.going_back:
            return
        if self.durability != "checkpoint":
            self.going_back = True
            self.wait_for_all()
            return
        self.go_back_to_checkpoint()

    def go_back_to_checkpoint(self) -> None:
        match self.recoveries.lost(len(self.checkpoint.history)):
            case GoBack():
                self.going_back = True
                self.wait_for_all(from_checkpoint=True)
            case instruction:
                self.state = f"gave up: {instruction.why}"

    def wait_for_all(self, *, from_checkpoint: bool = False) -> None:
        if not all(map(self.net.is_up, [*self.shards, *self.workers])):
            again = partial(self.wait_for_all, from_checkpoint=from_checkpoint)
            self.sim.later(REJOIN_S, again)
        elif self.durability == "checkpoint" or from_checkpoint:
            self.restore()
        else:
            self.meet()

    def restore(self) -> None:
        """Gives all ps what the checkpoint has."""
        self.restored += 1
        history = self.checkpoint.history
        self.version = len(history)
        histories = dict.fromkeys(self.shards, history)
        self.begin(self.checkpoint.position, histories)

    # ------------------------------------------------------------ what is kept

    def backup_of(self, task: TaskName) -> TaskName:
        """Returns who has the copy of a ps: the next one."""
        tasks = list(self.shards)
        return tasks[(tasks.index(task) + 1) % len(tasks)]

    def begin_copies(self) -> None:
        """Keeps what there is; nothing changes until that is done."""
        for task, shard in self.shards.items():
            self.disks[task] = []
            if self.durability == "log":
                number = shard.recorder.put("history", as_arrays(shard.history))
                self.disks[task] = shard.recorder.take()
                shard.recorder.commit(number)
            elif self.durability == "replica":
                copies = self.shards[self.backup_of(task)].copies
                copies[task] = Kept(self.life, list(shard.history))

    def meet(self) -> None:
        """Lets no ps change anything more, and asks a moment later what there is."""
        held = {
            task: shard.recorder.hold() if shard.life == self.life else range(0)
            for task, shard in self.shards.items()
        }
        incarnations = self.incarnations()
        wait = self.sim.chance.random()
        self.sim.later(wait, partial(self.met, held, incarnations))

    def incarnations(self) -> list[int]:
        processes = [shard.process for shard in self.shards.values()]
        return [process.incarnation * process.alive for process in processes]

    def met(self, held: Mapping[TaskName, range], incarnations: list[int]) -> None:
        """Goes on from a version that all ps can have."""
        if self.incarnations() != incarnations:
            self.wait_for_all()  # another was lost meanwhile
            return
        kept: dict[TaskName, Kept] = {}
        can: dict[TaskName, range] = {}
        while isinstance(found := meet(held, can), Ask):
            for task in found.tasks:
                copy = self.kept_of(task)
                if copy is None:
                    self.copies_lost += 1
                    self.go_back_to_checkpoint()
                    return
                kept[task], can[task] = copy, copy.held_back.versions
        if isinstance(found, Differ):
            self.differed += 1
            self.go_back_to_checkpoint()
            return
        histories = {
            task: kept[task].end(found.version)
            if task in found.again
            else shard.end(found.version)
            for task, shard in self.shards.items()
        }
        for history in histories.values():
            assert history == histories[self.deciding], "of different updates"
        made = len(histories[self.deciding])
        assert made >= self.version, f"told of {self.version}, and {made} are there"
        self.kept_on += 1
        self.begin(self.position, histories)

    def kept_of(self, task: TaskName) -> Kept | None:
        """Returns the second copy of what a ps held; None: it is lost, too."""
        if self.durability == "replica":
            copies = self.shards[self.backup_of(task)].copies
            return copies.get(task)
        log = Kept(self.life, [])
        for record in self.disks[task]:
            log.came(record)
        return log

    def save(self) -> None:
        """Between two updates; what replicas hold then counts as not done."""
        if self.state != "running" or self.going_back or not self.leaders:
            return
        leader = self.leaders[-1]
        history = leader.shard.history
        there = all(shard.life == self.life for shard in self.shards.values())
        if there and not leader.is_applying:
            self.checkpoint = Checkpoint(leader.data.state(), list(history))

    # ------------------------------------------------------------ faults

    def restart(self, task: TaskName) -> None:
        if task in self.workers:
            self.workers[task] = Worker(self, task)
        else:
            self.shards[task] = self.shards_with(self, task)

    # ------------------------------------------------------------ the oracle

    def leads(self, leader: Leader) -> None:
        """A loop that decides begins, when the one before is over."""
        before = [one for one in self.leaders if not one.is_over]
        assert not before, f"{before[-1].name} still decides, and {leader.name} begins"
        self.leaders.append(leader)

    def decides(self, leader: Leader) -> None:
        """A loop decides an update: the last one that began, where all ps are."""
        assert leader is self.leaders[-1], f"{leader.name} decides after its end"
        silent_s = self.sim.now - leader.heard_at
        assert silent_s < 1.5 * LEASE_S, f"{leader.name} decides without its master"
        there = [s for s in self.shards.values() if s.life == leader.life]
        versions = {len(shard.history) for shard in there}
        assert versions == {leader.version}, f"{leader.name} decides at {versions}"

    def check_updates(self) -> None:
        histories = [shard.history for shard in self.shards.values()]
        made = histories[0]
        assert len(made) == self.steps
        assert all(history == made for history in histories), "not the same everywhere"
        assert all(1 <= len(batches) <= self.wanted for batches in made)
        counted = [batch for batches in made for batch in batches]
        twice = [batch for batch, times in Counter(counted).items() if times > 1]
        # Where a run goes on is told with a report: later updates are trained on again.
        assert self.kept_on or not twice, f"counted twice: {twice}"
        order = BatchOrder(self.plan)
        end, unfinished = order.restored(self.position)
        due = set(map(order.number, set(range(end)) - set(unfinished)))
        assert due <= set(counted), f"left out: {due - set(counted)}"
        assert self.kept_on or due == set(counted)
        assert len(unfinished) <= 12 * len(self.workers), f"kept back: {unfinished}"
