"""Loops of a run: orders of the next ones, those under way, gates of their rounds."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, final

from jgraph.cluster.deadlines import DRAIN_S
from jgraph.errors import FencedError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.server.loops.dealer import Dealers
from jgraph.server.runs.peers import Peers

_LOG = logging.getLogger("jgraph.recover")
_AGAIN_S: Final = 0.5
"""Between two tries to tell a loop something, while its task does not answer."""
_LAST_WORDS_S: Final = 2.0
"""A loop whose worker is no task any more may still tell how it ended."""


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
        group=sync.group if sync.HasField("group") else None,
        host_sums=sync.host_sums if sync.HasField("host_sums") else None,
        handles=sync.handles,
        readers=sync.readers,
    )
    for shard in map(TaskName, sync.shards):
        request = frame(open_gate=gate)
        await peers.call(shard, "OpenGate", request, timeout_s=DRAIN_S)
    for order in (deciding, *orders):
        order.data_run = deciding.loop


@final
@dataclass(slots=True)
class _Running:
    order: pb.RunLoop
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_written_off: bool = False


@final
@dataclass(slots=True)
class RunningLoops:
    """The loops of one run that have begun, and whose ends are not known yet.

    Args:
      peers: to the tasks.
    """

    peers: Peers
    _loops: dict[str, _Running] = field(init=False, default_factory=dict)

    @property
    def orders(self) -> list[pb.RunLoop]:
        """What each of them does."""
        return [loop.order for loop in self._loops.values()]

    def begin(self, order: pb.RunLoop) -> None:
        """Takes note of a loop that is told from now on what comes."""
        if order.loop not in self._loops:
            self._loops[order.loop] = _Running(order)

    def end(self, order: pb.RunLoop) -> bool:
        """Takes note of the end of a loop; returns whether it was written off."""
        loop = self._loops.pop(order.loop)
        loop.has_ended.set()
        return loop.is_written_off

    async def write_off(self, order: pb.RunLoop) -> bool:
        """Waits a while for the end of a loop; returns whether nobody waits any more.

        False: it has ended, or another call has written it off.
        """
        loop = self._loops.get(order.loop)
        if loop is None or await self._ended(loop, _LAST_WORDS_S):
            return False
        was_written_off, loop.is_written_off = loop.is_written_off, True
        return not was_written_off

    async def tell(self, order: pb.RunLoop, message: pb.StopLoop) -> None:
        """Tells a loop something, unless it ends before it can be told."""
        loop, request = self._loops.get(order.loop), _addressed(order, message)
        while loop is not None and not loop.has_ended.is_set():
            try:
                await self.peers.call(TaskName(order.task), "StopLoop", request)
            except FencedError:
                return  # another master looks after it
            except JGError as error:
                _LOG.info("loop %s is not reached yet: %s", order.loop, error.message)
                await self._ended(loop, _AGAIN_S)
            else:
                return

    async def ask(self, name: str, message: pb.StopLoop) -> int | None:
        """Tells a loop something once; returns the halt that it has ended, if any.

        None: it was not told.
        """
        if name not in self._loops:
            return 0
        order = self._loops[name].order
        request = _addressed(order, message)
        try:
            reply = await self.peers.call(TaskName(order.task), "StopLoop", request)
        except JGError as error:
            _LOG.info("loop %s is not reached: %s", name, error.message)
            return None
        return int(body_of(reply).halted) if message.go_on else 0

    async def _ended(self, loop: _Running, limit_s: float) -> bool:
        """Waits for the end of a loop; False: it goes on."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await loop.has_ended.wait()
        return loop.has_ended.is_set()


def _addressed(order: pb.RunLoop, message: pb.StopLoop) -> Frame:
    message.loop, message.task = order.loop, order.task
    message.run, message.term = order.run, order.term
    return frame(stop_loop=message)
