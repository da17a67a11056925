"""Halts of replica loops while their run is saved, or evaluated."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
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
from jgraph.coordination.step.replica_loop import UNACKNOWLEDGED
from jgraph.rpc._pb import jgraph_pb2 as pb

_Do: TypeAlias = Callable[[Coroutine[Any, Any, None]], object]


@final
@dataclass(frozen=True, slots=True)
class HaltOrder:
    """Loops halt at multiples of each of ``every``, in updates, for ``limit_s``."""

    every: tuple[int, ...]
    limit_s: float


SaveHalted: TypeAlias = Callable[[int, Callable[[], Awaitable[bool]]], Awaitable[None]]
"""Given how many batches may be in the state and not in the position, and what lets the
loops go on: that returns whether they stood still until then."""


@final
class RunHalts:
    """Acts for the ``Cuts`` of one run; in synchronous training for the arbiter.

    Args:
      wanted: when, and how long at most.
      first: updates now.
      end: updates at which the run ends.
      save: called while loops stand still.
      ask: tells a loop something; returns which halt it has ended, None: not told.
      do: does something meanwhile.
    """

    def __init__(
        self,
        wanted: HaltOrder,
        first: int,
        end: int,
        save: SaveHalted,
        ask: Callable[[str, pb.StopLoop], Awaitable[int | None]],
        do: _Do,
    ) -> None:
        every, *also = wanted.every
        self._cuts = Cuts(every=every, first=first, end=end, also=also)
        self._limit_s = wanted.limit_s
        self._save = save
        self._ask = ask
        self._do = do

    def began(self, order: pb.RunLoop) -> None:
        """Learns of a loop."""
        if not _together(order):
            at_most = UNACKNOWLEDGED + order.prefetch
            self._handle(LoopBegan(order.loop, at_most))

    def note(self, order: pb.RunLoop, report: pb.LoopReport) -> None:
        """Learns what a loop tells."""
        loop = order.loop
        if order.HasField("sync"):
            if report.halted:
                order_to = GoOn(report.halted, (loop,))
                self._do(self._saved(0, lambda: self._let_go(order_to)))
        elif not _together(order):
            self._handle(Told(loop, report.data_done))
            if report.halted:
                self._handle(LoopHalted(loop, report.halted, report.in_flight))

    def over(self, order: pb.RunLoop) -> None:
        """Learns that a loop has ended."""
        if not _together(order):
            self._handle(LoopOver(order.loop))

    def _handle(self, event: Event) -> None:
        for instruction in self._cuts.handle(event):
            match instruction:
                case Halt(number, loops):
                    for loop in loops:
                        self._do(self._halt(loop, number))
                case Save(number, _, in_flight):
                    go_on = partial(self._go_on, number)
                    self._do(self._saved(in_flight, go_on))
                case GoOn():
                    self._do(self._end(instruction))

    async def _halt(self, loop: str, number: int) -> None:
        halt = pb.StopLoop(halt=number, timeout_s=self._limit_s)
        if await self._ask(loop, halt) is None:  # it does not know: the others go on
            self._handle(Saved(number))

    async def _saved(
        self, in_flight: int, go_on: Callable[[], Awaitable[bool]]
    ) -> None:
        await self._save(in_flight, go_on)

    async def _end(self, order_to: GoOn) -> None:
        await self._let_go(order_to)

    async def _go_on(self, number: int) -> bool:
        """Lets loops go on; returns whether all stood still until now."""
        match self._cuts.handle(Saved(number)):
            case [GoOn() as order_to]:
                return await self._let_go(order_to)
            case _:
                return False

    async def _let_go(self, order_to: GoOn) -> bool:
        asks = (
            self._ask(loop, pb.StopLoop(go_on=order_to.number))
            for loop in order_to.loops
        )
        return all(stood == order_to.number for stood in await asyncio.gather(*asks))


def _together(order: pb.RunLoop) -> bool:
    """Whether a loop is of synchronous training, in which one loop decides."""
    return order.HasField("sync") or bool(order.batch_feed)
