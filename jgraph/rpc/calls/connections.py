"""Pool of call connections, one list per server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeAlias, final

from jgraph.rpc.calls.caller import CallConnection
from jgraph.rpc.dial import lost_call
from jgraph.rpc.transport import Address

FEW_CALLS: Final = 4
"""Of large calls at once to a server, so many are sent before there is room there."""
Dial: TypeAlias = Callable[[Address, float], Awaitable[object]]


@final
class ConnectionPool:
    """Gives each call a line: small ones share one, others have one to themselves.

    Opening a line takes as long as sending megabytes over it. So one that a call had to
    itself waits for the next such call to the same server; one at a time, more are
    closed.

    Args:
      dial: connects to a server, within some seconds.
      make: makes a line over that connection.
    """

    def __init__(self, dial: Dial, make: Callable[[Address], CallConnection]) -> None:
        self._dial = dial
        self._make = make
        self._shared: dict[Address, CallConnection] = {}
        self._idle: dict[Address, CallConnection] = {}
        self._taken: dict[CallConnection, Address] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def shared(self, dst: Address, timeout_s: float) -> CallConnection:
        """Returns the line of all small calls to a server."""
        line = self._shared.get(dst)
        if line is None or line.is_broken:
            await self._reach(dst, timeout_s)
            line = self._shared.get(dst)  # perhaps another caller opened one meanwhile
            if line is None or line.is_broken:
                line = self._shared[dst] = self._make(dst)
        return line

    @asynccontextmanager
    async def own(
        self, dst: Address, timeout_s: float
    ) -> AsyncIterator[tuple[CallConnection, float]]:
        """Gives a line for one call, and how much of its time is left."""
        now = asyncio.get_running_loop().time
        end = now() + timeout_s
        line = self._idle.pop(dst, None)
        if line is None or line.is_broken:
            await self._reach(dst, timeout_s)
            line = self._make(dst)
        self._taken[line] = dst
        is_over = False
        try:
            yield line, max(end - now(), 1e-3)
            is_over = True
        finally:
            del self._taken[line]
            if is_over and not line.is_broken and dst not in self._idle:
                self._idle[dst] = line
            else:  # of a call that failed, some may still wait to leave
                closing = asyncio.create_task(line.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _reach(self, dst: Address, timeout_s: float) -> None:
        """Connects to a server; a line that is made after the end nobody closes."""
        if not self._is_closed:
            await self._dial(dst, timeout_s)
        if self._is_closed:
            raise lost_call("a call", dst, closed_here=True)

    def is_crowded(self, dst: Address) -> bool:
        """Whether many calls to a server have a line to themselves."""
        return list(self._taken.values()).count(dst) > FEW_CALLS

    async def close(self, of: Callable[[Address], bool] | None = None) -> None:
        """Closes all lines to some servers; what is asked fails.

        Args:
          of: whether to close those to a server; None: all, and none is made any more.
        """
        self._is_closed = self._is_closed or of is None
        pooled = [*self._shared.items(), *self._idle.items()]
        lines = [*((line, dst) for dst, line in pooled), *self._taken.items()]
        closing = (line.close() for line, dst in lines if of is None or of(dst))
        await asyncio.gather(*closing, *self._closing)
