"""Admission control of calls: limits the request bytes that a task holds at once.

Decided when the header of a call is read, before memory is taken for its tensors. What
is refused is thrown away as it arrives. A large header needs room itself, as soon as
its length is read; without it the stream ends, as nobody knows whose call it is. Who
was refused, or sends much at once, asks for room first, and gets it in the order of
asking. Who has room, and does not send what it is for, loses it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias, final

from jgraph.errors import ClusterBusyError, ConfigError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.shared_memory.shared_memory import available_memory
from jgraph.rpc.wire.decoder import Decoder

TURN_S: Final = 5.0
"""Who asks for room waits so long, and is then told to try again."""
LOOK_EVERY_S: Final = 10.0
"""How often is looked whether a call that has room goes on arriving.

That little comes shows only by looking: no event tells of it.
"""
_LEAST_BYTES: Final = 256 << 20
_LEAST_NEWS: Final = 64 << 10
_MOST_LOOKS: Final = 2  # one finds what a process that was frozen has not read yet
Admit: TypeAlias = Callable[[pb.Frame, int], bool]
Announced: TypeAlias = Callable[[int], None]


@final
class RequestBudget:
    """The bytes of calls that one task has in its memory, and how many it may.

    Args:
      limit: the most; a single call may have more, if there is no other. A quarter of
        the memory that is available now unless given, and 256 MiB at least.

    Attributes:
      limit: the same.
      taken: by calls that are not answered yet.
      has_refused: since it was empty.

    Raises:
      ConfigError: a limit below 1.

    Example:
      >>> room = RequestBudget(100)
      >>> room.take(300), room.take(1)
      (True, False)
      >>> room.give(300)
      >>> room.take(60), room.take(60), room.take(40)
      (True, False, True)
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is None:
            limit = max(_LEAST_BYTES, available_memory() // 4)
        if limit < 1:
            raise ConfigError(
                f"max_request_bytes={limit} lets nobody ask anything; give a number "
                "of bytes, for example max_request_bytes=1 << 30",
                max_request_bytes=limit,
            )
        self.limit = limit
        self.taken = 0
        self.has_refused = False
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, nbytes: int, *, always: bool = False) -> bool:
        """Takes room; returns whether there was any, and takes none otherwise.

        Args:
          nbytes: how much.
          always: also beyond the limit, and before those who wait.
        """
        if not always and (self._waiting or not self._fits(nbytes)):
            return False
        self.taken += nbytes
        return True

    async def turn(self, nbytes: int) -> None:
        """Takes room when there is some, after those who asked before.

        Raises:
          TimeoutError: that was not within ``TURN_S``.
        """
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, mine))
        try:
            async with asyncio.timeout(TURN_S):
                await mine
        except BaseException:
            if not mine.cancelled():  # it came just then
                self.give(nbytes)
            self._let_in()
            raise

    def give(self, nbytes: int) -> None:
        """Gives back what was taken."""
        self.taken -= nbytes
        if not self.taken:
            self.has_refused = False
        self._let_in()

    def _fits(self, nbytes: int) -> bool:
        return not self.taken or self.taken + nbytes <= self.limit

    def _let_in(self) -> None:
        """Gives room to those who wait, and forgets those who do not any more."""
        while self._waiting:
            nbytes, waiting = self._waiting[0]
            if not waiting.done() and not self._fits(nbytes):
                return
            self._waiting.popleft()
            if not waiting.done():
                self.taken += nbytes
                waiting.set_result(None)


@final
class Admission:
    """What is let in of one stream: calls, and large headers of any frames.

    What tasks send always is: it is part of something that was let in before, and would
    else wait for one another. The tensors of posted frames are bounded where they are
    kept.

    Args:
      room: of the task.
      make_decoder: gives what turns the chunks of the stream into frames; it asks what
        it is given whether to take the tensors of a frame, and a large header.
      of_calls: these are calls, or else posted frames.

    Attributes:
      decoder: of the stream.
      of_task: the caller says to be a task, and may be one.
    """

    def __init__(
        self,
        room: RequestBudget,
        make_decoder: Callable[[Admit, Announced], Decoder],
        *,
        of_calls: bool = True,
    ) -> None:
        self.decoder = make_decoder(self._admit, self._announced)
        self.of_task = False
        self._room = room
        self._of_calls = of_calls
        self._let_in: dict[int, int] = {}  # bytes of the calls that have not begun
        self._refused: dict[int, int] = {}
        self._reserved = 0
        self._header = 0  # bytes of the one that arrives
        self._is_closed = False
        # What was found when it was last looked.
        self._fed = 0
        self._seen: int | None = None
        self._looks = self._looks_reserved = 0

    def is_stuck(self) -> bool:
        """Whether a call that has room has brought nearly nothing at the last looks.

        Room that was kept for a call that has not come meanwhile is given back.
        """
        coming = -1 if self._header else next(iter(self._let_in), None)
        stands = coming is not None and coming == self._seen
        news = self.decoder.fed_bytes - self._fed
        self._looks = self._looks + 1 if stands and news < _LEAST_NEWS else 0
        self._seen, self._fed = coming, self.decoder.fed_bytes
        if self._looks_reserved == _MOST_LOOKS:
            self._room.give(self._reserved)
            self._reserved = 0
        self._looks_reserved += 1
        return self._looks >= _MOST_LOOKS

    async def reserve(self, nbytes: int, method: str, task: str) -> None:
        """Waits until there is room for the next call, and keeps it for that.

        Args:
          nbytes: of its tensors and a large header; no more than it needs.
          method: of it, for the message.
          task: which refuses, for the message.

        Raises:
          ClusterBusyError: there was none for a while.
        """
        if not self._room.take(nbytes, always=self.of_task):
            try:
                await self._room.turn(nbytes)
            except TimeoutError:
                raise self._busy(nbytes, method, task) from None
        self._room.give(self._reserved)
        self._reserved, self._looks_reserved = nbytes, 0
        if self._is_closed:
            self.close()

    def begin(self, number: int, method: str, task: str) -> int:
        """Returns the bytes of a call that arrived; they are the caller's to give back.

        Args:
          number: of the call on its stream.
          method: of the call, for the message.
          task: which refuses, for the message.

        Raises:
          ClusterBusyError: it was not let in, and its tensors are lost.
        """
        nbytes = self._refused.pop(number, 0)
        if nbytes:
            self._room.give(self._let_in.pop(number, 0))
            raise self._busy(nbytes, method, task)
        return self._let_in.pop(number, 0)

    def close(self) -> None:
        """Gives back what calls have that will not arrive any more."""
        self._is_closed = True
        self._room.give(self._reserved + self._header + sum(self._let_in.values()))
        self._reserved = self._header = 0
        self._let_in.clear()

    def _busy(self, nbytes: int, method: str, task: str) -> ClusterBusyError:
        return ClusterBusyError(
            f"{task} has no room for the {nbytes:,} bytes of '{method}' now: of "
            f"{self._room.limit:,} bytes for calls, others have "
            f"{self._room.taken:,}; try again later, or start it with a higher "
            "max_request_bytes",
            refused=method,
            task=task,
        )

    def _announced(self, nbytes: int) -> None:
        """Takes room for a header.

        Raises:
          ClusterBusyError: there is none.
        """
        if nbytes <= self._reserved:
            self._reserved -= nbytes
        elif not self._room.take(nbytes, always=self.of_task):
            raise ClusterBusyError(
                f"there is no room for the header of a call, {nbytes:,} bytes, now: of "
                f"{self._room.limit:,} bytes for calls, others have "
                f"{self._room.taken:,}; try again later, or start the task with a "
                "higher max_request_bytes"
            )
        self._header = nbytes

    def _admit(self, header: pb.Frame, nbytes: int) -> bool:
        number = header.sequence
        head, self._header = self._header, 0
        if not (self._of_calls and header.method) or number in self._let_in:
            self._room.give(head)
            return not self._of_calls  # else of no call, or of one that was made twice
        if nbytes <= self._reserved:
            self._let_in[number], self._reserved = head + self._reserved, 0
            return True
        if self._room.take(nbytes, always=self.of_task):
            self._let_in[number] = head + nbytes
            return True
        self._refused[number] = nbytes
        if head:  # as long as the header is kept
            self._let_in[number] = head
        return False
