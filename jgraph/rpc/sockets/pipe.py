"""Pipe of frames: a gRPC stream, or a socket beside it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final, Protocol, final

from jgraph.rpc.wire.codec import Buffer, pack


def not_counted(nbytes: int) -> None:
    """Counts no bytes."""


class Pipe(Protocol):
    """What frames leave through."""

    @property
    def keeps(self) -> bool:
        """Whether it may break while both ends live.

        What left through it is kept then until it is acknowledged.
        """

    async def write(
        self, pieces: Iterable[Buffer], moved: Callable[[int], None] = not_counted
    ) -> None:
        """Writes pieces when there is room.

        Args:
          pieces: must not change until the other side has them.
          moved: is told of bytes that leave.
        """


class Stream(Protocol):
    """A stream of gRPC, as the side that sends the first frame uses it."""

    def write(self, chunk: bytes, /) -> Awaitable[None]:
        """Sends a chunk."""

    def done_writing(self) -> Awaitable[None]:
        """Says that nothing follows."""

    def cancel(self) -> bool:
        """Ends it; says whether it was there."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields the chunks of the other side."""


@final
class StreamPipe:
    """A stream of gRPC.

    Args:
      write: of the stream.
    """

    keeps: Final = True

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._write = write

    async def write(
        self, pieces: Iterable[Buffer], moved: Callable[[int], None] = not_counted
    ) -> None:
        """Writes pieces in chunks; each byte is copied, as gRPC takes only bytes."""
        for chunk in pack(pieces):
            moved(len(chunk))
            await self._write(chunk)
