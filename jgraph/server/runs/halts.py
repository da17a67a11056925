"""Halts of replica loops while their master saves the run."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias, final

from jgraph.coordination.run.cuts import (
    Cuts,
    Event,
    GoOn,
    Halt,
    LoopBegan,
    LoopHalted,
    LoopOver,
    Save,
    Saved,
    Told,
)
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.checkpointer import RunCheckpointer

_Do: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


@final
class RunHalts:
    """Acts for the ``Cuts`` of one run; in synchronous training for the arbiter.

    Args:
      order: what the client says of the run.
      saver: saves it.
      ask: tells a loop something; returns which halt it has ended.
      do: does something meanwhile.
    """

    def __init__(
        self,
        order: pb.OpenRun,
        saver: RunCheckpointer,
        ask: Callable[[str, pb.StopLoop], Awaitable[int]],
        do: _Do,
    ) -> None:
        info, record = json.loads(order.info), saver.record
        first = info["first_step"] + record.row().steps
        every, end = order.saves.every, info["steps"]
        self._cuts = Cuts(every=every, first=first, end=end)
        self._limit_s = order.saves.halt_s
        self._saver = saver
        self._ask = ask
        self._do = do

    def began(self, order: pb.RunLoop) -> None:
        """Learns of a loop."""
        if not _together(order):
            self._handle(LoopBegan(order.loop))

    def note(self, order: pb.RunLoop, told: pb.LoopReport) -> None:
        """Learns what a loop tells."""
        loop = order.loop
        if order.HasField("sync"):
            if told.halted:
                order_to = GoOn(told.halted, (loop,))
                self._do(self._saver.save_halted(0, lambda: self._let_go(order_to)))
        elif not _together(order):
            self._handle(Told(loop, told.data_done))
            if told.halted:
                self._handle(LoopHalted(loop, told.halted, told.in_flight))

    def over(self, order: pb.RunLoop) -> None:
        """Learns that a loop has ended."""
        if not _together(order):
            self._handle(LoopOver(order.loop))

    def _handle(self, event: Event) -> None:
        for told in self._cuts.handle(event):
            match told:
                case Halt(number, loops):
                    for loop in loops:
                        halt = pb.StopLoop(halt=number, timeout_s=self._limit_s)
                        self._do(self._tell(loop, halt))
                case Save(number, _, in_flight):
                    go_on = partial(self._go_on, number)
                    self._do(self._saver.save_halted(in_flight, go_on))
                case GoOn():
                    self._do(self._end(told))

    async def _tell(self, loop: str, told: pb.StopLoop) -> None:
        await self._ask(loop, told)

    async def _end(self, told: GoOn) -> None:
        await self._let_go(told)

    async def _go_on(self, number: int) -> bool:
        """Lets loops go on; returns whether all stood still until now."""
        match self._cuts.handle(Saved(number)):
            case [GoOn() as told]:
                return await self._let_go(told)
            case _:
                return False

    async def _let_go(self, told: GoOn) -> bool:
        asks = (self._ask(loop, pb.StopLoop(go_on=told.number)) for loop in told.loops)
        return all(stood == told.number for stood in await asyncio.gather(*asks))


def _together(order: pb.RunLoop) -> bool:
    """Whether a loop is of synchronous training, in which one loop decides."""
    return order.HasField("sync") or bool(order.batch_feed)
