"""A proxy that plays a slow line: what passes is late, whole, and in its order."""

import asyncio

from jgraph.testing.tcp_proxy import TcpProxy
from tests.support.run_async import run_async

NBYTES, BYTES_PER_S, DELAY_S = 1 << 15, 1 << 18, 0.05


def test_a_slow_line_passes_so_many_bytes_a_second_of_all_connections() -> None:
    async def main() -> None:
        async def echo(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            writer.write(await reader.readexactly(NBYTES))
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, TcpProxy(f"{host}:{port}") as proxy:
            proxy.bytes_per_s, proxy.delay_s = BYTES_PER_S, DELAY_S
            now = asyncio.get_running_loop().time
            began, sent = now(), bytes(range(256)) * (NBYTES // 256)

            async def there_and_back() -> bytes:
                reader, writer = await asyncio.open_connection(
                    *proxy.address.split(":")
                )
                writer.write(sent)
                back = await reader.readexactly(NBYTES)
                writer.close()
                return back

            both = await asyncio.gather(there_and_back(), there_and_back())
            took_s = now() - began
        assert set(both) == {sent}
        # Both connections share the line: 2 x NBYTES there, and the last one back.
        least_s = 2 * DELAY_S + 3 * NBYTES / BYTES_PER_S
        assert took_s >= 0.9 * least_s

    run_async(main())
