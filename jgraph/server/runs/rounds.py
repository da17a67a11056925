"""Rounds of replica loops: orders of the next ones, and gates of synchronous ones."""

from collections.abc import Sequence

from jgraph.cluster.deadlines import DRAIN_S
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.server.runs.peers import Peers


def next_order(order: pb.RunLoop, number: int) -> pb.RunLoop:
    """Returns the order of the loop that comes after another one, the next of a run."""
    after = pb.RunLoop()
    after.CopyFrom(order)
    first = order.loop.partition("~")[0]
    after.loop = f"{first}~{order.term}.{number}"
    return after


async def open_round_gates(
    peers: Peers, deciding: pb.RunLoop, orders: Sequence[pb.RunLoop]
) -> None:
    """Opens the gates for the next round of synchronous training.

    Args:
      peers: to the tasks.
      deciding: of the loop that decides; is told who takes part.
      orders: of those that do.

    Raises:
      JGError: a gate does not open.
    """
    sync = deciding.sync
    sync.handles[:] = [order.handle for order in orders]
    sync.tasks[:] = [order.task for order in orders]
    gate = pb.OpenGate(
        gate=sync.gate,
        shards=sync.shards,
        synchronous=True,
        version=sync.version,
        opening=deciding.loop,
        run=deciding.run,
        term=deciding.term,
    )
    for shard in map(TaskName, sync.shards):
        request = frame(open_gate=gate)
        await peers.call(shard, "OpenGate", request, timeout_s=DRAIN_S)
    for order in (deciding, *orders):
        order.data_run = deciding.loop
