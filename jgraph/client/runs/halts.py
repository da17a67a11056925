"""Halts of replica loops while their client saves the run."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import final

from jgraph.client.connection import Connection
from jgraph.client.runs.loop_items import Loop
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import CONTROL_S
from jgraph.cluster.loop_messages import DealtData, LoopReport, halted_report
from jgraph.coordination.run.cuts import (
    AllOver,
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
from jgraph.errors import JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame


@final
class LoopHalts:
    """Acts for the ``Cuts`` of one run; in synchronous training for the arbiter.

    Args:
      cluster: where the loops are.
      data: what is dealt out; None: training is synchronous.
    """

    def __init__(self, cluster: Connection, data: DealtData | None) -> None:
        self._cluster = cluster
        self._limit_s = 0.0 if data is None else data.halt_s
        self._cuts: Cuts | None = None
        if data is not None and data.halt_every:
            end = data.first + data.batches
            every, *also = data.halt_every
            self._cuts = Cuts(every=every, first=data.first, end=end, also=also)
        self._loops: dict[str, Loop] = {}
        self._decides: tuple[Loop, int] | None = None
        self._saving = 0  # the halt in which the run is saved
        self._behind: list[LoopReport] = []

    def began(self, one: Loop) -> None:
        """Learns of a loop that trains."""
        self._loops[one.name] = one
        list(self._handle(LoopBegan(one.name)))

    def all_over(self) -> None:
        """Learns that all loops have ended."""
        self._loops.clear()
        list(self._handle(AllOver()))

    def take(self, one: Loop, report: LoopReport) -> Iterator[LoopReport]:
        """Yields what there is to tell: a report, and before it that loops stand still.

        Reports that come while loops are halting wait, so that nothing is done with
        them meanwhile.
        """
        if self._cuts is not None:
            yield from self._events_of(one, report)
        elif report.halted:
            self._decides = one, report.halted
            yield replace(halted_report(one.request, 0), position=report.position)
            self.go_on()
        if report.number or report.state != "running":
            self._behind.append(report)
        yield from self._kept_back()

    def over(self, one: Loop) -> Iterator[LoopReport]:
        """Learns that a loop ended without a last report; yields what waited for it."""
        yield from self._handle(LoopOver(one.name))
        yield from self._kept_back()

    def _kept_back(self) -> Iterator[LoopReport]:
        if self._cuts is None or not self._cuts.is_halting:
            behind, self._behind = self._behind, []
            yield from behind

    def go_on(self) -> bool:
        """Lets loops go on; returns whether they stood still since that was told."""
        if self._decides is not None:
            (one, version), self._decides = self._decides, None
            return self._let_go([one], version)
        if self._cuts is None:
            return False
        stood = [self._perform(told) for told in self._cuts.handle(Saved(self._saving))]
        return stood == [True]

    def _events_of(self, one: Loop, report: LoopReport) -> Iterator[LoopReport]:
        yield from self._handle(Told(one.name, report.data_done))
        if report.halted:
            halted = LoopHalted(one.name, report.halted, report.in_flight)
            yield from self._handle(halted)
        if report.state != "running":
            yield from self._handle(LoopOver(one.name))

    def _handle(self, event: Event) -> Iterator[LoopReport]:
        for told in [] if self._cuts is None else self._cuts.handle(event):
            if isinstance(told, Save):
                one, self._saving = self._loops[told.loops[0]], told.number
                yield halted_report(one.request, told.in_flight)
                self.go_on()
            else:
                self._perform(told)

    def _perform(self, told: Halt | Save | GoOn) -> bool:
        loops = [self._loops[name] for name in told.loops if name in self._loops]
        if isinstance(told, GoOn):
            return self._let_go(loops, told.number)
        for one in loops:
            event_loop.start(self._ask(one, pb.StopLoop(halt=told.number)))
        return True

    def _let_go(self, loops: Sequence[Loop], number: int) -> bool:
        """Lets loops go on; returns whether all stood still until now."""

        async def ask_all(orders: Iterable[pb.StopLoop]) -> list[int]:
            asks = (self._ask(o, t) for o, t in zip(loops, orders, strict=True))
            return await asyncio.gather(*asks)

        orders = [pb.StopLoop(go_on=number) for _ in loops]
        return all(stood == number for stood in event_loop.run(ask_all(orders)))

    async def _ask(self, one: Loop, order: pb.StopLoop) -> int:
        """Tells a loop something; returns the halt that it has ended, if it has."""
        order.loop, order.task = one.name, one.request.task
        order.timeout_s = self._limit_s
        try:
            reply = await self._cluster.transport.ask(
                *(self._cluster.address, "Master.StopLoop", frame(stop_loop=order)),
                timeout_s=CONTROL_S,
            )
        except JGError:
            return 0  # how it ended is told elsewhere
        return int(body_of(reply).halted) if order.go_on else 0
