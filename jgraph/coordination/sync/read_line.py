"""Line of those who read from a ps in turn, in synchronous training.

After an update all replicas want to read at once. If all do, each gets a share of the
network of the ps, all are done at the end, and what they send back comes after that.
In turn, those who are first compute and send while the others still read: the network
is busy both ways. All ps take replicas in one order, as a step needs what all have.

The order moves on by one with each version: with backup workers it is not always the
same ones who are late.

Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN
Training", 2019 (what is on the network in which order decides how much overlaps).
"""

from collections.abc import Iterable, Sequence
from typing import Final, final

from jgraph.coordination.sync.roster import Step

STUCK_S: Final = 5.0
"""Who reads for so long while nobody else is done does not hold up others."""


@final
class ReadLine:
    """Steps that may read, and of these at most so many at a time. Pure bookkeeping.

    Args:
      readers: how many.
      replicas: their handles, in the order that all ps know.

    Example:
      >>> line = ReadLine(readers=1, replicas=["a", "b", "c"])
      >>> line.join([("c", 4), ("b", 4), ("a", 4)], version=1)
      (('b', 4),)
      >>> line.leave(("b", 4))
      (('c', 4),)
      >>> line.clear()
      (('a', 4),)
    """

    def __init__(self, readers: int, replicas: Iterable[str]) -> None:
        self._readers = readers
        self._places = {handle: n for n, handle in enumerate(replicas)}
        self._waiting: dict[Step, None] = {}
        self._reading: set[Step] = set()
        self._has_moved = False

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    def join(self, steps: Sequence[Step], version: int) -> tuple[Step, ...]:
        """Takes steps that may read at a version; returns whose turn it is now."""
        if len(steps) > 1:
            steps = sorted(steps, key=lambda step: self._place(step[0], version))
        self._waiting.update(dict.fromkeys(steps))
        return self._next()

    def leave(self, step: Step) -> tuple[Step, ...]:
        """A step has read, or never will; returns whose turn it is now."""
        self._waiting.pop(step, None)
        if step in self._reading:
            self._reading.remove(step)
            self._has_moved = True
        return self._next()

    def go_past(self) -> tuple[Step, ...]:
        """Goes past those who read, if none of them was done since it was asked last.

        Returns:
          Whose turn it is now.
        """
        if not self._has_moved:
            self._reading.clear()
        self._has_moved = False
        return self._next()

    def clear(self) -> tuple[Step, ...]:
        """Forgets who waits, and returns them; who reads goes on."""
        waiting, self._waiting = tuple(self._waiting), {}
        return waiting

    def _next(self) -> tuple[Step, ...]:
        free = self._readers - len(self._reading)
        turns = tuple(step for step, _ in zip(self._waiting, range(free), strict=False))
        for step in turns:
            del self._waiting[step]
        self._reading.update(turns)
        return turns

    def _place(self, handle: str, version: int) -> tuple[int, str]:
        """Returns where a replica stands at a version; who is not known is behind."""
        place = self._places.get(handle)
        if place is None:
            return len(self._places), handle
        return (place - version) % len(self._places), handle
