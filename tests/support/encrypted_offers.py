"""Data sockets with TLS through proxies, which cannot read where their offers lead."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.sockets.connecting import DataDialer
from jgraph.rpc.sockets.frame_socket import FrameSocket, Take
from jgraph.testing.tcp_proxy import TcpProxy


@contextmanager
def data_through(proxies: Iterable[TcpProxy]) -> Iterator[None]:
    """Who dials one of these proxies in this process takes it for data as well."""
    ports = {proxy.address.rpartition(":")[2]: proxy for proxy in proxies}
    connect = DataDialer.connect

    async def led(
        self: DataDialer, address: str, offer: pb.DataSocket, task: str, take: Take
    ) -> FrameSocket | None:
        proxy = ports.get(address.rpartition(":")[2])
        if proxy is not None:
            offer.port = await proxy.lead_data(offer.port)
        return await connect(self, address, offer, task, take)

    DataDialer.connect = led  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataDialer.connect = connect  # type: ignore[method-assign]
