import asyncio
from typing import Any

import pytest

from jgraph.errors import ClusterUnreachableError
from jgraph.rpc.grpc.channels import Channels
from jgraph.rpc.transport import Address
from tests.support.run_async import run_async


def test_each_who_asks_for_a_channel_waits_as_long_as_it_may_itself() -> None:
    """The first is in a hurry; the second has the channel that opens after that."""

    async def main() -> None:
        channels, opens = Channels(None, None), asyncio.Event()
        channel: Any = object()

        async def opened(dst: Address, timeout_s: float) -> Any:
            try:
                async with asyncio.timeout(timeout_s):
                    await opens.wait()
            except TimeoutError:
                raise ClusterUnreachableError("not in that time") from None
            return channel

        channels.open = opened  # type: ignore[method-assign,assignment]
        hurried = asyncio.create_task(channels.shared("127.0.0.1:1", 0.01))
        patient = asyncio.create_task(channels.shared("127.0.0.1:1", 30))
        with pytest.raises(ClusterUnreachableError):
            await hurried
        opens.set()
        assert await patient is channel

    run_async(main())
