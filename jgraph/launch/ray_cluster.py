"""A cluster whose servers are actors of Ray, for those who have Ray running already."""

import atexit
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from jgraph.client.cluster import Cluster, open_cluster
from jgraph.clock import Clock, SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.transport_choice import TransportChoice, as_tls, check_transport
from jgraph.errors import TaskMissingError
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.device import TaskName
from jgraph.launch.local.processes import START_S, check_counts, tasks_of
from jgraph.launch.local.restarts import check_restarts
from jgraph.launch.ray_actors import RayActors
from jgraph.launch.ray_task import RayOrder
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import file_stem
from jgraph.rpc.security.token import NAME, Token


@final
class RayCluster(Cluster):
    """A cluster whose servers are actors of Ray, on whatever nodes Ray has.

    Uses the Ray that is connected to; where none is, calls ``ray.init()``, which
    connects to the one that ``RAY_ADDRESS`` names or starts one here. Nodes need jgraph
    and the JAX of this process. All connections have certificates of this cluster. The
    actors end with ``close()``, at the end of a ``with`` block, and with this process.

    Needs ``pip install 'jgraph[ray]'``.

    Args:
      ps: how many parameter servers.
      workers: how many workers.
      evaluators: 1: a task that evaluates while the workers train on.
      jobs: further jobs, ``{"name": count}``.
      resources: what a task of a job asks of Ray, ``{"worker": {"CPU": 4, "GPU": 1}}``;
        one CPU if it is not named.
      spread: over as many nodes as there are, or close together.
      restarts: how often Ray makes an actor that died again, in all; at its old
        address, and without what it held. See ``Trainer.fit(checkpoint=…)`` for what a
        run does then. An actor whose node is lost is not made again elsewhere.
      timeout_s: how long to wait for the resources, and until all tasks serve.
      env: environment variables for the actors.
      allow_sources: see ``Server``.
      transport: see ``LocalCluster``.

    Raises:
      ConfigError: Ray is not installed, or no task.
      StartError: Ray has not what the tasks ask for, or one could not start.
      TaskMissingError: a task did not answer in time.

    Example:
      >>> with RayCluster(ps=1, workers=2) as cluster:  # doctest: +SKIP
      ...     trainer = jg.Trainer(model, loss, tx, cluster=cluster)
    """

    @short_traceback
    def __init__(
        self,
        ps: int = 2,
        workers: int = 2,
        *,
        evaluators: int = 0,
        jobs: Mapping[str, int] | None = None,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        spread: bool = True,
        restarts: int = 2,
        timeout_s: float = START_S,
        env: Mapping[str, str] | None = None,
        allow_sources: Sequence[str] = (),
        transport: TransportChoice = "auto",
        clock: Clock | None = None,
    ) -> None:
        check_transport(transport)
        counts = {"ps": ps, "worker": workers, **(jobs or {})}
        if evaluators:
            counts["evaluator"] = evaluators
        check_counts(counts)
        check_restarts(restarts)
        tasks = tasks_of(counts)
        clock = clock or SystemClock()
        deadline = clock.now() + timeout_s
        self._actors = RayActors(tasks, resources or {}, spread=spread)
        self._secrets = tempfile.TemporaryDirectory(prefix="jgraph-secrets-")
        directory = Path(self._secrets.name)
        try:
            make_certificates(directory, tasks)
            spec = self._actors.reserve(timeout_s)
            orders = [
                RayOrder(
                    task,
                    spec.to_json(),
                    _files(directory, task),
                    self._actors.log_of(task),
                    task.startswith(("/job:ps/", "/job:evaluator/")),
                    transport,
                    tuple(allow_sources),
                )
                for task in tasks
            ]
            left = max(1.0, deadline - clock.now())
            self._actors.start(orders, restarts, dict(env or {}), left)
            chief = TaskName("/job:worker/task:0")
            address = spec.address(chief if workers else tasks[0])
            left = max(1.0, deadline - clock.now())
            files = as_tls(directory, None)
            token = Token.read(directory / NAME)
            client, reply = event_loop.run(open_cluster(address, left, token, files))
        except BaseException:
            self._end()
            raise
        atexit.register(self._end)  # before Ray's own end, which leaves the logs
        super().__init__(address, client, reply, files, token.path)

    def logs(self, task: str, tail: int = 20) -> str:
        """Returns the last lines of a task's log."""
        return self._actors.tail(self._known(task), tail)

    def pid(self, task: str) -> int:
        """Returns the process id of a task, on its host."""
        return self._actors.pid(self._known(task))

    def kill(self, task: str) -> None:
        """Kills a task's process, as a crash would; Ray makes it again."""
        self._actors.kill(self._known(task))

    @property
    def tls_directory(self) -> str:
        """Where the certificates are, for other clients of this host."""
        return self._secrets.name

    def gone(self) -> Mapping[TaskName, str]:
        """See ``Cluster.gone``."""
        return self._actors.gone()

    def check_startable(self) -> None:
        """See ``Cluster.check_startable``."""
        if gone := self.gone():
            raise TaskMissingError(
                f"{'; '.join(gone.values())}\nRay does not make it again; make a new "
                "jg.RayCluster, with more restarts, and resume there with "
                "trainer.restore(…)",
                missing=list(gone),
            )

    def close(self) -> None:
        """Ends all actors, and gives back what they had of Ray."""
        if not self._closed:
            try:
                super().close()
            finally:
                self._end()

    def _known(self, task: str) -> TaskName:
        self.spec.address(task)  # refuses a task that the cluster lacks
        return TaskName(task)

    def _end(self) -> None:
        atexit.unregister(self._end)
        self._actors.end()
        self._secrets.cleanup()


def _files(directory: Path, task: TaskName) -> dict[str, bytes]:
    names = ("ca.crt", NAME, f"{file_stem(task)}.crt", f"{file_stem(task)}.key")
    return {name: (directory / name).read_bytes() for name in names}
