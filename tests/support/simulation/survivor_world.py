"""A run whose workers own the variables, and give what a lost owner held.

What decides is real: how many updates an owner has made, and who has read the newest
version (``jgraph.coordination.run.survivors``). A worker keeps what it read last of
each owner, and counts how often it has read. An owner writes the state of its optimizer
a moment before its parameters, so that it can be lost between the two.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from jgraph.coordination.run.survivors import NotGiven, gift, made
from jgraph.graph.ir import TaskName
from tests.support.simulation.kept import History
from tests.support.simulation.network import Message, Process
from tests.support.simulation.sync_tasks import Contributed, GatedShard, loop_name
from tests.support.simulation.sync_world import SyncWorld
from tests.support.simulation.tasks import Loop

WRITINGS: Final = {"params/w": 1, "opt/m": 2}
"""How often an update writes each variable of an owner."""
_BETWEEN_S: Final = 0.01

Writes: TypeAlias = Mapping[str, int]


def of(world: Any) -> "SurvivorWorld":
    """Returns the world of these tasks, whose workers keep what they read."""
    assert isinstance(world, SurvivorWorld)
    return world


@dataclass
class Kept:
    """What a loop has read.

    Attributes:
      process: of its worker.
      counts: how often, of each owner.
      newest: the updates of each owner, as it read them last.
    """

    process: Process
    counts: Counter[TaskName] = field(default_factory=Counter)
    newest: dict[TaskName, History] = field(default_factory=dict)


@dataclass(frozen=True)
class Noted:
    """How a round of updates began.

    Attributes:
      term: the master that noted it; another one does not know.
      version: updates that were made.
      is_whole: each update is of all workers.
      writes: how often each variable of each owner was written.
      loops: of each worker.
    """

    term: int
    version: int
    is_whole: bool
    writes: Mapping[TaskName, Writes]
    loops: Mapping[TaskName, str]


class KeepingLoop(Loop):
    """The loop of a worker that keeps what it read last."""

    def value(self, shard: TaskName, number: int, version: int, *more: Any) -> None:
        process = self.worker.process
        kept = of(self.world).read.setdefault(self.name, Kept(process))
        kept.counts[shard] += 1
        (kept.newest[shard],) = more
        super().value(shard, number, version)


class OwningShard(GatedShard):
    """An owner: a ps that is a worker."""

    def begin(self, life: int, history: History) -> None:
        super().begin(life, history)
        self.begun = 0

    def read(self) -> Message:
        return (list(self.history),)

    def writes(self) -> Writes:
        """Returns how often each variable was written."""
        each = {"params/w": len(self.history), "opt/m": self.begun}
        return {name: WRITINGS[name] * count for name, count in each.items()}

    def apply(self, life: int, chosen: list[Contributed]) -> None:
        if life != self.life or not self.process.alive:
            return
        self.begun += 1
        seconds = self.world.sim.chance.random() * _BETWEEN_S
        self.world.sim.later(seconds, partial(super().apply, life, chosen))


class SurvivorWorld(SyncWorld):
    """One run whose workers keep what they read, from its begin to its end.

    Args:
      seed: decides everything.
      options: as for ``SyncWorld``.

    Attributes:
      given: how often it went on with what workers gave, and nothing was done again.
      refused: why they gave nothing, and how often.
    """

    shards_with = OwningShard
    loops_with = KeepingLoop

    def __init__(self, seed: int, **options: Any) -> None:
        self.read: dict[str, Kept] = {}
        self.noted: Noted | None = None
        self.given, self.refused = 0, Counter[str]()
        super().__init__(seed, **options)

    def begin_loops(self) -> None:
        self.noted = Noted(
            term=self.master.term,
            version=self.version,
            is_whole=self.wanted == len(self.present),
            writes={task: owner.writes() for task, owner in self.owners.items()},
            loops={
                task: loop_name(handle, self.number)
                for task, handle in self.present.items()
            },
        )
        super().begin_loops()

    @property
    def owners(self) -> dict[TaskName, OwningShard]:
        """The ps, which are workers."""
        found = dict[TaskName, OwningShard]()
        for task, shard in self.shards.items():
            assert isinstance(shard, OwningShard)
            found[task] = shard
        return found

    @property
    def recovered(self) -> int:
        return self.restored + self.given

    # ------------------------------------------------------------ after a loss

    def restore(self) -> None:
        lost = [task for task, owner in self.owners.items() if owner.life != self.life]
        by = self.gift(lost)
        if isinstance(by, NotGiven):
            self.refused[by.why] += 1
            super().restore()
            return
        self.given += 1
        self.recoveries.kept(self.version)
        histories = {
            task: by[task].newest[task] if task in lost else owner.history
            for task, owner in self.owners.items()
        }
        for task, history in histories.items():
            told = f"{task} has {len(history)} updates, and {self.version} were told of"
            assert len(history) == self.version, told
            assert history == histories[self.deciding], "of different updates"
        self.begin(self.position, histories)

    def gift(self, lost: list[TaskName]) -> Mapping[TaskName, Kept] | NotGiven:
        """Returns what gives each lost owner its part, if anything does."""
        now = self.noted
        if now is None or now.term != self.master.term:
            return NotGiven("nobody has noted how the updates began")
        if not now.is_whole:
            return NotGiven("updates are not of all workers")
        there = {
            task: made(now.writes[task], owner.writes(), WRITINGS)
            for task, owner in self.owners.items()
            if task not in lost
        }
        kept = {
            task: self.read[loop]
            for task, loop in now.loops.items()
            if loop in self.read and self.read[loop].process.alive
        }
        reads = {task: one.counts for task, one in kept.items()}
        found = gift(self.version - now.version, lost, there, reads)
        if isinstance(found, NotGiven):
            return found
        return {owner: kept[giver] for owner, giver in found.by.items()}
