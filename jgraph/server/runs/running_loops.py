"""Loops of a run that are under way: messages to them, and waits for their ends."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, final

from jgraph.errors import FencedError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.server.runs.peers import Peers

_LOG = logging.getLogger("jgraph.recover")
_AGAIN_S: Final = 0.5
"""Between two tries to tell a loop something, while its task does not answer."""
_LAST_WORDS_S: Final = 2.0
"""A loop whose worker is no task any more may still tell how it ended."""


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
