"""Roster of the replicas of a run: their numbers, and sets of their steps as columns.

What ps and the arbiter tell each other is of a step of each replica. As two columns,
of numbers of replicas and of step ids, it costs nothing for each of them to read.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, TypeAlias, final, overload

import numpy as np

Step: TypeAlias = tuple[str, int]
"""(program handle, step id). Each replica has a handle of its own."""

_HANDLE, _STEP_ID = itemgetter(0), itemgetter(1)

MOST: Final = 2**63 - 1
"""No step has a greater id."""

Column: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@final
class Steps(Sequence[Step]):
    """Steps of replicas, one after the other, as columns.

    Args:
      roster: of the replicas.
      numbers: which replica, int64.
      ids: of the steps, int64, as many.

    Example:
      >>> Roster(["a", "b"]).steps([("b", 7), ("a", 3)])
      (('b', 7), ('a', 3))
    """

    def __init__(self, roster: "Roster", numbers: Column, ids: Column) -> None:
        self.roster, self.numbers, self.ids = roster, numbers, ids

    @property
    def columns(self) -> tuple[Column, Column]:
        """Numbers and ids."""
        return self.numbers, self.ids

    def at(self, places: Column | Sequence[int]) -> "Steps":
        """Returns those at some places, in that order."""
        return Steps(self.roster, self.numbers[places], self.ids[places])

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Step]:
        names: list[str] = self.roster.column.take(self.numbers).tolist()
        return zip(names, self.ids.tolist(), strict=True)

    @overload
    def __getitem__(self, index: int) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> "Steps": ...

    def __getitem__(self, index: int | slice) -> "Step | Steps":
        if isinstance(index, slice):
            return Steps(self.roster, self.numbers[index], self.ids[index])
        return self.roster.handles[self.numbers[index]], int(self.ids[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@final
class Roster:
    """The replicas of a run: each is known by its place in the order that all know.

    Args:
      handles: of their programs.

    Example:
      >>> roster = Roster(["a", "b"])
      >>> roster.knows(("b", 7)), roster.knows(("c", 7))
      (True, False)
    """

    def __init__(self, handles: Iterable[str]) -> None:
        self.handles = tuple(handles)
        self.column = np.array(self.handles, np.object_)
        """The handles, to be looked up many at once."""
        self._numbers = {handle: n for n, handle in enumerate(self.handles)}
        self._same: Roster = self  # another one with the same handles

    def __len__(self) -> int:
        return len(self.handles)

    def numbered(self, steps: Sequence[Step]) -> Steps | None:
        """Returns steps as columns; None: one is of a replica that is not here."""
        if isinstance(steps, Steps) and self._is_same(steps.roster):
            return steps
        number, count = self._numbers.__getitem__, len(steps)
        try:
            numbers = np.fromiter(map(number, map(_HANDLE, steps)), np.int64, count)
            ids = np.fromiter(map(_STEP_ID, steps), np.int64, count)
        except (KeyError, OverflowError):
            return None
        return Steps(self, numbers, ids)

    def number(self, handle: str) -> int:
        """Returns the number of a replica."""
        return self._numbers[handle]

    def knows(self, step: Step) -> bool:
        """Whether a step is of one of the replicas."""
        return step[0] in self._numbers and step[1] <= MOST

    def steps(self, steps: Sequence[Step]) -> Steps:
        """Returns steps of these replicas as columns.

        Raises:
          KeyError: one is of another replica.
        """
        numbered = self.numbered(steps)
        if numbered is None:
            raise KeyError(next(step for step in steps if not self.knows(step)))
        return numbered

    def _is_same(self, other: "Roster") -> bool:
        """Whether another roster has the same replicas: those of a run do."""
        if other is not self and other is not self._same:
            if other.handles != self.handles:
                return False
            self._same = other
        return True
