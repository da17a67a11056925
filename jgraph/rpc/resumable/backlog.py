"""Send queue of one task, bounded by bytes: pure bookkeeping.

Posting never blocks, so a task that does not take what it is sent would fill the memory
of its senders. What is left of an aborted step is withdrawn before it leaves.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

from jgraph.errors import NotTakingError
from jgraph.graph.device import TaskName
from jgraph.rpc.shared_memory.shared_memory import available_memory
from jgraph.rpc.transport import Address

MAX_QUEUED_FRAMES: Final = 1 << 16
_LEAST_QUEUED_BYTES: Final = 1 << 30
_Item = TypeVar("_Item")


def default_queue_limit() -> int:
    """Returns half of the memory that is available now, and 1 GiB at least."""
    return max(_LEAST_QUEUED_BYTES, available_memory() // 2)


@final
@dataclass(frozen=True, slots=True)
class _Waiting(Generic[_Item]):
    item: _Item
    nbytes: int
    step: Hashable


class Backlog(Generic[_Item]):
    """The frames that wait to leave, first in, first out, up to a limit.

    A frame counts until the next one is asked for: till then its bytes are being sent.
    The first frame is always taken, however large.

    Args:
      sender: the task that sends, for the message.
      peer: the task that should take them.
      address: where that is, if it is known.
      max_bytes: the most bytes to keep, headers and tensors; None: any number, and of
        frames too.
      max_frames: the most frames to keep.

    Attributes:
      queued_bytes: of what has not begun to leave.

    Example:
      >>> backlog = Backlog[str]("/job:ps/task:0", "/job:ps/task:1", "a:1", 100)
      >>> for name, step in (("a", 1), ("b", 2), ("c", 1)):
      ...     backlog.add(name, 10, step=step, now=0.0)
      >>> backlog.withdraw(1)
      2
      >>> backlog.take(now=0.5), len(backlog), backlog.nbytes
      ('b', 0, 10)
    """

    def __init__(
        self,
        sender: str = "",
        peer: TaskName | str = "",
        address: Address = "",
        max_bytes: int | None = None,
        max_frames: int = MAX_QUEUED_FRAMES,
    ) -> None:
        self._sender = sender
        self._peer = peer
        self._address = address
        self._max_bytes = max_bytes
        self._max_frames = max_frames
        self._queue: deque[_Waiting[_Item]] = deque()
        self.queued_bytes = 0
        self._leaving = 0
        self._moved = 0.0

    def __len__(self) -> int:
        """Returns how many frames have not begun to leave."""
        return len(self._queue)

    @property
    def nbytes(self) -> int:
        """Bytes of what waits or is being sent."""
        return self.queued_bytes + self._leaving

    def add(self, item: _Item, nbytes: int, *, step: Hashable, now: float) -> None:
        """Puts a frame behind the others.

        Args:
          item: the frame.
          nbytes: its size.
          step: what ``withdraw`` names; None is never withdrawn.
          now: monotonic seconds.

        Raises:
          NotTakingError: it would be too much; the frame was not added.
        """
        if not self.nbytes and not self._queue:
            self._moved = now
        elif (limit := self._max_bytes) is not None and (
            self.nbytes + nbytes > limit or len(self._queue) >= self._max_frames
        ):
            raise self._too_much(limit, now)
        self._queue.append(_Waiting(item, nbytes, step))
        self.queued_bytes += nbytes

    def take(self, *, now: float) -> _Item:
        """Returns the next frame; the one before has left."""
        waiting = self._queue.popleft()
        self.queued_bytes -= waiting.nbytes
        self._leaving = waiting.nbytes
        self._moved = now
        return waiting.item

    def moved(self, *, now: float) -> None:
        """Notes that the peer took some bytes."""
        self._moved = now

    def finish_frame(self) -> None:
        """Notes that all of the last frame has left."""
        self._leaving = 0

    def withdraw(self, step: Hashable) -> int:
        """Drops the frames of a step that have not begun to leave; returns how many."""
        others = deque(waiting for waiting in self._queue if waiting.step != step)
        dropped = len(self._queue) - len(others)
        if dropped:
            self._queue = others
            self.queued_bytes = sum(waiting.nbytes for waiting in others)
        return dropped

    def clear(self) -> None:
        """Drops everything."""
        self._queue.clear()
        self.queued_bytes = self._leaving = 0

    def _too_much(self, limit: int, now: float) -> NotTakingError:
        frames = len(self._queue) + bool(self._leaving)
        where = f" at {self._address}" if self._address else ""
        return NotTakingError(
            f"{self._peer}{where} does not take what {self._sender} sends: "
            f"{frames:,} frames ({self.nbytes:,} bytes) wait, none moved for "
            f"{now - self._moved:.1f} s, and {self._max_frames:,} frames or "
            f"{limit:,} bytes is the limit; look at its log, and at the "
            f"network between the two",
            task=self._peer,
            address=self._address,
            waiting_frames=frames,
            waiting_bytes=self.nbytes,
            since_s=round(now - self._moved, 3),
        )
