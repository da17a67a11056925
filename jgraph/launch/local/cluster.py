"""A cluster of separate processes on this machine."""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, final

from jgraph.client.cluster import Cluster, open_cluster
from jgraph.clock import Clock, SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import DRAIN_S
from jgraph.cluster.events import Event
from jgraph.cluster.options import check_seconds, check_sources
from jgraph.cluster.transport_choice import TransportChoice, as_tls, check_transport
from jgraph.cluster.wait_message import show_wait
from jgraph.coordination.liveness.freezes import FROZEN_S
from jgraph.counts import check_flags
from jgraph.errors import ConfigError, JGError, RescaleError, UnknownDeviceError, hints
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.ir import TaskName
from jgraph.launch.local.freezes import check_frozen_s
from jgraph.launch.local.processes import (
    START_S,
    TaskProcesses,
    check_environment,
    counts_of,
    tasks_of,
)
from jgraph.launch.local.restarts import check_none_gone, check_restarts
from jgraph.rpc.security.token import NAME, TOKEN_FILE, Token

if TYPE_CHECKING:
    from jgraph.client.dashboard_process import Dashboard

_SPARES = 64
"""Certificates for workers that may join."""
_END_S = 10.0
"""After the grace; a process has to end, too."""


@final
class LocalCluster(Cluster):
    """A cluster of separate processes on this machine, on loopback.

    The processes end with ``close()``, at the end of a ``with`` block, and whenever
    this process ends, however it ends.

    Args:
      ps: how many parameter servers.
      workers: how many workers.
      evaluators: 1: a task that evaluates while the workers train on.
      allow_sources: see ``Server``.
      jobs: further jobs, ``{"name": count}``.
      timeout_s: how long to wait until all tasks serve.
      env: environment variables for the processes, for example
        ``{"JAX_PLATFORMS": "cpu"}``; a ps and an evaluator get that one by default,
        since they must not take an accelerator from a worker.
      log_dir: directory for the tasks' logs, made if it is not there; a temporary one
        if unset, which goes with the cluster.
      transport: ``"auto"`` uses shared memory and Unix sockets; ``"network"`` as
        between machines; ``"stream"`` as where one port of each alone is in reach.
      tls: whether all connections are encrypted, with certificates made for this
        cluster alone.
      restarts: how often a task that died is started again within a minute, at its
        old address and without what it held; the next death is the last, and is an
        error in the log. See ``Trainer.fit(checkpoint=…)`` for what a run does then.
      frozen_s: with ``restarts``, a task whose process is stopped (SIGSTOP, not a
        debugger) for so many seconds is killed and started again. One that is slow is
        not, and one that goes on before that is waited for.
      elastic: whether ``scale`` may start more workers and ps, and let some leave.
      dashboard: whether to start one; its address is logged, and in
        ``repr(cluster.board)``. See ``Cluster.dashboard``.

    Raises:
      ConfigError: no task, no such transport, number or time, or no directory for
        logs can be made there.
      StartError: a task's process ended while starting; shows the end of its log.
      TaskMissingError: a task did not answer in time.

    Example:
      >>> cluster = LocalCluster(ps=1, workers=1)
      >>> cluster.tasks()
      ['/job:ps/task:0', '/job:worker/task:0']
      >>> cluster.close()
    """

    ends_with_client = True

    @short_traceback
    @hints.naming_arguments(hints.CLUSTER_ARGUMENTS)
    def __init__(
        self,
        ps: int = 2,
        workers: int = 2,
        *,
        evaluators: int = 0,
        allow_sources: Sequence[str] = (),
        jobs: Mapping[str, int] | None = None,
        timeout_s: float = START_S,
        env: Mapping[str, str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        transport: TransportChoice = "auto",
        tls: bool = False,
        restarts: int = 0,
        frozen_s: float = FROZEN_S,
        elastic: bool = False,
        dashboard: bool = False,
        clock: Clock | None = None,
    ) -> None:
        check_flags(tls=tls, elastic=elastic, dashboard=dashboard)
        check_transport(transport)
        counts = counts_of(ps, workers, evaluators, jobs)
        variables = check_environment(env)
        sources = check_sources(allow_sources)
        check_restarts(restarts)
        check_frozen_s(frozen_s)
        check_seconds("timeout_s", timeout_s)
        clock = clock or SystemClock()
        deadline = clock.now() + timeout_s
        self._is_elastic = elastic
        self._process = os.getpid()
        self._temporary = log_dir is None
        self._directory = _log_directory(log_dir)
        self._log_lock: int | None = None
        # Of this cluster alone; only the name of the directory leaves this process.
        self._secrets = tempfile.mkdtemp(prefix="jgraph-secrets-")
        self._certificates = self._secrets if tls else ""
        try:
            self._log_lock = _lock_logs(self._directory)
            if tls:
                from jgraph.rpc.security.certificates import make_certificates

                spares = _SPARES if elastic else 0
                jobs_with_spares = ("worker", "ps")
                with_spares = {
                    job: count + (spares if job in jobs_with_spares else 0)
                    for job, count in counts.items()
                }
                make_certificates(self._certificates, tasks_of(with_spares))
            token = Token.make(Path(self._secrets) / NAME)
            environment = {**variables, TOKEN_FILE: str(token.path)}
            with show_wait(f"starting {sum(counts.values())} tasks"):
                self._processes = TaskProcesses(
                    *(counts, self._directory, environment, transport, timeout_s),
                    tls_directory=self._certificates,
                    allow_sources=sources,
                    restarts=restarts,
                    frozen_s=frozen_s,
                    clock=clock,
                )
        except BaseException:
            self._forget_files()
            raise
        atexit.register(self._end_processes)
        try:
            address = self._processes.spec.address(self._processes.master)
            remaining_s = max(1.0, deadline - clock.now())
            files = as_tls(self._certificates or None, None)
            client, reply = event_loop.run(
                open_cluster(address, remaining_s, token, files)
            )
        except BaseException:
            self._end_processes()
            raise
        super().__init__(address, client, reply, files, token.path)
        self.board: Dashboard | None = None
        if dashboard:
            try:
                self.board = self.dashboard()
            except BaseException:
                self.close()
                raise

    def logs(self, task: str, tail: int = 20) -> str:
        """Returns the last lines of a task's log."""
        return self._processes[task].tail(tail)

    def pid(self, task: str) -> int:
        """Returns the process id of a task."""
        return self._processes[task].process.pid

    def kill(self, task: str) -> None:
        """Kills a task's process, as a crash of its host would."""
        self._processes[task].kill()

    def restart(self, task: str) -> int:
        """Ends a task by SIGTERM, starts it again where it was, and waits for that.

        A run that goes on notices a pause at most: a worker hands over what it has and
        takes part again, another server becomes the master, and for a ps the run is
        saved, or has a copy of it (``fit(checkpoint=…)``, ``durability=``), waits, and
        goes on from the same step.

        Returns:
          The exit code of its process: 0 unless it was killed, 40 s later.

        Raises:
          StartError: it ended while starting.
          UnknownDeviceError: the cluster has no such task.

        Example:
          ``for task in cluster.tasks(): cluster.restart(task)`` restarts all, one after
          the other.
        """
        return self._processes.restart(task, DRAIN_S + _END_S)

    @property
    def starts_workers(self) -> bool:
        """See ``Cluster.starts_workers``."""
        return self._is_elastic

    def _start_tasks(self, job: str, count: int) -> None:
        self._check_elastic()
        self._processes.start_joiners(count, job)

    def leave(self, task: TaskName) -> None:
        """See ``Cluster.leave``."""
        self._check_elastic()
        super().leave(task)

    def announce(self, task: TaskName) -> None:
        """See ``Cluster.announce``."""
        self._check_elastic()
        super().announce(task)

    def _forget_tasks(self, tasks: Sequence[TaskName]) -> None:
        for task in tasks:
            with suppress(UnknownDeviceError):  # started elsewhere, or forgotten before
                self._processes.forget(task)

    def _check_elastic(self) -> None:
        if not self._is_elastic:
            raise RescaleError(
                "this cluster keeps the tasks that it began with; make one whose tasks "
                "may join and leave: jg.LocalCluster(elastic=True)"
            )

    def _launcher_events(self) -> list[Event]:
        return self._processes.events()

    def gone(self) -> Mapping[TaskName, str]:
        """See ``Cluster.gone``."""
        ends = self._gone()
        if self.starts_again:  # it died too often, and does again
            return ends
        return {
            task: f"{why}; start it again: cluster.restart('{task}')"
            for task, why in ends.items()
        }

    @property
    def starts_again(self) -> bool:
        """See ``Cluster.starts_again``."""
        return self._processes.starts_again

    def check_startable(self) -> None:
        """See ``Cluster.check_startable``."""
        remedy = "give jg.LocalCluster more restarts, for example restarts=5"
        check_none_gone(self._gone(), remedy)

    def _gone(self) -> dict[TaskName, str]:
        if self._is_elastic and self._processes.gone(self.tasks()):
            with suppress(JGError):  # its master may be one of them
                self.refresh()
        return self._processes.gone(self.tasks())

    def close(self) -> None:
        """Ends all processes and frees their ports."""
        if not self._closed:
            try:
                super().close()
            finally:
                self._end_processes()

    def drop_held(self) -> None:
        """Drops nothing: all of it goes with the processes."""

    def _end_processes(self) -> None:
        atexit.unregister(self._end_processes)
        if os.getpid() != self._process:
            return  # this one was forked: its end is not that of the cluster
        self._processes.end()
        self._forget_files()

    @property
    def tls_directory(self) -> str:
        """Where the certificates are, for other clients; empty without TLS."""
        return self._certificates

    def _forget_files(self) -> None:
        if self._log_lock is not None:
            # Also where a process that was forked has it as well.
            fcntl.flock(self._log_lock, fcntl.LOCK_UN)
            os.close(self._log_lock)
            self._log_lock = None
        shutil.rmtree(self._secrets, ignore_errors=True)
        if self._temporary:
            shutil.rmtree(self._directory, ignore_errors=True)


def _log_directory(path: str | os.PathLike[str] | None) -> Path:
    """Returns where tasks write their logs; makes it."""
    if path is None:
        return Path(tempfile.mkdtemp(prefix="jgraph-"))
    try:
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()  # it may be written to
    except (OSError, TypeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"log_dir={str(path)!r} cannot be a directory for logs: {why}; "
            "give another one, or none for a temporary one"
        ) from error
    return directory


def _lock_logs(directory: Path) -> int | None:
    """Takes a directory for the logs of one cluster; returns what gives it back.

    Raises:
      ConfigError: another cluster, which is up, has its logs there.
    """
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError(
            f"log_dir={str(directory)!r} has the logs of another local cluster, which "
            "is up: its tasks have the same names; give another one, or close that "
            "cluster first"
        ) from error
    except OSError:  # this file system locks no directories
        os.close(lock)
        return None
    return lock
