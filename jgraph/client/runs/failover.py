"""Failover of a run to another master when its own is lost, done by the client."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from jgraph.client.connection import Connection
from jgraph.client.runs.holds import DrainHolds
from jgraph.client.wait_for_tasks import view_of
from jgraph.cluster import event_loop
from jgraph.cluster.drain import told_to_end
from jgraph.cluster.loop_messages import DealtData, plain
from jgraph.cluster.polling import Polling
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import (
    ClusterUnreachableError,
    FencedError,
    JGError,
    TaskLeavingError,
    TaskLostError,
)
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame

_LOG = logging.getLogger("jgraph.loops")
_LOST_REPLY_S: Final = 1.0
T = TypeVar("T")


def open_data(cluster: Connection, name: str, data: DealtData) -> None:
    """Makes the master of a client deal out the data of a run.

    Args:
      cluster: the client.
      name: of the data; another one for each master.
      data: what is dealt.
    """
    order = pb.OpenDataRun(
        run=name,
        plan=plain(data.plan),
        budget=data.batches,
        workers=data.workers,
        position="" if data.position is None else json.dumps(data.position),
        lease_s=data.lease_s,
    )
    cluster.call("Master.OpenDataRun", frame(open_data_run=order))


def take_over(cluster: Connection, error: JGError) -> None:
    """Makes another server the master of a client.

    A ps rather than a worker: a run needs all of them anyway.

    Args:
      cluster: the client.
      error: why its master is thought to be lost.

    Raises:
      JGError: there is none.
    """
    old = cluster.master
    # The old one last: it may have been started again, or have left the cluster.
    order = sorted(cluster.tasks(), key=lambda task: (task == old, not is_ps(task)))
    for task in order:
        if _may_be_master(cluster, task):
            cluster.move_to(task)
            if isinstance(error, TaskLeavingError | FencedError):
                _LOG.info("%s; %s is the master from here on", error.message, task)
                return
            _LOG.warning(
                "%s, the master, was lost: %s. %s is the master from here on",
                *(old, error.message.rstrip("."), task),
            )
            return
    raise lost_master(error, old)


def release_run(cluster: Connection, drain_holds: DrainHolds) -> None:
    """Lets go of all that a run held, when nothing more is asked of it.

    A master that was told to end as the last steps were done is the client's no longer.
    """
    if cluster.master in drain_holds.leaving:
        with suppress(JGError):  # there is none; who asks next is told
            take_over(cluster, told_to_end(cluster.master))
    drain_holds.close()


def ask_with_failover(cluster: Connection, ask: Callable[[], T]) -> T:
    """Asks what may be asked twice, with another master if that is lost meanwhile.

    Raises:
      JGError: something else is lost.
    """
    master = cluster.master
    try:
        return ask()
    except (ClusterUnreachableError, TaskLostError) as error:
        _do_without(cluster, master, error)
    return ask()


def ask_while_replaced(
    cluster: Connection, ask: Callable[[], T], polling: Polling
) -> T:
    """Asks so, and again for some time where nobody is there to be master either.

    Args:
      cluster: the client.
      ask: asks what may be asked any number of times.
      polling: as long as this goes on.

    Raises:
      JGError: something else is lost, or it takes longer.
    """
    while True:
        try:
            return ask_with_failover(cluster, ask)
        except (ClusterUnreachableError, TaskLostError) as error:
            if error.details.get("task") != cluster.master or not polling.wait():
                raise


def _do_without(cluster: Connection, master: TaskName, error: JGError) -> None:
    """Makes another server the master, if an error is of the loss of that one."""
    if error.details.get("task", master) != master:
        raise error
    if cluster.master == master:  # who follows a run may have found another
        take_over(cluster, error)


def _may_be_master(cluster: Connection, task: TaskName) -> bool:
    """Whether it answers, knows the same cluster, and does not end."""
    view = event_loop.run(view_of(cluster, cluster.spec.address(task)))
    if view is None:
        return False
    ready = any(
        status.task == task and status.state == "ready" for status in view.tasks
    )
    # The spec is another if it was started anew.
    spec = ClusterSpec.from_json(view.cluster_json)
    is_newer = view.arrangement > cluster.arrangement
    return ready and (is_newer or spec.tasks() == cluster.spec.tasks())


def lost_master(error: JGError, master: TaskName) -> JGError:
    """Returns the error of a run that cannot do without its master."""
    return TaskLostError(
        f"{master}, the master of this run, was lost: {error.message.rstrip('.')}. "
        "A client that is connected to a ps may lose any worker",
        **{**error.details, "task": master},
    )
