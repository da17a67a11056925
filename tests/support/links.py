"""Clusters of this process whose links pass proxies: a network that can go wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from jgraph.cluster import event_loop
from jgraph.cluster.spec import ClusterSpec
from jgraph.server.server import Server
from jgraph.testing.tcp_proxy import TcpProxy
from tests.support.encrypted_offers import data_through
from tests.support.servers import Servers

CLIENT = "client"
NOTICED_S = 25.0
"""In which a silent link is given up: after 15 s of keepalive, and 4 s for coming back.

The rest is for a busy machine.
"""


@final
class Link:
    """From one task to another."""

    def __init__(self, target: str) -> None:
        self.proxy = TcpProxy(target)
        event_loop.run(self.proxy.__aenter__())
        self.address = self.proxy.address

    def cut(self) -> None:
        """Resets its connections; new ones are taken."""
        self._call(self.proxy.cut)

    def cut_after(self, nbytes: int) -> None:
        """Resets its connections when so many bytes have passed towards the task."""
        self.proxy.cut_after_bytes = self.proxy.passed_bytes + nbytes

    def flip(self) -> None:
        """Flips a bit of what passes next, either way."""
        self.proxy.flips = 1

    @property
    def has_flipped(self) -> bool:
        """Whether something passed since then."""
        return not self.proxy.flips

    def silence(self) -> None:
        """Passes nothing on, and closes nothing."""
        self._call(self.proxy.silence)

    def heal(self) -> None:
        """Passes on again."""
        self._call(self.proxy.heal)

    def lead_to(self, target: str) -> None:
        """Sends connections that are made from now on to another process."""
        self.proxy.lead_to(target)

    def delay(self, seconds: float) -> None:
        """Passes on so much later."""
        self.proxy.delay_s = seconds

    def close(self) -> None:
        """Ends it."""
        event_loop.run(self.proxy.__aexit__())

    def _call(self, act: Callable[[], None]) -> None:
        event_loop.event_loop().call_soon_threadsafe(act)


@final
class ProxiedServers:
    """Servers of a cluster in which some links pass proxies."""

    def __init__(self, servers: Servers, from_client: dict[str, str]) -> None:
        self._servers = servers
        self._from_client = from_client

    def server(self, task: str) -> Server:
        return self._servers.server(task)

    def target(self, task: str) -> str:
        """Returns what a client connects to; through a proxy if that is a link."""
        server = self.server(task)
        scheme, _, address = server.target.partition("://")
        return f"{scheme}://{self._from_client.get(task, address)}"


@contextmanager
def through_proxies(
    *links: tuple[str, str], chief: bool = False, tls: Path | None = None
) -> Iterator[tuple[ProxiedServers, list[Link]]]:
    """A cluster in which these links, from a task or client to a task, pass proxies.

    It has two ps, two workers, and, if wanted, a task of the job ``chief``; with TLS if
    there is a directory of certificates.
    """
    names = ("ps", "worker", *(["chief"] if chief else []))
    if chief:
        servers = Servers(transport="grpc", tls=tls, ps=2, worker=2, chief=1)
    else:
        servers = Servers(transport="grpc", tls=tls, ps=2, worker=2)
    spec = servers.spec
    by_ends = {(src, dst): Link(spec.address(dst)) for src, dst in links}
    for server in servers.servers:
        addresses = {
            str(task): by_ends[server.task, task].address
            if (server.task, task) in by_ends
            else spec.address(task)
            for task in spec.tasks()
        }
        jobs = {
            job: [a for task, a in addresses.items() if task.startswith(f"/job:{job}/")]
            for job in names
        }
        server.set_cluster(ClusterSpec(jobs))
    from_client = {
        dst: link.address for (src, dst), link in by_ends.items() if src == CLIENT
    }
    encrypted = by_ends.values() if tls is not None else ()
    try:
        with data_through(link.proxy for link in encrypted):
            yield ProxiedServers(servers, from_client), list(by_ends.values())
    finally:
        for link in by_ends.values():
            link.close()
        servers.stop()
