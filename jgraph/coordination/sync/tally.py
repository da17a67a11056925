"""Tally of contributions: which ps have told of a step, and who has it everywhere.

Each ps tells once of what each replica contributes, in sets. Most often a replica has
one step that some ps have told of: those are in arrays, and a set of thousands is a few
operations. Steps beside that one, as when a ps lost what the others have, and those of
few replicas, are kept one by one.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, final

import numpy as np

from jgraph.coordination.sync.roster import Column, Steps
from jgraph.graph.ir import TaskName

FEW: Final = 64
"""So many replicas cost less one by one."""
_NONE: Final = -1


class Everywhere(NamedTuple):
    """Of a set that was told: which steps all ps have told of now.

    Attributes:
      places: in the set.
      mixed: of these, which the ps did not let in at one version.
    """

    places: Sequence[int]
    mixed: frozenset[int]


NOWHERE: Final = Everywhere([], frozenset())


@final
class Tally:
    """Who told of what, until all have.

    Args:
      shards: the ps.
      replicas: how many there are.
      few: with fewer replicas than this each step is kept by itself.

    Example:
      >>> from jgraph.coordination.sync.roster import Roster
      >>> roster, one, two = Roster(["a", "b"]), TaskName("one"), TaskName("two")
      >>> tally = Tally([one, two], replicas=2)
      >>> tally.tell(one, roster.steps([("a", 1), ("b", 1)]), version=5).places
      []
      >>> tally.tell(two, roster.steps([("b", 1)]), version=5)
      Everywhere(places=[0], mixed=frozenset())
    """

    def __init__(
        self, shards: Iterable[TaskName], replicas: int, few: int = FEW
    ) -> None:
        self._shards = {shard: place for place, shard in enumerate(sorted(shards))}
        # Of each replica, by the step: at which version which ps let it in.
        self._one_by_one = defaultdict[int, dict[int, dict[int, int]]](dict)
        # Of each replica the step that is in the arrays, how many ps told of it, at
        # which version the first let it in, and whether another one did at another.
        self._ids = np.full(replicas, _NONE, np.int64)
        self._count = np.zeros(replicas, np.int64)
        self._version = np.zeros(replicas, np.int64)
        self._mixed = np.zeros(replicas, np.bool_)
        # Whose steps are kept one by one.
        self._odd = np.full(replicas, replicas < few, np.bool_)
        self._all_odd = replicas < few
        # A ps told of that step if it has its turn: nothing is cleared afterwards.
        self._turn = np.ones(replicas, np.int64)
        shape = (0 if self._all_odd else len(self._shards), replicas)
        self._turns = np.zeros(shape, np.int64)

    def tell(self, shard: TaskName, steps: Steps, version: int) -> Everywhere:
        """Takes note of what a ps tells; returns what of it all have told of now."""
        place = self._shards.get(shard)
        if place is None:
            return NOWHERE  # it keeps no contributions of this run
        if self._all_odd:
            return self._tell_each(place, steps, range(len(steps)), version)
        numbers, ids = steps.numbers, steps.ids
        known = self._ids[numbers]
        usual = known == ids
        if usual.all():  # most often: another ps has told of them
            return self._tell_together(place, numbers, ids, version)
        usual |= (known == _NONE) & ~self._odd[numbers]
        if usual.all():
            return self._tell_together(place, numbers, ids, version)
        here, there = np.flatnonzero(usual), np.flatnonzero(~usual)
        found = self._tell_together(place, numbers[here], ids[here], version)
        others = self._tell_each(place, steps, there.tolist(), version)
        at = here.tolist()
        return Everywhere(
            sorted([*(at[i] for i in found.places), *others.places]),
            others.mixed.union(at[i] for i in found.mixed),
        )

    def _tell_together(
        self, place: int, numbers: Column, ids: Column, version: int
    ) -> Everywhere:
        row, turn = self._turns[place], self._turn[numbers]
        again = row[numbers] == turn
        if again.any():  # what is told twice counts once
            new = np.flatnonzero(~again)
            found = self._tell_together(place, numbers[new], ids[new], version)
            which = new.tolist()
            mixed = frozenset(which[i] for i in found.mixed)
            return Everywhere([which[i] for i in found.places], mixed)
        row[numbers] = turn
        count = self._count[numbers] + 1
        is_first = count == 1
        if is_first.all():
            self._ids[numbers] = ids
            self._version[numbers] = version
        else:
            first = numbers[is_first]
            self._ids[first] = ids[is_first]
            self._version[first] = version
            others = self._version[numbers] != version
            if others.any():
                self._mixed[numbers[others]] = True
        self._count[numbers] = count
        done = count == len(self._shards)
        if not done.any():
            return NOWHERE
        whole = numbers[done]
        places = range(len(numbers)) if done.all() else np.flatnonzero(done).tolist()
        is_mixed = np.flatnonzero(self._mixed[whole]).tolist()
        self._forget(whole)
        for at in np.flatnonzero(self._odd[whole]).tolist():
            self._over(int(whole[at]), int(ids[done][at]))
        return Everywhere(places, frozenset(places[at] for at in is_mixed))

    def _forget(self, numbers: Column) -> None:
        self._ids[numbers] = _NONE
        self._count[numbers] = 0
        self._mixed[numbers] = False
        self._turn[numbers] += 1

    def _tell_each(
        self, place: int, steps: Steps, places: Iterable[int], version: int
    ) -> Everywhere:
        found, mixed = list[int](), set[int]()
        numbers, ids = steps.numbers.tolist(), steps.ids.tolist()
        for at in places:
            number, step = numbers[at], ids[at]
            versions = self._one_by_one[number].setdefault(step, {})
            versions[place] = version
            self._odd[number] = True
            if len(versions) < len(self._shards):
                continue
            found.append(at)
            if len({*versions.values()}) > 1:
                mixed.add(at)
            del self._one_by_one[number][step]
            if not self._all_odd:
                self._over(number, step)
        return Everywhere(found, frozenset(mixed))

    def _over(self, number: int, step: int) -> None:
        """A step that was kept by itself is there everywhere.

        Each ps tells of a replica's steps in their order: no earlier one will be.
        """
        if self._ids[number] < step:
            self._forget(np.array([number]))
        mine = self._one_by_one[number]
        for earlier in [one for one in mine if one < step]:
            del mine[earlier]
        self._odd[number] = bool(mine)

    def lose(self, number: int) -> None:
        """A replica is gone: what not all have told of counts for nothing."""
        self._forget(np.array([number]))
        self._one_by_one.pop(number, None)
        self._odd[number] = self._all_odd
