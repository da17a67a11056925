"""Change-log streams at the client: start, continue and end replication per task."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jgraph.cluster.deadlines import REPLAY_S, bulk_timeout_s
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame

if TYPE_CHECKING:
    from jgraph.client.cluster import Cluster


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
        timeout_s=bulk_timeout_s(0) if src != dst else REPLAY_S,
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
