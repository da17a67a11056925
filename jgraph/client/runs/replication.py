"""Change-log streams at the client: start, continue and end replication per task."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame

if TYPE_CHECKING:
    from jgraph.client.cluster import Cluster

_REPLAY_S = 3600.0
"""A log may have as many updates as it has room for; their number is not known here."""


def take_records(
    cluster: "Cluster",
    stream: str,
    src: TaskName,
    dst: TaskName,
    handles: Sequence[str],
) -> None:
    """Makes ``dst`` apply what ``src`` will record, or itself has in its log.

    Args:
      cluster: of both.
      stream: name of the stream, and container of the copies.
      src: whose records.
      dst: who has the copies.
      handles: by number, the recorded programs as ``dst`` repeats them; see
        ``plan.program.replay``. Empty where ``src`` has no part in one.
    """
    order = pb.TakeRecords(stream=stream, src=src, handles=handles)
    cluster.call(
        "TakeRecords",
        frame(take_records=order),
        timeout_s=bulk_timeout_s(0) if src != dst else _REPLAY_S,
        to=cluster.spec.address(dst),
    )


def keep_records(
    cluster: "Cluster",
    stream: str,
    src: TaskName,
    dst: TaskName | None,
    programs: Mapping[str, int],
    *,
    container: str,
    nbytes: int,
    updates: bool = False,
    undoes: bool = False,
) -> None:
    """Makes ``src`` record, first of all what it holds; again, of more programs.

    Args:
      cluster: of both.
      stream: see ``take_records``.
      src: whose steps are held back until ``dst`` has applied what they changed.
      dst: see ``take_records``; None: the log of ``src`` has the records.
      programs: the number of each, by handle.
      container: of the variables.
      nbytes: of these, or more.
      updates: each step of these programs is a synchronous update.
      undoes: ``src`` can undo the newest update.
    """
    order = pb.KeepRecords(
        stream=stream,
        container=container,
        handles=list(programs),
        programs=list(programs.values()),
        backup=dst or "",
        updates=updates,
        undoes=undoes,
    )
    cluster.call(
        "KeepRecords",
        frame(keep_records=order),
        timeout_s=bulk_timeout_s(nbytes),
        to=cluster.spec.address(src),
    )


def end_records(
    cluster: "Cluster", stream: str, dst: TaskName, version: int | None = None
) -> range:
    """Makes a copy final; returns the versions that it can have.

    Args:
      cluster: of it.
      stream: see ``take_records``.
      dst: who has it.
      version: that it is to have from now on; None: that is not known yet.

    Raises:
      CopyLostError: there is none, it is not what its records say, or of none of
        these versions.
    """
    return _end(cluster, dst, pb.EndRecords(stream=stream, version=version))


def hold_records(
    cluster: "Cluster", stream: str, src: TaskName, version: int | None = None
) -> range:
    """Lets no update change what a task holds; returns the versions that it can have.

    Args:
      cluster: of it.
      stream: see ``take_records``.
      src: who records.
      version: that it is to have; None: that is not known yet.

    Raises:
      CopyLostError: it cannot have this one.
    """
    order = pb.EndRecords(stream=stream, source=True, version=version)
    return _end(cluster, src, order)


def _end(cluster: "Cluster", task: TaskName, order: pb.EndRecords) -> range:
    reply = cluster.call(
        "EndRecords",
        frame(end_records=order),
        timeout_s=bulk_timeout_s(0),
        to=cluster.spec.address(task),
    )
    body = body_of(reply)
    return range(body.first, body.end)
