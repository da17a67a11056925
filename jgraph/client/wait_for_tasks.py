"""Waiting until all tasks of a cluster answer, also after restarts."""

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import jax

from jgraph.client.connection import Connection
from jgraph.clock import SystemClock
from jgraph.cluster.deadlines import CONTROL_S
from jgraph.cluster.options import check_seconds
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import (
    ClusterError,
    ClusterUnreachableError,
    DeadlineError,
    JGError,
    TaskLostError,
    TaskMissingError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, installed_version
from jgraph.rpc.transport import Address, Frame

ASK_AGAIN_S: Final = 0.2
_ROUND_S: Final = 2.0


def connect_request(timeout_s: float) -> Frame:
    """Returns what asks a master to wait for all tasks."""
    return frame(
        connect=pb.ConnectRequest(
            timeout_s=timeout_s,
            jgraph=installed_version("jgraph"),
            jax=jax.__version__,
        )
    )


def wait_for_tasks(
    cluster: Connection, timeout_s: float, stop: threading.Event
) -> bool:
    """Waits; see ``Cluster.wait_for_tasks``."""
    check_seconds("timeout_s", timeout_s)
    clock, last_error = SystemClock(), None
    deadline = clock.now() + timeout_s
    # In rounds: a master that dies meanwhile does not keep this one waiting.
    while (remaining_s := deadline - clock.now()) > 0 and not stop.wait(ASK_AGAIN_S):
        cluster.check_startable()
        try:
            if _all_answer(cluster, min(remaining_s, _ROUND_S)):
                return True
        except TaskMissingError as error:
            last_error = error
        except (ClusterUnreachableError, TaskLostError, DeadlineError) as error:
            last_error = TaskMissingError(error.message, missing=[cluster.master])
    if stop.is_set():
        return False
    raise TaskMissingError(
        f"not all tasks came back within {timeout_s:g} s: "
        f"{last_error.message if last_error else 'none answered'}",
        **(last_error.details if last_error else {"missing": cluster.tasks()}),
    )


def incarnations_of(cluster: Connection) -> Mapping[TaskName, str]:
    """Returns which start of each task answers now; none of one that does not."""
    with suppress(ClusterError):
        return {TaskName(t.task): t.incarnation for t in cluster.status().tasks}
    return {}


async def view_of(cluster: Connection, address: Address) -> pb.ClusterStatus | None:
    """Asks a task whom it reaches, as any may be master; None if it cannot say."""
    ask, question = cluster.transport.ask, frame(empty=pb.Empty())
    with suppress(JGError):
        reply = await ask(address, "Master.Status", question, timeout_s=2 * CONTROL_S)
        status: pb.ClusterStatus = body_of(reply)
        return status
    return None


def _all_answer(cluster: Connection, timeout_s: float) -> bool:
    reply = cluster.call(
        "Master.Connect",
        connect_request(timeout_s),
        timeout_s=timeout_s + CONTROL_S,
    )
    status: pb.ClusterStatus = body_of(reply)
    if status.arrangement > cluster.arrangement:
        cluster.take_members(status)
    # A master that was started again may not know the others yet.
    return ClusterSpec.from_json(status.cluster_json) == cluster.spec
