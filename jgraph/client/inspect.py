"""Inspection of a cluster from outside, without waiting for missing tasks."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from jgraph.client.logs import EventTail, LogTail
from jgraph.client.no_handler import NoHandler
from jgraph.client.runs.runs import RunInfo, run_infos, stream_of
from jgraph.client.status import ClusterStatus
from jgraph.client.timeline.collecting import FlightCollector, profile_of
from jgraph.cluster import event_loop
from jgraph.cluster.options import shutdown_order
from jgraph.cluster.transport_choice import (
    TLSFiles,
    address_of,
    as_tls,
    certificates_of,
    token_file_in,
)
from jgraph.coordination.timeline.cluster_trace import ClusterTrace
from jgraph.errors import ClusterUnreachableError, TaskLostError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.token import find_token
from jgraph.rpc.transport import Address, Frame


@final
class ClusterInspector:
    """What one may ask a cluster without joining it; made by ``inspecting``."""

    def __init__(
        self, transport: GrpcTransport, address: Address, timeout_s: float
    ) -> None:
        self._transport = transport
        self._address = address
        self._timeout_s = timeout_s

    def status(self) -> ClusterStatus:
        """Returns how the tasks are; names those that do not answer."""
        reply = self._ask(self._address, "Master.Status", frame(empty=pb.Empty()))
        return ClusterStatus.from_message(body_of(reply))

    def runs(self) -> list[RunInfo]:
        """Returns the runs that outlive their clients."""
        reply = self._ask(self._address, "Master.Runs", frame(empty=pb.Empty()))
        return run_infos(body_of(reply))

    def look(self) -> tuple[ClusterStatus, list[RunInfo]]:
        """Returns how the tasks and the runs are: all by one call."""
        status = body_of(
            self._ask(self._address, "Master.Status", frame(empty=pb.Empty()))
        )
        # Tasks of an older version tell of runs when they are asked for them.
        runs = run_infos(status.runs) if status.HasField("runs") else self.runs()
        return ClusterStatus.from_message(status), runs

    def reports(self, run: RunInfo, address: Address) -> Iterator[Frame]:
        """Yields all reports of a run so far, and those to come, to its end.

        Args:
          run: which.
          address: of its master.

        Raises:
          JGError: the run failed, or its master is lost.
        """
        query = frame(run_query=pb.RunQuery(run=run.name))
        return stream_of(self._transport, address, "Master.Attach", query)

    def variables(self) -> list[pb.VariableInfo]:
        """Returns what the tasks store that answer."""
        query = frame(variable_query=pb.VariableQuery())
        reply = self._ask(self._address, "Master.Variables", query)
        return list(body_of(reply).variables)

    def lines(self, address: Address, after: int, limit: int) -> tuple[int, list[str]]:
        """Returns lines of a task's log after a number, and the number of the last."""
        query = frame(log_query=pb.LogQuery(after=after, limit=limit))
        body = body_of(self._ask(address, "TaskLog", query))
        return body.last, list(body.lines)

    def logs(self, task: str, behind: int) -> LogTail:
        """Returns the end of a task's log, and what it writes from now on.

        Raises:
          UnknownDeviceError: the cluster has no such task.
        """
        spec = self.status().cluster
        spec.address(task)
        return LogTail(
            *(self._transport, spec, [TaskName(task)]), behind=behind, must_answer=True
        )

    def trace(
        self, seconds: float | None, last: float | None, profiled: str | None = None
    ) -> tuple[ClusterTrace, dict[str, bytes]]:
        """Returns when all tasks did what, see ``Cluster.trace``.

        Args:
          seconds: of what happens from now on.
          last: seconds of what happened before now.
          profiled: task of which XLA's profile is taken meanwhile.

        Returns:
          The trace, and the files of the profile by name.

        Raises:
          UnknownDeviceError: the cluster has no such task.
          JGError: no task answers, or ``profiled`` takes no profile.
        """
        spec = self.status().cluster
        addresses = {task: spec.address(task) for task in spec.tasks()}
        to = None if profiled is None else spec.address(profiled)
        collector = FlightCollector(self._transport, addresses)
        look = collector.next(seconds or 0) if last is None else collector.last(last)

        async def both() -> tuple[ClusterTrace, dict[str, bytes]]:
            if to is None:
                return await look, {}
            profile = profile_of(self._transport, to, seconds or last or 0.0)
            found, files = await asyncio.gather(look, profile)
            return found, files

        return event_loop.run(both())

    def events(self) -> EventTail:
        """Returns what became of the cluster, and what comes, as its tasks tell."""
        return EventTail(self._transport, self.status().cluster)

    def drain(self, task: str, grace_s: float) -> Callable[[], bool]:
        """Tells a task to end, see ``Cluster.drain``; returns what says if it has.

        Raises:
          UnknownDeviceError: the cluster has no such task.
        """
        address = self.status().cluster.address(task)
        self._ask(address, "Shutdown", shutdown_order(grace_s))
        query = frame(log_query=pb.LogQuery(limit=0))

        def gone() -> bool:
            try:
                self._ask(address, "TaskLog", query)
            except (ClusterUnreachableError, TaskLostError):
                return True
            return False

        return gone

    def _ask(self, to: Address, method: str, request: Frame) -> Frame:
        return event_loop.run(
            self._transport.ask(to, method, request, timeout_s=self._timeout_s)
        )


@contextmanager
def inspecting(
    target: str,
    *,
    timeout_s: float = 10.0,
    tls: TLSFiles | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> Iterator[ClusterInspector]:
    """Connects to a cluster through any of its servers, for a look.

    Args:
      target: as for ``connect``.
      timeout_s: limit for each question.
      tls: as for ``connect``.
      token_file: as for ``connect``.

    Raises:
      ClusterUnreachableError: nothing of ours listens there; when it is asked.
    """
    files = as_tls(tls, None)
    address = address_of(target, files)
    token = find_token(token_file or token_file_in(target), certificates_of(files))

    async def make() -> GrpcTransport:
        transport = GrpcTransport(None, tls=files, token=token)
        await transport.start(NoHandler())
        return transport

    transport = event_loop.run(make())
    try:
        yield ClusterInspector(transport, address, timeout_s)
    finally:
        event_loop.run(transport.close())


def status_of(
    target: str,
    *,
    timeout_s: float = 10.0,
    tls: TLSFiles | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> ClusterStatus:
    """Asks a cluster how its tasks are, without waiting for those that are missing.

    Raises:
      ClusterUnreachableError: nothing of ours listens there.
    """
    with inspecting(
        target, timeout_s=timeout_s, tls=tls, token_file=token_file
    ) as visit:
        return visit.status()
