"""In-flight window: frames sent but not acknowledged, to resend on a new stream."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

WINDOW_FRAMES: Final = 4096
WINDOW_BYTES: Final = 256 << 20
ACK_FRAMES: Final = 64
ACK_BYTES: Final = 64 << 10
"""After so many frames or bytes the other side is told that they arrived."""
_Item = TypeVar("_Item")


@final
@dataclass(slots=True)
class AckCount:
    """What arrived since the other side was told.

    Attributes:
      told: how many frames it was told of.
      nbytes: what arrived since.

    Example:
      >>> count = AckCount()
      >>> count.is_due(1, 1000), count.is_due(1, ACK_BYTES), count.is_due(1, ACK_BYTES)
      (False, True, False)
    """

    told: int = 0
    nbytes: int = 0

    def is_due(self, received: int, nbytes: int) -> bool:
        """Whether to tell it now; if so, that counts as done.

        Args:
          received: how many frames arrived in all.
          nbytes: that arrived just now.
        """
        self.nbytes += nbytes
        new = received - self.told
        if new >= ACK_FRAMES or (new and self.nbytes >= ACK_BYTES):
            self.told, self.nbytes = received, 0
            return True
        return False


@final
class InFlightWindow(Generic[_Item]):
    """The frames that left for one task and of which it has not told yet.

    Example:
      >>> kept = InFlightWindow[str]()
      >>> for number, name in enumerate("abc", 1):
      ...     kept.add(number, name, nbytes=10)
      >>> kept.acknowledge(2)
      >>> list(kept), kept.nbytes
      ([(3, 'c')], 10)
    """

    def __init__(self) -> None:
        self._frames: deque[tuple[int, _Item, int]] = deque()
        self.nbytes = 0

    def __iter__(self) -> Iterator[tuple[int, _Item]]:
        """Yields (number, frame) in the order of sending."""
        return iter([(number, item) for number, item, _ in self._frames])

    @property
    def is_full(self) -> bool:
        """Whether the receiver must say something before more is sent."""
        return len(self._frames) >= WINDOW_FRAMES or self.nbytes >= WINDOW_BYTES

    @property
    def last_nbytes(self) -> int:
        """Size of the frame that left last; 0 if that arrived."""
        return self._frames[-1][2] if self._frames else 0

    def add(self, number: int, item: _Item, nbytes: int) -> None:
        """Keeps a frame that leaves now; numbers rise."""
        self._frames.append((number, item, nbytes))
        self.nbytes += nbytes

    def acknowledge(self, received: int) -> None:
        """Forgets the frames up to a number."""
        while self._frames and self._frames[0][0] <= received:
            self.nbytes -= self._frames.popleft()[2]

    def clear(self) -> None:
        """Forgets all."""
        self._frames.clear()
        self.nbytes = 0
