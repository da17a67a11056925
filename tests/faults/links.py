"""Clusters of this process whose links pass proxies: a network that can go wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from jgraph.cluster import loop
from jgraph.cluster.spec import ClusterSpec
from jgraph.testing.tcp_proxy import TcpProxy
from tests.cluster.conftest import Servers


@final
class Link:
    """From one task to another."""

    def __init__(self, target: str) -> None:
        self._proxy = TcpProxy(target)
        loop.run(self._proxy.__aenter__())
        self.address = self._proxy.address

    def cut(self) -> None:
        """Resets its connections; new ones are taken."""
        self._call(self._proxy.cut)

    def silence(self) -> None:
        """Passes nothing on, and closes nothing."""
        self._call(self._proxy.silence)

    def heal(self) -> None:
        """Passes on again."""
        self._call(self._proxy.heal)

    def delay(self, seconds: float) -> None:
        """Passes on so much later."""
        self._proxy.delay_s = seconds

    def close(self) -> None:
        """Ends it."""
        loop.run(self._proxy.__aexit__())

    def _call(self, act: Callable[[], None]) -> None:
        loop.event_loop().call_soon_threadsafe(act)


@contextmanager
def through_proxies(*links: tuple[str, str]) -> Iterator[tuple[Servers, list[Link]]]:
    """A cluster in which these links, from a task to another, pass proxies."""
    servers = Servers(transport="grpc", ps=2, worker=2)
    spec, made = servers.spec, list[Link]()
    for src in {src for src, _ in links}:
        addresses = {str(task): spec.address(task) for task in spec.tasks()}
        for dst in (dst for s, dst in links if s == src):
            made.append(Link(addresses[dst]))
            addresses[dst] = made[-1].address
        jobs = {
            job: [a for task, a in addresses.items() if task.startswith(f"/job:{job}/")]
            for job in ("ps", "worker")
        }
        servers.server(src).set_cluster(ClusterSpec(jobs))
    try:
        yield servers, made
    finally:
        for link in made:
            link.close()
        servers.stop()
