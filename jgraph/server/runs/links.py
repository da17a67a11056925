"""Silent links of a run: waits for a task to answer, then asks for its final report."""

import logging
from collections.abc import Mapping
from typing import Final

from jgraph.clock import Clock
from jgraph.cluster.deadlines import CONTROL_S, bounded_s
from jgraph.cluster.polling import Polling
from jgraph.coordination.liveness.master_lease import END_S
from jgraph.coordination.run.loop_outcome import is_link_loss
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import is_refused
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.server.runs.peers import Peers, ready_tasks

_LOG = logging.getLogger("jgraph.recover")
_POLL_S: Final = 0.5
"""Between two looks: that a link is back shows only by asking over it."""


async def wait_reconnected(
    task: TaskName,
    error: JGError,
    peers: Peers,
    known: Mapping[TaskName, str],
    clock: Clock,
) -> bool:
    """Waits until a task answers again; False: its process is gone, or it stays silent.

    Args:
      task: was lost.
      error: says how.
      peers: to the tasks.
      known: which process of each task the run knows.
      clock: limits the wait.
    """
    polling, waits = Polling(_POLL_S, END_S, clock), False
    while not is_link_loss(task, known, ready := await ready_tasks(peers)):
        has_left = task not in peers.tasks()  # which has no address then
        if task in ready or has_left or await is_refused(peers.address(task)):
            return False
        if not waits:
            what = error.message.rstrip(".")
            _LOG.warning("%s; it is waited for up to %g s", what, END_S)
        waits = True
        if not await polling.again():
            return False
    return True


async def final_report_of(
    order: pb.RunLoop,
    after: int,
    error: JGError,
    peers: Peers,
    known: Mapping[TaskName, str],
    clock: Clock,
) -> Frame:
    """Returns what a loop did after a report, when its task is reached again.

    Args:
      order: of the loop, which ends without its master.
      after: number of the last report that came.
      error: ended the reports.
      peers: to the tasks.
      known: which process of each task the run knows.
      clock: limits the wait.

    Raises:
      JGError: ``error``, as it is not the link alone that is lost; or its task knows
        of no such loop.
    """
    task = TaskName(order.task)
    if not await wait_reconnected(task, error, peers, known, clock):
        raise error
    stop = pb.StopLoop(
        loop=order.loop,
        task=task,
        account=True,
        after=after,
        timeout_s=order.step_timeout_s,
        run=order.run,
        term=order.term,
    )
    limit_s = CONTROL_S + bounded_s(order.step_timeout_s)
    request = frame(stop_loop=stop)
    account = await peers.call(task, "StopLoop", request, timeout_s=limit_s)
    if body_of(account).state == "failed":
        raise error
    return account
