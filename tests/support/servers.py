"""A cluster of servers in this process, over real gRPC on loopback."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.client.session import Session
from jgraph.cluster import event_loop
from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import TransportChoice
from jgraph.server.server import Server


class Servers:
    """Servers of this process, joined to one cluster.

    With ``hosts`` the tasks of each job are at so many addresses of this machine, which
    count as hosts; neighbours are together.
    """

    def __init__(
        self,
        *,
        allow_sources: Sequence[str] = (),
        transport: TransportChoice = "auto",
        tls: Path | None = None,
        hosts: int = 1,
        **jobs: int,
    ) -> None:
        self.hosts = {
            (job, index): f"127.0.0.{1 + index * hosts // count}"
            for job, count in jobs.items()
            for index in range(count)
        }
        self.servers = [
            Server(
                {job: {index: f"{host}:0"}},
                job,
                index,
                bind=host,
                transport=transport,
                allow_sources=allow_sources,
                tls=tls,
            )
            for (job, index), host in self.hosts.items()
        ]
        self.spec = ClusterSpec(
            {
                job: [
                    s.address for s in self.servers if s.task.startswith(f"/job:{job}/")
                ]
                for job in jobs
            }
        )
        for server in self.servers:
            server.set_cluster(self.spec)

    def server(self, task: str) -> Server:
        return next(s for s in self.servers if s.task == task)

    def lose(self, task: str) -> None:
        """Cuts a task off, as the end of its host would."""
        server = self.server(task)._server
        assert server is not None

        async def end() -> None:
            server.master.runs.close()
            await server._transport.close()

        event_loop.run(end())

    def start_again(self, task: str) -> None:
        """Starts a task where it was, after its server has ended."""
        old = self.server(task)
        old.stop(grace_s=0.0)
        self.servers.remove(old)
        job, _, index = task.removeprefix("/job:").partition("/task:")
        host = self.hosts[job, int(index)]
        self.servers.append(Server(self.spec, job, int(index), bind=host))

    def stop(self) -> None:
        for server in self.servers:
            server.stop(grace_s=1.0)


@contextmanager
def connected(
    *, allow_sources: Sequence[str] = (), hosts: int = 1, **jobs: int
) -> Iterator[Cluster]:
    """A client of servers of this process, which end with it."""
    servers = Servers(
        allow_sources=allow_sources, transport="auto", tls=None, hosts=hosts, **jobs
    )
    try:
        with connect(servers.servers[-1].target, timeout_s=20) as cluster:
            yield cluster
    finally:
        servers.stop()


def ps_bytes(cluster: Cluster) -> int:
    """Returns what ps and workers have sent each other, by the counters of the ps."""
    return sum(
        peer.bytes_sent
        + peer.shared_bytes_sent
        + peer.bytes_received
        + peer.shared_bytes_received
        for task in cluster.status().tasks
        if "ps" in task.task
        for peer in task.traffic
        if "worker" in peer.peer
    )


def bytes_between_hosts(cluster: Cluster) -> int:
    """Returns what tasks have sent to tasks with another address."""
    hosts = {str(task): host for task, host in cluster.spec.hosts.items()}
    return sum(
        peer.bytes_sent + peer.shared_bytes_sent
        for task in cluster.status().tasks
        for peer in task.traffic
        if peer.peer in hosts and hosts[peer.peer] != hosts[task.task]
    )


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=2)
    yield servers
    servers.stop()


@pytest.fixture
def cluster(servers: Servers) -> Iterator[Cluster]:
    """A client's view; the cluster is left as it was found."""
    with ExitStack() as stack:
        cluster = stack.enter_context(connect(servers.servers[-1].target, timeout_s=20))
        stack.callback(cluster.reset)
        yield cluster


@pytest.fixture
def session(cluster: Cluster) -> Session:
    return cluster.session()
