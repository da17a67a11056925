"""A cluster whose servers are processes of Spark tasks, on any executors."""

import atexit
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from jgraph.client.cluster import Cluster, open_cluster
from jgraph.clock import Clock, SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.events import Event
from jgraph.cluster.options import check_seconds, check_sources
from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import TransportChoice, as_tls, check_transport
from jgraph.coordination.liveness.freezes import FROZEN_S
from jgraph.errors import (
    ClusterUnreachableError,
    TaskLostError,
    hints,
)
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.device import TaskName
from jgraph.launch.local.processes import check_environment, counts_of, tasks_of
from jgraph.launch.local.restarts import check_none_gone, check_restarts
from jgraph.launch.spark.application import Application, check_python
from jgraph.launch.spark.processes import SparkProcesses
from jgraph.launch.spark.task_process import SparkOrder
from jgraph.rpc.security.certificates import Authority, write_certificates
from jgraph.rpc.security.token import NAME, Token

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START_S: Final = 120.0


@final
class SparkCluster(Cluster):
    """A cluster whose servers are processes of Spark tasks, one slot each.

    Executors need jgraph and the JAX of this process in one of their Pythons. All
    connections have certificates of this cluster, whose keys never leave the host that
    they are of. The servers end with ``close()``, at the end of a ``with`` block, with
    the Spark application, and with this process, however they end.

    Needs ``pip install 'jgraph[spark]'`` and Java.

    Args:
      spark: a SparkSession of any master; not one of Spark Connect.
      ps: how many parameter servers.
      workers: how many workers.
      evaluators: 1: a task that evaluates while the workers train on.
      jobs: further jobs, ``{"name": count}``.
      resources: what a task of a job asks of Spark, ``{"worker": {"cpus": 4, "gpu":
        1}}``, on executors that have it; one slot if it is not named. A task that has
        GPUs sees those alone.
      restarts: how often a task that died, or whose executor did, is started again
        within a minute, without what it held, on any executor with a slot. See
        ``Trainer.fit(checkpoint=…)`` for what a run does then.
      timeout_s: how long to wait until Spark has started all tasks, and all serve.
      python: the Python of the servers on executors; the path of this process's where
        that is there, or else Spark's (``PYSPARK_PYTHON``).
      env: environment variables for the servers; a ps and an evaluator get
        ``JAX_PLATFORMS=cpu`` unless told otherwise.
      allow_sources: see ``Server``.
      transport: see ``LocalCluster``.

    Raises:
      ConfigError: PySpark is not installed, that is no session that will do, no task,
        or more tasks than Spark can ever run at once.
      StartError: Spark did not start all tasks in time, or one could not serve.
      TaskMissingError: a task did not answer in time.
      VersionError: an executor has no jgraph or JAX, or another one.

    Example:
      >>> spark = SparkSession.builder.getOrCreate()  # doctest: +SKIP
      >>> with SparkCluster(spark, ps=2, workers=4) as cluster:  # doctest: +SKIP
      ...     trainer = jg.Trainer(model, loss, tx, cluster=cluster)
    """

    ends_with_client = True

    @short_traceback
    @hints.naming_arguments(hints.CLUSTER_ARGUMENTS)
    def __init__(
        self,
        spark: "SparkSession",
        ps: int = 2,
        workers: int = 2,
        *,
        evaluators: int = 0,
        jobs: Mapping[str, int] | None = None,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        restarts: int = 2,
        timeout_s: float = START_S,
        python: str = "",
        env: Mapping[str, str] | None = None,
        allow_sources: Sequence[str] = (),
        transport: TransportChoice = "auto",
        clock: Clock | None = None,
    ) -> None:
        application = Application(spark)
        check_transport(transport)
        counts = counts_of(ps, workers, evaluators, jobs)
        environment = check_environment(env)
        sources = check_sources(allow_sources)
        check_python(python)
        check_restarts(restarts)
        check_seconds("timeout_s", timeout_s)
        tasks = tasks_of(counts)
        clock = clock or SystemClock()
        deadline = clock.now() + timeout_s
        self._processes: SparkProcesses | None = None
        self._secrets = tempfile.TemporaryDirectory(prefix="jgraph-secrets-")
        directory = Path(self._secrets.name)
        try:
            authority = Authority()
            files = {
                "ca.crt": authority.certificate,
                **authority.files_of(None),
                **authority.files_of_launcher(),
            }
            write_certificates(directory, files)
            token = Token.read(directory / NAME)
            order = SparkOrder(authority, token.value, transport, sources, FROZEN_S)
            self._processes = SparkProcesses(
                *(application, tasks, directory, order, environment),
                python=python,
                resources=resources or {},
                restarts=restarts,
                timeout_s=timeout_s,
                on_move=self._move,
                clock=clock,
            )
            chief = TaskName("/job:worker/task:0")
            master = chief if workers else tasks[0]
            address = self._processes.spec.address(master)
            remaining_s = max(1.0, deadline - clock.now())
            tls = as_tls(directory, None)
            client, reply = event_loop.run(
                open_cluster(address, remaining_s, token, tls)
            )
        except BaseException:
            self._end()
            raise
        atexit.register(self._end)
        super().__init__(address, client, reply, tls, token.path)

    def logs(self, task: str, tail: int = 20) -> str:
        """Returns the last lines of a task's log; of one that is dead, of its last."""
        process = self._all[task]
        try:
            return super().logs(task, tail)
        except (ClusterUnreachableError, TaskLostError):
            return process.tail(tail)

    def pid(self, task: str) -> int:
        """Returns the process id of a task, on its host."""
        return self._all[task].pid

    def kill(self, task: str) -> None:
        """Kills a task's process, as a crash would; it is started again."""
        self._all[task].kill()

    @property
    def tls_directory(self) -> str:
        """Where the certificates are, for other clients of this host."""
        return self._secrets.name

    def gone(self) -> Mapping[TaskName, str]:
        """See ``Cluster.gone``."""
        return self._all.gone()

    @property
    def starts_again(self) -> bool:
        """See ``Cluster.starts_again``."""
        return True

    def check_startable(self) -> None:
        """See ``Cluster.check_startable``."""
        remedy = "make a new jg.SparkCluster, with more restarts, and resume there "
        check_none_gone(self.gone(), f"{remedy}with trainer.restore(…)")

    def close(self) -> None:
        """Ends all servers, and gives their slots back to Spark."""
        if not self._closed:
            try:
                super().close()
            finally:
                self._end()

    def drop_held(self) -> None:
        """Drops nothing: all of it goes with the processes."""

    @property
    def _all(self) -> SparkProcesses:
        assert self._processes is not None  # all of them have started
        return self._processes

    def _launcher_events(self) -> list[Event]:
        return self._all.events()

    def _move(self, spec: ClusterSpec) -> None:
        """Takes note of a task that was started again at another address."""
        self.spec = spec
        self.address = spec.address(self.master)

    def _end(self) -> None:
        atexit.unregister(self._end)
        if self._processes is not None:
            self._processes.end()
        self._secrets.cleanup()
