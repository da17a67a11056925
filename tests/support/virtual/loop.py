"""Event loop in virtual time, whose connections are those of a virtual network.

Nothing sleeps: when all wait, time goes on to what happens next. The same seed gives
the same run.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, final

from tests.support.virtual.network import Network

_T = TypeVar("_T")


@final
class _Skipping(selectors.DefaultSelector):
    """Lets time pass where a loop would wait."""

    def __init__(self, skip: Callable[[float], None]) -> None:
        super().__init__()
        self._skip = skip

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("all wait for one another")
        self._skip(max(timeout, 0.0))
        return super().select(0)


@final
class VirtualLoop(asyncio.SelectorEventLoop):
    """Takes time and connections from a network."""

    def __init__(self, network: Network) -> None:
        super().__init__(_Skipping(self._skip))
        self._network = network
        self._virtual_s = 0.0

    def _skip(self, seconds: float) -> None:
        self._virtual_s += seconds

    def time(self) -> float:
        return self._virtual_s

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], Any],
        host: str,
        port: int,
        **options: Any,
    ) -> tuple[asyncio.Transport, Any]:
        if options.get("ssl") is not None:
            raise ConnectionResetError  # nobody here speaks TLS
        return await self._network.connect(protocol_factory, port)

    async def sock_accept(self, sock: Any) -> Any:
        return await sock.accept(), None

    async def connect_accepted_socket(
        self, protocol_factory: Callable[[], Any], sock: Any, **options: Any
    ) -> tuple[asyncio.Transport, Any]:
        assert options.get("ssl") is None
        accepted: tuple[asyncio.Transport, Any] = sock.begin(protocol_factory)
        return accepted


def run_virtual(network: Network, main: Awaitable[_T], timeout_s: float) -> _T:
    """Returns the result of ``main``; fails on errors that only the loop saw."""
    loop = VirtualLoop(network)
    unseen: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context))

    async def limited() -> _T:
        async with asyncio.timeout(timeout_s):
            return await main

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(limited())
    assert not unseen, unseen
    return result
