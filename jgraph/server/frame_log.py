"""Frame log: the newest frames of a run, and those to come, for whoever follows."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from typing import TypeAlias, final

from jgraph.rpc.frames import kind_of
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.codec import encode
from jgraph.rpc.wire.decoder import Decoder

_Entry: TypeAlias = Frame | bytes
"""A report, of which a run has millions, is bytes: a tenth of what its objects take."""


@final
class FrameLog:
    """Keeps the newest frames, up to so many bytes; each has a number, from 0.

    Args:
      most_bytes: of them all; beyond, the oldest frames go.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: deque[_Entry] = deque()
        self._first = self._nbytes = 0
        self._is_ended = False
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_whole(self) -> bool:
        """Whether all frames are kept that it has had."""
        return self._first == 0

    @property
    def count(self) -> int:
        """How many it has had."""
        return self._first + len(self._entries)

    @property
    def news(self) -> Awaitable[None]:
        """Done as soon as something happens after this."""
        return asyncio.shield(self._news)

    def append(self, entry: Frame) -> None:
        """Adds a frame."""
        is_report = kind_of(entry) == "loop_report"
        item = b"".join(encode(entry).pieces) if is_report else entry
        self._entries.append(item)
        self._nbytes += _nbytes(item)
        while self._nbytes > self._most_bytes and len(self._entries) > 1:
            self._first += 1
            self._nbytes -= _nbytes(self._entries.popleft())
        self._tell()

    def end(self) -> None:
        """Lets go who follows, once that has all frames."""
        self._is_ended = True
        self._tell()

    async def follow(self, at: int) -> AsyncIterator[tuple[int, Frame]]:
        """Yields what is kept from a frame on, and what comes, each with its number."""
        while True:
            news, ends = self.news, self._is_ended
            at = max(at, self._first)
            while at < self.count:
                yield at, _frame(self._entries[at - self._first])
                at = max(at + 1, self._first)
            if ends:
                return
            await news

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.get_running_loop().create_future()
        news.set_result(None)


def _nbytes(entry: _Entry) -> int:
    if isinstance(entry, bytes):
        return len(entry)
    header: int = entry.header.ByteSize()
    return header + sum(tensor.nbytes for tensor in entry.tensors)


def _frame(entry: _Entry) -> Frame:
    if not isinstance(entry, bytes):
        return entry
    (found,) = Decoder().feed(entry)
    return found
