"""Exactly-once delivery: the numbers of frames at both ends of a stream. Pure.

Frames are numbered without gaps, from 1 in each direction. The end that sends keeps
what left until the other has acknowledged it, and sends it again when a connection
breaks; the end that receives accepts each number once. What leads from one to the
other, and how often that breaks, is of no concern here.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

WINDOW_FRAMES: Final = 4096
WINDOW_BYTES: Final = 256 << 20
"""More than this, and the frame that left last, waits until some is acknowledged."""
ACK_FRAMES: Final = 64
ACK_BYTES: Final = 64 << 10
"""After so many frames or bytes the other side is told that they arrived."""
_Item = TypeVar("_Item")


@final
class SentFrames(Generic[_Item]):
    """The frames that left and are not acknowledged.

    Args:
      numbers: of the frames to come; from 1 unless given.

    Attributes:
      nbytes: of these frames.

    Example:
      >>> sent = SentFrames[str]()
      >>> [sent.add(name, nbytes=10) for name in "abc"]
      [1, 2, 3]
      >>> sent.acknowledge(2)
      >>> list(sent), sent.nbytes
      ([(3, 'c')], 10)
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._frames: deque[tuple[int, _Item, int]] = deque()
        self.nbytes = 0

    def __iter__(self) -> Iterator[tuple[int, _Item]]:
        """Yields (number, frame) in the order of sending."""
        return iter([(number, item) for number, item, _ in self._frames])

    @property
    def is_full(self) -> bool:
        """Whether the receiver must say something before more is sent."""
        if len(self._frames) >= WINDOW_FRAMES:
            return True
        # A frame of any size may leave when those before it have arrived.
        return (
            self.nbytes > WINDOW_BYTES
            and self.nbytes - self._frames[-1][2] > WINDOW_BYTES
        )

    def add(self, item: _Item, nbytes: int, *, keep: bool = True) -> int:
        """Returns the number of a frame that leaves now."""
        number = next(self._numbers)
        if keep:
            self._frames.append((number, item, nbytes))
            self.nbytes += nbytes
        return number

    def acknowledge(self, received: int) -> None:
        """Forgets the frames up to a number."""
        while self._frames and self._frames[0][0] <= received:
            self.nbytes -= self._frames.popleft()[2]

    def clear(self) -> None:
        """Forgets all."""
        self._frames.clear()
        self.nbytes = 0


@final
@dataclass(slots=True)
class ReceivedFrames:
    """What arrived, and what the other side was told of that.

    Attributes:
      last: number of the frame that arrived last; 0: none has.
      told: what the other side was told.
      untold_bytes: that arrived since.

    Example:
      >>> received = ReceivedFrames()
      >>> [received.accept(number) for number in (1, 2, 2, 1, 3)]
      [True, True, False, False, True]
      >>> received.is_ack_due(1000), received.is_ack_due(ACK_BYTES), received.tell()
      (False, True, 3)
    """

    last: int = 0
    acknowledged: int = 0
    untold_bytes: int = 0

    def accept(self, number: int) -> bool:
        """Returns whether a frame is new; a repeat is False."""
        if number <= self.last:
            return False
        self.last = number
        return True

    def count(self) -> None:
        """Accepts a frame whose number is known by counting."""
        self.last += 1

    def is_ack_due(self, nbytes: int) -> bool:
        """Whether to tell the other side now.

        Args:
          nbytes: that arrived just now.
        """
        self.untold_bytes += nbytes
        new = self.last - self.acknowledged
        return new >= ACK_FRAMES or (new > 0 and self.untold_bytes >= ACK_BYTES)

    def tell(self) -> int:
        """Returns what the other side is told now."""
        self.acknowledged, self.untold_bytes = self.last, 0
        return self.acknowledged
