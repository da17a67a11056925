"""Rounds of replica loops: orders of the next ones, and gates of synchronous ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from jgraph.cluster.deadlines import DRAIN_S
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.server.loops.dealer import Dealers
from jgraph.server.runs.peers import Peers


@final
@dataclass(slots=True)
class LoopOrders:
    """What each loop of one run does, or does next, and what data they are dealt.

    Attributes:
      replicas: the order of each replica's loop.
      arbiter: of the loop that decides; None: training is asynchronous.
      data: what is dealt out in asynchronous training, once that is known.
      number: of the last thing that got a name.
    """

    replicas: dict[int, pb.RunLoop] = field(default_factory=dict)
    arbiter: pb.RunLoop | None = None
    data: pb.OpenDataRun | None = None
    number: int = 0

    @property
    def newest(self) -> list[pb.RunLoop]:
        """The last order of the arbiter, and of each replica."""
        arbiter = [] if self.arbiter is None else [self.arbiter]
        return [*arbiter, *self.replicas.values()]

    def take(self, order: pb.RunLoop) -> None:
        """Takes note of the last order of a loop."""
        if order.HasField("sync"):
            self.arbiter = order
        else:
            self.replicas[order.replica] = order

    def has(self, order: pb.RunLoop) -> bool:
        """Whether this is the last order of its loop."""
        sync = order.HasField("sync")
        return order is (self.arbiter if sync else self.replicas.get(order.replica))

    def next_number(self) -> int:
        """Returns a number that nothing else of the run has here."""
        self.number += 1
        return self.number

    def again(self, order: pb.RunLoop) -> pb.RunLoop:
        """Returns the order of the loop that comes after another one."""
        return next_order(order, self.next_number())

    def go_back(self, step: int, remaining: int, position: str) -> None:
        """Lets the arbiter go on from an earlier update, or from where all ps are.

        Args:
          step: updates that are made.
          remaining: updates to make.
          position: in the data, as JSON.
        """
        if self.arbiter is not None:
            self.arbiter.steps = remaining
            self.arbiter.sync.version = step
            self.arbiter.sync.data_position = position

    def deal(
        self, dealers: Dealers, run: str, batches: int, position: Mapping[str, Any]
    ) -> pb.OpenDataRun:
        """Deals out data anew, from a position on; returns what is dealt out.

        Args:
          dealers: of this task.
          run: a new name.
          batches: so many.
          position: where in the data.
        """
        assert self.data is not None  # of asynchronous training
        data = pb.OpenDataRun()
        data.CopyFrom(self.data)
        data.run, data.budget, data.position = run, batches, json.dumps(position)
        dealers.open(data)
        self.data = data
        for order in self.replicas.values():
            order.data_run = run
        return data


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
