"""Dynamic batching: which requests run together, which wait, and which are refused.

One machine for each function of a version. A request that comes while an execution is
free runs at once; those that come meanwhile are put together, up to ``max_rows``, and
padded to the next size of ``buckets``, so that code is compiled for few sizes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.errors import ConfigError

FULL: Final = "full"
LARGE: Final = "large"
LATE: Final = "late"


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """What a function takes at a time.

    Attributes:
      max_rows: rows of one execution; a request with more is cut.
      buckets: numbers of rows that executions have; the last is ``max_rows``.
      max_delay_s: how long a request may wait for others while nothing runs.
      slots: executions at a time.
      max_queued_rows: rows that may wait; what comes then is refused.
      merges: whether requests may run together, and be padded or cut.
    """

    max_rows: int = 64
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    max_delay_s: float = 0.0
    slots: int = 1
    max_queued_rows: int = 1024
    merges: bool = True

    def __post_init__(self) -> None:
        sizes = self.buckets
        if not sizes or list(sizes) != sorted({*sizes}) or sizes[0] < 1:
            raise ConfigError(f"buckets={list(sizes)}: give rising numbers from 1 on")
        if sizes[-1] != self.max_rows:
            raise ConfigError(
                f"the last of buckets is {sizes[-1]} and max_rows is {self.max_rows}; "
                "make them equal"
            )
        if self.slots < 1 or self.max_queued_rows < 1 or self.max_delay_s < 0:
            raise ConfigError(
                "slots and max_queued_rows are 1 at least, max_delay_ms is 0 at least"
            )

    def bucket(self, rows: int) -> int:
        """Returns the size that so many rows are padded to."""
        if not self.merges:
            return rows
        return next(size for size in self.buckets if size >= rows)


@final
@dataclass(frozen=True, slots=True)
class Came:
    """A request came, to be answered before ``deadline``."""

    request: int
    rows: int
    deadline: float
    now: float


@final
@dataclass(frozen=True, slots=True)
class Left:
    """Whoever asked does not wait for the answer any more."""

    request: int
    now: float


@final
@dataclass(frozen=True, slots=True)
class Freed:
    """An execution ended."""

    slot: int
    now: float


@final
@dataclass(frozen=True, slots=True)
class Tick:
    """The time that ``WakeAt`` named."""

    now: float


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a request: ``first``, and so many."""

    request: int
    first: int
    rows: int


@final
@dataclass(frozen=True, slots=True)
class Execute:
    """Run these rows together, padded to ``bucket``."""

    slot: int
    pieces: tuple[Piece, ...]
    bucket: int


@final
@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer that it is too ``late``, too ``large``, or that the queue is ``full``."""

    request: int
    why: str


@final
@dataclass(frozen=True, slots=True)
class WakeAt:
    """Tell a ``Tick`` then; a later one that was asked for is needed no more."""

    at: float


Event: TypeAlias = Came | Left | Freed | Tick
Instruction: TypeAlias = Execute | Refuse | WakeAt


@final
@dataclass(slots=True)
class _Waiting:
    """What of a request waits.

    Attributes:
      piece: the rows.
      deadline: of the request.
      since: when it came.
    """

    piece: Piece
    deadline: float
    since: float


@final
class Batching:
    """State machine of one function of a version.

    Args:
      limits: what it takes at a time.

    Example:
      >>> batching = Batching(Limits(max_rows=4, buckets=(1, 4)))
      >>> batching.handle(Came(1, rows=1, deadline=9.0, now=0.0))
      [Execute(slot=0, pieces=(Piece(request=1, first=0, rows=1),), bucket=1)]
      >>> batching.handle(Came(2, rows=1, deadline=9.0, now=0.1))
      [WakeAt(at=9.0)]
      >>> batching.handle(Came(3, rows=2, deadline=9.0, now=0.2))
      []
      >>> [run] = batching.handle(Freed(0, now=0.3))
      >>> [piece.request for piece in run.pieces], run.bucket
      ([2, 3], 4)
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queue: deque[_Waiting] = deque()
        self._free = list(range(limits.slots - 1, -1, -1))
        self._wake = float("inf")
        self.queued_rows = 0

    def runs_at_once(self, rows: int, deadline: float, now: float) -> bool:
        """Whether a request that came now would be the next execution, as it is.

        If so, and nothing else is told before it has ended, the machine need not know
        of it.
        """
        limits = self._limits
        if self._queue or not self._free or deadline <= now:
            return False
        if not limits.merges:
            return rows <= limits.max_queued_rows
        if limits.max_delay_s and rows < limits.max_rows:
            return False  # it waits for others
        return rows in limits.buckets

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        done: list[Instruction] = []
        match event:
            case Came(request, rows, deadline, now):
                if (why := self._refused(rows, deadline, now)) is not None:
                    return [Refuse(request, why)]
                self._put(request, rows, deadline, now)
            case Left(request):
                self._drop(lambda one: one.piece.request == request)
            case Freed(slot):
                self._free.append(slot)
            case Tick():
                self._wake = float("inf")
        self._end_late(event.now, done)
        while self._free and self._is_due(event.now):
            done.append(self._formed())
        self._wake_up(event.now, done)
        return done

    def _refused(self, rows: int, deadline: float, now: float) -> str | None:
        if rows > self._limits.max_queued_rows:
            return LARGE
        if deadline <= now:
            return LATE
        return FULL if self.queued_rows + rows > self._limits.max_queued_rows else None

    def _put(self, request: int, rows: int, deadline: float, now: float) -> None:
        most = self._limits.max_rows if self._limits.merges else rows
        for first in range(0, rows, most):
            piece = Piece(request, first, min(most, rows - first))
            self._queue.append(_Waiting(piece, deadline, now))
        self.queued_rows += rows

    def _drop(self, is_gone: Callable[[_Waiting], bool]) -> set[int]:
        leavers = [one for one in self._queue if is_gone(one)]
        if leavers:
            self._queue = deque(one for one in self._queue if not is_gone(one))
            self.queued_rows -= sum(one.piece.rows for one in leavers)
        return {one.piece.request for one in leavers}

    def _end_late(self, now: float, done: list[Instruction]) -> None:
        if all(one.deadline > now for one in self._queue):
            return
        late = self._drop(lambda one: one.deadline <= now)
        done += [Refuse(request, LATE) for request in sorted(late)]

    def _is_due(self, now: float) -> bool:
        """Whether what waits should run, now that it can."""
        if not self._queue:
            return False
        limits = self._limits
        if not limits.merges or self.queued_rows >= limits.max_rows:
            return True
        return now >= self._queue[0].since + limits.max_delay_s

    def _formed(self) -> Execute:
        pieces: list[Piece] = []
        rows = 0
        while self._queue:
            piece = self._queue[0].piece
            if pieces and not self._fits(rows + piece.rows):
                break
            self._queue.popleft()
            pieces.append(piece)
            rows += piece.rows
        self.queued_rows -= rows
        return Execute(self._free.pop(), tuple(pieces), self._limits.bucket(rows))

    def _fits(self, rows: int) -> bool:
        return self._limits.merges and rows <= self._limits.max_rows

    def _wake_up(self, now: float, done: list[Instruction]) -> None:
        """Asks for a tick at the next deadline, or when what waits is due."""
        if not self._queue:
            return
        at = min(one.deadline for one in self._queue)
        if self._free:
            at = min(at, self._queue[0].since + self._limits.max_delay_s)
        if at < self._wake or self._wake <= now:
            self._wake = at
            done.append(WakeAt(at))
