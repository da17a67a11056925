"""Cluster: a client's connection to a running cluster."""

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from jgraph.client.connection import Connection
from jgraph.client.logs import EventTail
from jgraph.client.no_handler import NoHandler
from jgraph.client.runs.scaling import SCALE_S, Scaler
from jgraph.client.wait_for_tasks import (
    ASK_AGAIN_S,
    connect_request,
    wait_for_tasks,
)
from jgraph.clock import SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import CONTROL_S, DRAIN_S
from jgraph.cluster.events import CLIENT, Event, EventLog, in_order
from jgraph.cluster.options import shutdown_order
from jgraph.cluster.polling import Polling
from jgraph.cluster.transport_choice import (
    TLSFiles,
    address_of,
    as_tls,
    certificates_of,
    target_of,
    token_file_in,
)
from jgraph.cluster.wait_message import show_wait
from jgraph.counts import check_flags
from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    RescaleError,
    TaskLostError,
    UnknownDeviceError,
    hints,
)
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.security.token import Token, find_token
from jgraph.rpc.transport import Address

if TYPE_CHECKING:
    from jgraph.client.dashboard_process import Dashboard
    from jgraph.client.placement.auto import AutoPlacement
    from jgraph.client.runs.runs import RunInfo
    from jgraph.client.session import Session
    from jgraph.coordination.timeline.cluster_trace import ClusterTrace
    from jgraph.coordination.watch.alarms import Alarm

CONNECT_S = 60.0
MOST_S = 600.0


class Cluster(Connection):
    """A running cluster, seen by a client.

    Made by ``jg.connect`` and ``jg.LocalCluster``.

    Attributes:
      spec: which tasks there are and where.
      master: the task whose server this client talks to.
      notes: what this client notes of it.
    """

    def __init__(
        self,
        address: Address,
        transport: GrpcTransport,
        reply: Any,
        tls: TLS | None = None,
        token_file: Path | None = None,
    ) -> None:
        super().__init__(address, transport, reply, tls, token_file)
        self._dashboards: list[Dashboard] = []
        self._scaling = threading.Lock()
        self._beginnings: list[tuple[threading.Event, threading.Thread]] = []
        self.notes = EventLog(CLIENT)

    @property
    def starts_workers(self) -> bool:
        """Whether ``scale`` can start workers from here."""
        return False

    def session(
        self,
        *,
        container: str = "",
        soft_placement: bool = False,
        platforms: Sequence[str] = (),
        placement: "AutoPlacement | None" = None,
    ) -> "Session":
        """Opens a session: runs functions on this cluster.

        Args:
          container: see ``Session``.
          soft_placement: see ``Session``.
          platforms: see ``Session``.
          placement: see ``Session``.
        """
        from jgraph.client.session import Session

        check_flags(soft_placement=soft_placement)
        self.check_open()
        return Session(
            self,
            container=container,
            soft_placement=soft_placement,
            platforms=platforms,
            placement=placement,
        )

    @short_traceback
    def logs(self, task: str, tail: int = 20) -> str:
        """Returns the last lines of a task's log; the task tells them.

        Raises:
          UnknownDeviceError: the cluster has no such task.
          TaskLostError, ClusterUnreachableError: it does not answer.
        """
        address = self.find(TaskName(task))
        query = frame(log_query=pb.LogQuery(limit=tail))
        reply = self.call("TaskLog", query, to=address)
        return "\n".join(body_of(reply).lines)

    @short_traceback
    def events(self) -> list[Event]:
        """Returns what became of the cluster: who joined, was lost, what ran, in order.

        Its tasks tell what they saw since they started, at most 1,000 events each, and
        a ``jg.LocalCluster`` whose processes it started again, and a policy of a run
        of this client what it did.
        """
        self.refresh()
        task_events = EventTail(self.transport, self.spec).new()
        return in_order([*task_events, *self._launcher_events(), *self.notes.newest()])

    @short_traceback
    def drain(self, task: str, grace_s: float = DRAIN_S) -> None:
        """Tells a task to end as SIGTERM does, and returns once it was told.

        It takes no new work and hands over what it has: a worker's steps in flight end
        and are told of, and its batches go to the others. Of a ps the run that uses it
        is saved first, or has a copy (``fit(checkpoint=…)``, ``durability=``), and goes
        on when the task is started again; else it ends with that ps.

        A worker that joined the cluster leaves it by that.

        Args:
          task: its name.
          grace_s: what runs has so long.

        Raises:
          UnknownDeviceError: the cluster has no such task.
          TaskLostError, ClusterUnreachableError: it does not answer.
        """
        address = self.find(TaskName(task))
        self.call("Shutdown", shutdown_order(grace_s), to=address)

    @short_traceback
    def scale(
        self,
        *,
        workers: int | str | None = None,
        ps: int | str | None = None,
        timeout_s: float = SCALE_S,
        wait: bool = True,
    ) -> list[TaskName]:
        """Makes the cluster have more workers and ps, or fewer, while runs go on.

        Those that join take part in runs with ``jg.Elastic``. Of workers those leave
        that are lost, then those that leave already, then the ones with the highest
        indices; of ps the last ones. They hand over as by ``drain``. Variables of runs
        with ``jg.Elastic(ps=…)`` move to ps that join, and from those that leave, while
        loops pause. Only who starts a cluster's processes can start more:
        ``jg.LocalCluster(elastic=True)``, ``jgraph up``, Ray; anywhere else start them
        with ``jgraph server --join``.

        Args:
          workers: how many there are to be, or a change: ``"+1"``, ``"-2"``.
          ps: how many parameter servers there are to be, or a change.
          timeout_s: how long to wait.
          wait: until those that joined take part in the runs that take them, and the
            others have left. False returns when they were told to.

        Returns:
          The workers there are then, or the ps if their number was asked for alone.

        Raises:
          ConfigError: no such number.
          DeadlineError: it takes longer; what was begun goes on.
          RescaleError: a run may not have so many, or nobody here can start them.
        """
        check_flags(wait=wait)
        scaler = Scaler(
            self, self._start_tasks, self.leave, self.announce, self._forget_tasks
        )
        own = threading.current_thread()  # of a callback: its run waits for it
        scaler = replace(
            scaler,
            turn=self._scaling,
            timeout_s=timeout_s,
            wait=wait,
            beginnings=[b for b, by in self._beginnings if by is not own],
        )
        there = scaler.scale(workers, ps)
        return there["ps" if workers is None else "worker"]

    def begins(self, at_master: threading.Event, thread: threading.Thread) -> None:
        """Takes note of a run of this client that begins.

        Args:
          at_master: set once a master has the run, or it is over.
          thread: that begins it.
        """
        others = [(b, by) for b, by in self._beginnings if not b.is_set()]
        self._beginnings = [*others, (at_master, thread)]

    def _start_tasks(self, job: str, count: int) -> None:
        raise RescaleError(
            f"{self!r} was started elsewhere, and {count} more {job}"
            f"{'s' if count > 1 and job != 'ps' else ''} cannot be started from here; "
            f"start each on its host: jgraph server --job {job} --join {self.target}"
        )

    def leave(self, task: TaskName) -> None:
        """Tells a task to end, and to be no task of the cluster any more.

        One that is lost has ended, and is none once its cluster has seen that; so has
        one that somebody else told, too.
        """
        self.announce(task)
        with suppress(ClusterUnreachableError, TaskLostError, UnknownDeviceError):
            self.drain(task)

    def announce(self, task: TaskName) -> None:
        """Says that a task will leave the cluster: what it holds moves to others."""
        request = frame(leave_request=pb.LeaveRequest(task=task))
        self.call("Master.Leave", request)

    def _forget_tasks(self, tasks: Sequence[TaskName]) -> None:
        """These have left the cluster."""

    @short_traceback
    def runs(self) -> "list[RunInfo]":
        """Returns the runs that go on without their clients; ``fit(detached=True)``."""
        from jgraph.client.runs.runs import runs_of

        return runs_of(self)

    def explain(self) -> str:
        """Says which steps are under way, since when, and who waits for whom."""
        return self.status().explain()

    @short_traceback
    def alarms(self, seconds: float = 1.0) -> "list[Alarm]":
        """Looks at the cluster twice and returns what is wrong, the worst first.

        What shows only over a longer time (a run that has become slower, a worker that
        is slower than others) is seen by ``jgraph top`` and the dashboard.

        Args:
          seconds: between the two looks.

        Raises:
          ConfigError: that is no such time.
          ClusterUnreachableError: the master does not answer.
        """
        from jgraph.client.watching import alarms_of

        if not 0 < seconds <= MOST_S:
            raise ConfigError(
                f"alarms(seconds={seconds!r}) looks twice, so long apart; write a "
                f"number above 0, and {MOST_S:g} at most"
            )
        return alarms_of(self, seconds)

    @short_traceback
    def trace(
        self, *, seconds: float | None = None, last: float | None = None
    ) -> "ClusterTrace":
        """Returns when all tasks did what, on one clock.

        Every task keeps when the nodes of its last steps ran (some 65,000 of them), so
        that what came before something went wrong can be looked at afterwards.

        Args:
          seconds: of what happens from now on; 60 at most.
          last: seconds of what happened before now, as far as the tasks keep it.

        Raises:
          ConfigError: not one of the two, or no such time.
          TaskLostError, ClusterUnreachableError: no task answers.

        Example:
          >>> from jgraph.server.server import Server
          >>> server = Server({"worker": ["localhost:0"]})
          >>> with connect(server.target) as cluster:
          ...     cluster.trace(last=30)
          <trace of 1 tasks: 0 steps in 0.0 s; save('cluster.pftrace'), or show() it>
          >>> server.stop()
        """
        from jgraph.client.timeline.collecting import FlightCollector, check_seconds

        check_seconds(seconds, last)
        self.refresh()
        tasks = {task: self.spec.address(task) for task in self.tasks()}
        collector = FlightCollector(self.transport, tasks)
        if last is not None:
            return event_loop.run(collector.last(last))
        return event_loop.run(collector.next(seconds or 0.0))

    @short_traceback
    def dashboard(
        self,
        *,
        port: int = 0,
        journal: str | os.PathLike[str] | None = None,
        embed_origins: Sequence[str] = (),
    ) -> "Dashboard":
        """Starts a process that serves a page with all that happens in the cluster.

        It ends with this client. Needs ``pip install 'jgraph[dashboard]'``.

        Args:
          port: of 127.0.0.1; 0 takes any free one.
          journal: file to which all that is seen is written; ``jgraph dashboard
            --replay FILE`` shows it again when the cluster is gone.
          embed_origins: of notebooks that may show it in a frame:
            ``["http://localhost:8888"]``.

        Raises:
          ConfigError: the journal cannot be written, or a package is missing.
          JournalError: its name is that of another file.
          PortInUseError: something listens at the port.
          StartError: it could not be started; shows why.
        """
        from jgraph.client.dashboard_process import Dashboard

        self.check_open()
        options = [self.target, "--port", str(port)]
        if self._tls is not None:
            options += ["--tls-dir", str(self._tls.ca.parent)]
        if journal is not None:
            options += ["--journal", os.fspath(journal)]
        for origin in embed_origins:
            options += ["--embed-origin", origin]
        dashboard = Dashboard(options)
        self._dashboards.append(dashboard)
        return dashboard

    @short_traceback
    def wait_for_tasks(
        self, timeout_s: float = CONNECT_S, *, stop: threading.Event | None = None
    ) -> bool:
        """Waits until every task answers, after some were lost and started again.

        Args:
          timeout_s: how long to wait.
          stop: set from another thread: waits no longer.

        Returns:
          Whether all answer; False if it was stopped.

        Raises:
          TaskMissingError: a task did not answer in time, or nobody starts it again.
        """
        return wait_for_tasks(self, timeout_s, stop or threading.Event())

    def _launcher_events(self) -> list[Event]:
        return []

    @short_traceback
    def shutdown(self, grace_s: float = 5.0) -> None:
        """Asks every task's server to end; steps in flight get ``grace_s``."""
        tasks = [t for t in self.tasks() if t != self.master] + [self.master]
        for task in tasks:
            self.call("Shutdown", shutdown_order(grace_s), to=self.spec.address(task))

    def close(self) -> None:
        """Closes the connection; the servers go on, without the sessions' programs."""
        if not self._closed:
            for dashboard in self._dashboards:
                dashboard.close()
        super().close()

    if not TYPE_CHECKING:
        __getattr__ = hints.hinting(hints.CLUSTER)

    def __dir__(self) -> list[str]:
        inner = {
            *(
                "at_close",
                "call",
                "check_open",
                "check_startable",
                "drop_held",
                "find",
                "gone",
            ),
            *("begins", "leave", "move_to", "platforms", "take_members"),
            *("transport",),
            *("refresh", "renewed_tasks", "starts_again", "status_now"),
        }
        return [name for name in super().__dir__() if name not in inner]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"<{type(self).__name__} closed>"
        jobs = ", ".join(f"{self.spec.num_tasks(j)} {j}" for j in self.spec.jobs)
        where = target_of(self.address, self._tls)
        return f"<{type(self).__name__} {where}: {jobs}>"

    def __str__(self) -> str:
        return repr(self) if self._closed else str(self.status())

    def _repr_html_(self) -> str:
        return repr(self) if self._closed else self.status()._repr_html_()


@final
class ConnectedCluster(Cluster):
    """A cluster whose servers were started elsewhere; closing leaves them running."""

    def _again(self) -> str:
        return f"connect again with jg.connect('{self.target}')"


@short_traceback
def connect(
    target: str,
    *,
    timeout_s: float = CONNECT_S,
    tls: TLSFiles | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> Cluster:
    """Connects to a cluster through any of its servers.

    Waits until the server at this address and every listed task answer.

    Args:
      target: ``"jgraph://host:port"`` (or ``"host:port"``) of one of its servers;
        ``"jgraphs://host:port"`` of one with TLS.
      timeout_s: how long to wait for all of them.
      tls: the directory with ``client.crt``, ``client.key`` and ``ca.crt`` that
        ``jgraph certs`` wrote, or these files as a ``TLS``.
      token_file: the token of the cluster; if unset, that of ``?token_file=`` in
        ``target``, of the environment variable ``JGRAPH_TOKEN_FILE``, beside the
        certificates, or the user's own in ``~/.jgraph``.

    Raises:
      CertificateError, PlainTextError, RoleError: the two sides do not trust each
        other, or only one of them speaks TLS.
      TokenError: the cluster has another token, or the file cannot be read.
      ConfigError: ``target`` is no text, or does not go with ``tls``.
      ClusterUnreachableError: nothing of ours listens there in time, or something
        that is certainly not ours does.
      TaskMissingError: a listed task did not answer in time; it is named.
      VersionError: a task runs versions that this client cannot talk to.

    Example:
      >>> from jgraph.server.server import Server
      >>> server = Server({"worker": ["localhost:0"]})
      >>> cluster = connect(server.target)
      >>> cluster.tasks("worker")
      ['/job:worker/task:0']
      >>> cluster.close()
      >>> server.stop()
    """
    if not isinstance(target, str):
        raise ConfigError(
            f"connect takes the address of a server, not {target!r:.60}; write for "
            "example jg.connect('jgraph://localhost:8470')"
        )
    return _connected(target, timeout_s, tls, token_file, waits=True)


def connect_as_is(
    target: str,
    *,
    timeout_s: float = CONNECT_S,
    tls: TLSFiles | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> Cluster:
    """Connects as ``connect`` does, and does not wait for tasks that are lost."""
    return _connected(target, timeout_s, tls, token_file, waits=False)


def _connected(
    target: str,
    timeout_s: float,
    tls: TLSFiles | None,
    token_file: str | os.PathLike[str] | None,
    *,
    waits: bool,
) -> Cluster:
    files = as_tls(tls, None)
    address = address_of(target, files)
    path = token_file or token_file_in(target)
    token = find_token(path, certificates_of(files))
    refusals: list[str] = []

    def waited_for() -> str:
        if refusals:
            return f"{refusals[0]}; waiting up to {timeout_s:g} s"
        return f"connecting to {address} and all its tasks"

    opening = _open_in_time(address, timeout_s, token, files, refusals, waits=waits)
    with show_wait(waited_for):
        transport, reply = event_loop.run(opening)
    token_path = token.path if path else None
    return ConnectedCluster(address, transport, reply, files, token_path)


async def open_cluster(
    address: Address,
    timeout_s: float,
    token: Token,
    tls: TLS | None = None,
    *,
    waits: bool = True,
) -> tuple[GrpcTransport, pb.ClusterStatus]:
    """Calls the roll at a master; returns the transport and who answered.

    Args:
      address: of the master.
      timeout_s: limit.
      token: of the cluster.
      tls: certificates; None: plain text.
      waits: for every task; False: only the master has to answer.
    """
    method, question = "Master.Status", frame(empty=pb.Empty())
    if waits:
        method, question = "Master.Connect", connect_request(timeout_s)
    transport = GrpcTransport(None, tls=tls, token=token)
    await transport.start(NoHandler())
    try:
        # The master keeps the deadline and knows whom it waits for: ours is later.
        reply = await transport.ask(
            address, method, question, timeout_s=timeout_s + CONTROL_S
        )
        status: pb.ClusterStatus = body_of(reply)
    except BaseException:
        await asyncio.shield(transport.close())
        raise
    return transport, status


async def _open_in_time(
    address: Address,
    timeout_s: float,
    token: Token,
    tls: TLS | None,
    refusals: list[str],
    *,
    waits: bool,
) -> tuple[GrpcTransport, pb.ClusterStatus]:
    """Opens a cluster whose server may still be starting; notes why it is not there."""
    clock = SystemClock()
    deadline = clock.now() + timeout_s
    polling = Polling(ASK_AGAIN_S, timeout_s - ASK_AGAIN_S, clock)
    while True:
        try:
            left_s = deadline - clock.now()
            return await open_cluster(address, left_s, token, tls, waits=waits)
        except (ClusterUnreachableError, TaskLostError) as error:
            restarts = isinstance(error, TaskLostError)
            may_come = restarts or error.details.get("may_be_starting", False)
            refusals[:] = [error.message]
            if not (may_come and await polling.again()):
                raise
