"""Follower of a run at its master: submits it, and yields its reports to the end."""

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, final

from jgraph.client.connection import Connection, unique
from jgraph.client.runs.failover import lost_master, open_data, take_over
from jgraph.client.runs.runs import (
    RunInfo,
    info_of,
    position_of,
    reports_of,
    runs_of,
    stop_run,
)
from jgraph.client.runs.seen_reports import ReportDeduplicator
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import COMPILE_S
from jgraph.cluster.loop_messages import (
    DealtData,
    Detached,
    LoopReport,
    LoopRequest,
    order_in_run,
    plain,
    report_in,
)
from jgraph.cluster.polling import Polling
from jgraph.coordination.liveness.master_lease import END_S
from jgraph.coordination.run.succession import standby_of
from jgraph.errors import (
    ClusterUnreachableError,
    FencedError,
    JGError,
    TaskLeavingError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame

_LOG = logging.getLogger("jgraph.loops")
_POLL_S: Final = 0.2
"""Between two looks: that a run has another master shows only by asking for it."""


@final
class RunFollower:
    """Reports of a run that its master looks after, from one master to the next.

    Args:
      cluster: the client.
      info: which run; at its newest master.
      stop: set from another thread: asks the run to stop. Set when the run is over.

    Attributes:
      info: the same; of the master that it has now.
    """

    def __init__(
        self, cluster: Connection, info: RunInfo, stop: threading.Event
    ) -> None:
        self.info = info
        self._cluster = cluster
        self._stop = stop
        self._is_over = False
        self._position: dict[str, Any] | None = None
        self._tasks: dict[int, TaskName] = {}
        self._reports = self._followed()
        stopping = threading.Thread(
            target=self._stop_when_asked, name="jgraph-stop-run", daemon=True
        )
        stopping.start()

    def __iter__(self) -> Iterator[LoopReport]:
        """Yields the reports that have not been yielded.

        Raises:
          JGError: the run failed, or is lost.
        """
        for message in self._reports:
            yield self._told(message)

    def stop(self) -> None:
        """Asks the run to end after the steps in flight; returns at once."""
        self._stop.set()

    def close(self) -> None:
        """Follows the run no longer; it goes on."""
        self._is_over = True
        self._stop.set()

    def position(self) -> dict[str, Any]:
        """Returns where in its data the run is, or was when its master last said so.

        Raises:
          JGError: no master ever did.
        """
        try:  # the data may be dealt out under another name by now
            self._position = position_of(self._cluster, self._newest() or self.info)
        except JGError:
            if self._position is None:
                raise
        return self._position

    def _newest(self) -> RunInfo | None:
        """Returns how the run stands at its newest master; None: nobody knows it."""
        name = self.info.name
        return next((run for run in runs_of(self._cluster) if run.name == name), None)

    def _told(self, message: Frame) -> LoopReport:
        body: pb.LoopReport = body_of(message)
        if body.task:
            again = body.replica in self._tasks and body.state == "running"
            self._tasks[body.replica] = TaskName(body.task)
            if again:
                _LOG.info("%s goes on with another loop", body.task)
        report = report_in(self._tasks, message)
        if report.state == "lost":
            _LOG.warning("%s was lost; the other workers go on", report.task)
        return report

    def _followed(self) -> Iterator[Frame]:
        """Yields what the loops tell, at one master after the other."""
        seen: defaultdict[int, ReportDeduplicator] = defaultdict(ReportDeduplicator)
        try:
            while True:
                try:
                    if self._stop.is_set():  # a master before may not have heard it
                        stop_run(self._cluster, self.info)
                    for reply in reports_of(self._cluster, self.info):
                        new = seen[body_of(reply).replica].unseen(reply)
                        if new is not None:
                            yield new
                except (ClusterUnreachableError, TaskLostError, FencedError) as error:
                    if not self._is_of_master(error):
                        raise
                    self.info = self._next(error)
                else:
                    return
        finally:
            self.close()

    def _is_of_master(self, error: JGError) -> bool:
        """Whether it is the master that is lost, replaced or told to end."""
        master = self.info.master
        if isinstance(error, TaskLeavingError):
            return error.details.get("task") == master
        address = self._cluster.spec.address(master)
        return isinstance(error, FencedError) or error.details.get("address") == address

    def _next(self, lost: JGError) -> RunInfo:
        """Waits until the run has another master, which the client has from then on.

        Args:
          lost: how the one before was.

        Raises:
          JGError: there is none.
        """
        if isinstance(lost, TaskLeavingError | FencedError):
            newest = None
            with suppress(JGError):  # then it is gone already
                newest = self._newest()
            if newest is not None and newest.term > self.info.term:
                self._cluster.move_to(newest.master)
                return newest
            if newest is not None and newest.state == "failed":
                raise lost
        if self._cluster.master == self.info.master:
            take_over(self._cluster, lost)
        return wait_for_new_master(self._cluster, self.info, lost)

    def _stop_when_asked(self) -> None:
        self._stop.wait()  # it is also set when the run is over
        if self._is_over:
            return
        try:
            stop_run(self._cluster, self.info)
        except JGError as error:
            _LOG.warning("run '%s' could not be stopped: %s", self.info.name, error)


def wait_for_new_master(cluster: Connection, old: RunInfo, lost: JGError) -> RunInfo:
    """Waits until a run has another master, which the client has from then on.

    Args:
      cluster: the client; it has another master already.
      old: the run at the master that was lost.
      lost: why that is thought to be lost.

    Raises:
      JGError: there is none.
    """
    # The standby waits for a silent master, too.
    polling = Polling(_POLL_S, 2 * END_S)
    while standby_of(cluster.tasks(), old.master) is not None:
        for found in runs_of(cluster):
            if found.name == old.name and found.term > old.term:
                cluster.move_to(found.master)
                return found
            if found.name == old.name and found.state == "failed":
                raise lost
        if not event_loop.run(polling.again()):
            break
    raise lost_master(lost, old.master)


def submit_run(
    cluster: Connection,
    requests: Sequence[LoopRequest],
    detached: Detached,
    data: DealtData | None,
    stop: threading.Event,
) -> RunFollower:
    """Makes the master begin a run that it looks after, and follows it.

    Args:
      cluster: the client.
      requests: a loop each.
      detached: what the master must know of the run.
      data: what is dealt out; None: training is synchronous, and a loop decides.
      stop: see ``RunFollower``.

    Raises:
      JGError: it does not begin.
    """
    name = unique("loop")
    arbiter = next((one for one in requests if one.sync is not None), None)
    sync = None if arbiter is None else arbiter.sync
    run, term = (name, 1) if sync is None else (sync.run, sync.term)
    dealt = sync or data
    assert dealt is not None  # which a master deals out
    _open_run(cluster, run, detached)
    if data is not None:
        open_data(cluster, name, data)
    for request in requests:
        order = order_in_run(
            *(request, f"{name}-{request.replica}"),
            run=run,
            term=term,
            name=name,
            plan=plain(dealt.plan),
            arbiter=arbiter,
        )
        cluster.call("Master.RunLoop", frame(run_loop=order))
    row = pb.RunRow(
        run=run,
        task=cluster.master,
        state="running",
        info=json.dumps(detached.about),
        data_run=name,
        term=term,
    )
    return RunFollower(cluster, info_of(row), stop)


def _open_run(cluster: Connection, run: str, detached: Detached) -> None:
    """Makes the master of a client look after a run also when the client is gone."""
    order = pb.OpenRun(
        run=run,
        info=json.dumps(detached.about),
        saves=detached.saves,
        source=detached.source,
        copies=detached.copies,
        gate=detached.gate,
        wait_s=detached.wait_s,
    )
    cluster.call("Master.OpenRun", frame(open_run=order))
    for program in detached.programs:
        body_of(program).run = run
        cluster.call("Master.KeepProgram", program, timeout_s=COMPILE_S)
