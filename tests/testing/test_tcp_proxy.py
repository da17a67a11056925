"""A proxy that plays a slow line: what passes is late, whole, and in its order."""

import asyncio

import pytest

from jgraph.testing.tcp_proxy import TcpProxy
from tests.support.run_async import run_async

NBYTES, BYTES_PER_S, DELAY_S = 1 << 15, 1 << 18, 0.05


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_slow_line_passes_so_many_bytes_a_second_of_all_connections(
    is_shared: bool,
) -> None:
    async def main() -> None:
        async def echo(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            writer.write(await reader.readexactly(NBYTES))
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        target = f"{host}:{port}"
        async with server, TcpProxy(target) as proxy, TcpProxy(target) as beside:
            proxy.bytes_per_s, proxy.delay_s = BYTES_PER_S, DELAY_S
            beside.bytes_per_s, beside.delay_s = BYTES_PER_S, DELAY_S
            beside.free_at = proxy.free_at
            now = asyncio.get_running_loop().time
            began, sent = now(), bytes(range(256)) * (NBYTES // 256)

            async def there_and_back(over: TcpProxy) -> bytes:
                reader, writer = await asyncio.open_connection(*over.address.split(":"))
                writer.write(sent)
                back = await reader.readexactly(NBYTES)
                writer.close()
                return back

            other = beside if is_shared else proxy
            both = await asyncio.gather(there_and_back(proxy), there_and_back(other))
            took_s = now() - began
        assert set(both) == {sent}
        # Both connections share the line: 2 x NBYTES there, and the last one back.
        least_s = 2 * DELAY_S + 3 * NBYTES / BYTES_PER_S
        assert took_s >= 0.9 * least_s

    run_async(main())
