"""A run whose parameter servers join and leave, in this process."""

from typing import Any, final

from jgraph.client.cluster import Cluster
from jgraph.server.members.joining import join_cluster
from jgraph.server.server import Server
from jgraph.train.trainer import Trainer
from tests.support.waiting import wait_until


@final
class Rescaled:
    """Lets ps join and leave the run of a cluster."""

    def __init__(self, cluster: Cluster, run: Any) -> None:
        self._cluster, self._run = cluster, run
        self.servers: list[Server] = []

    def to(self, ps: int) -> None:
        """Waits until the variables lie on so many ps, and some steps are done."""
        while len(self.servers) + 1 < ps:
            self.servers.append(join_cluster(self._cluster.target, "ps"))
        for server in reversed(self.servers[ps - 1 :]):
            self._cluster.announce(server.task)
        wait_until(lambda: self.now == ps)
        for _ in self.servers[ps - 1 :]:
            self.servers.pop().stop(1.0)
        self._cluster.refresh()
        until = self._run.steps + 10
        wait_until(lambda: self._run.steps >= until or self._run.state != "running")
        assert self._run.state == "running"

    @property
    def now(self) -> int:
        """On how many ps the variables lie."""
        return next(r.ps for r in self._cluster.runs() if r.state == "running")

    def end(self) -> None:
        self._run.stop()
        self._run.wait(30)

    def stop(self) -> None:
        for server in self.servers:
            server.stop(0.0)


def begun(
    cluster: Cluster, there: Trainer, data: Any, batch: int, **options: Any
) -> Any:
    """Begins a run, and waits for its first steps."""
    how = {"block": False, "progress": False, **options}
    run = there.fit(data, steps=10**6, batch_size=batch, **how)
    wait_until(lambda: run.steps >= 10)
    return run
