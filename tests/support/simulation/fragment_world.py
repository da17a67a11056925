"""A run whose workers exchange a fragment of the model at a time, on simulated tasks.

Which fragment is due, which was applied last, and whether a worker has to read all, is
decided by what the graph of a step is made of. A ps holds of each fragment the batches
of its updates. A contribution says how far a fragment came from what its worker read of
it: that has to be what the ps holds as it is applied.
"""

from typing import Any, TypeAlias

from jgraph.coordination.sync.aggregation import Step
from jgraph.graph.ir import TaskName
from jgraph.train.step.fragments import due_in, has_missed, newest_before
from tests.support.simulation.network import Message
from tests.support.simulation.sync_tasks import Contributed, GatedShard
from tests.support.simulation.sync_world import SyncWorld
from tests.support.simulation.tasks import Loop, Step as LoopStep

Held: TypeAlias = tuple[int, ...]
"""Of each fragment what it is: a hash of the updates that it had."""


def of(world: Any) -> "FragmentWorld":
    """Returns the world of these tasks, which has fragments."""
    assert isinstance(world, FragmentWorld)
    return world


class FragmentLoop(Loop):
    """The loop of a worker that keeps its own parameters from one loop to the next.

    With an overlap a worker computes ahead of what it reads, and mixes that in later:
    what it contributes is the way from what it read all the same.
    """

    def computed(self, number: int) -> None:
        if number in self.steps:
            self.take_in(self.steps[number])
        super().computed(number)

    def take_in(self, step: LoopStep) -> None:
        """Keeps what a step read: of the fragment applied last, or of all."""
        world, own = of(self.world), of(self.world).own[self.worker.process]
        number = step.versions[world.deciding]
        joins = has_missed(own.get("next", 0), number)
        newest = newest_before(number, world.count)
        read = [*range(world.count)] if joins else [newest]
        for shard, (held,) in step.read.items():
            base = own.setdefault(shard, [0] * world.count)
            for fragment in read:
                base[fragment] = held[fragment]
        unsure = own.setdefault("unsure", set())
        if own.get("life") != self.life and not joins:
            unsure.update(range(world.count))  # the ps have gone back, and as far again
        own["life"], own["next"] = self.life, number + 1
        of_one = len(set(step.versions.values())) == 1
        unsure.difference_update(read) if of_one else unsure.update(read)

    def compute_s(self, step: LoopStep) -> float:
        # Part of it was done before the values came.
        return super().compute_s(step) * (1 - of(self.world).overlap)

    def given(self, step: LoopStep, shard: TaskName) -> Message:
        world, own = of(self.world), of(self.world).own[self.worker.process]
        due = due_in(step.versions[world.deciding], world.count)
        return own[shard][due], due in own["unsure"]


class FragmentShard(GatedShard):
    """A ps of which a worker reads fragments."""

    def open(self, number: int, version: int) -> None:
        super().open(number, version)
        self.bases: dict[Step, tuple[int, bool]] = {}

    def held(self) -> Held:
        """Returns what each fragment is."""
        count = of(self.world).count
        updates = [self.history[fragment::count] for fragment in range(count)]
        return tuple(hash((number, *made)) for number, made in enumerate(updates))

    def read(self) -> Message:
        return (self.held(),)

    def given(self, step: Step, *more: Any) -> None:
        base, unsure = more
        self.bases[step] = base, unsure

    def check_chosen(self, chosen: list[Contributed]) -> None:
        due = due_in(len(self.history), of(self.world).count)
        held = self.held()[due]
        for step, batch, _ in chosen:
            base, unsure = self.bases[step]
            of(self.world).contributions += 1
            of(self.world).unsure += unsure
            assert unsure or base == held, (
                f"{step} with batch {batch} came from another fragment {due} than "
                f"{self.task} has after {len(self.history)} updates"
            )


class FragmentWorld(SyncWorld):
    """One run with fragments, from its begin to its end.

    Args:
      seed: decides everything.
      count: fragments.
      overlap: share of the steps that a worker takes before it has what it reads.
      options: as for ``SyncWorld``.

    Attributes:
      contributions: parts of updates that were made.
      unsure: those of workers that had read two versions as they began (an update was
        applied on one ps, and not yet on another), or had been away while the ps went
        back and came as far again. Each fragment is right again once it was read.
    """

    shards_with = FragmentShard
    loops_with = FragmentLoop

    def __init__(
        self, seed: int, *, count: int, overlap: float, **options: Any
    ) -> None:
        self.count, self.overlap = count, overlap
        self.own = Own()
        self.contributions = self.unsure = 0
        super().__init__(seed, **options)


class Own(dict[Any, dict[Any, Any]]):
    """What each process of a worker keeps; with the process it is gone."""

    def __missing__(self, process: Any) -> dict[Any, Any]:
        return self.setdefault(process, {})
