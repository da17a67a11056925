"""Data dealing for one master's runs: the shell of ``coordination.data.dispatch``."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol, final

from jgraph.clock import Clock
from jgraph.cluster.loop_messages import deal_of
from jgraph.cluster.methods import reading
from jgraph.coordination.data.dispatch import (
    SETTLE_S,
    Asked,
    Deal,
    Dispatch,
    Event,
    Expel,
    Fail,
    LinkLost,
    Over,
    Progressed,
    TimePassed,
    WaitEnded,
    WorkerEnded,
    WorkerLost,
)
from jgraph.coordination.data.slots import SlotPlan
from jgraph.coordination.run.loop_outcome import BATCH_ERRORS
from jgraph.errors import ConfigError, JGError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of
from jgraph.rpc.transport import Frame

ANSWER_S = 10.0
"""A worker with nothing to do has an answer after this long, if only an empty one."""

_LOOK_PER_LEASE = 4
_SETTLED_S = 1.1 * SETTLE_S
"""Timers may be a millisecond early."""
_ENDED = 64  # loops whose workers may still ask


class Deals(Protocol):
    """Deals out the data of one run."""

    async def ask(self, question: pb.AskData) -> pb.DataDeal:
        """Answers a worker that asks for batches."""

    async def sum(self, message: pb.SumMessage) -> pb.SumAnswer:
        """Answers a member of a secure sum."""


@final
class Dealer:
    """Deals out the data of one run, ahead of need; a ``Deals``.

    Args:
      dispatch: decides.
      clock: dates what happens.
      lease_s: how long a worker may be silent; see ``Dispatch``.
    """

    def __init__(self, dispatch: Dispatch, clock: Clock, lease_s: float) -> None:
        self._dispatch = dispatch
        self._clock = clock
        self._answers: dict[str, asyncio.Future[pb.DataDeal]] = {}
        # Per loop: what ends it from here.
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._error: JGError | None = None
        self._look_s = lease_s / _LOOK_PER_LEASE
        self._timer = self._look_in(self._look_s)

    def position(self) -> dict[str, Any]:
        """Returns the position, as plain data."""
        return self._dispatch.state()

    async def ask(self, question: pb.AskData) -> pb.DataDeal:
        """Answers a worker that asks for batches, at once unless it is idle.

        Raises:
          JGError: the run's data ends workers, or this one was given up.
        """
        if self._error is not None:
            raise self._error
        loop = question.loop
        answer = self._answers[loop] = asyncio.get_running_loop().create_future()
        received = question.received if question.HasField("received") else None
        self._handle(
            Asked(loop, question.done, question.batches, question.idle, received)
        )
        try:
            return await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError as error:
            if isinstance(error, JGError):
                raise
            return deal_of(())
        finally:
            if self._answers.get(loop) is answer:
                del self._answers[loop]
                self._handle(WaitEnded(loop))

    async def watch(
        self, loop: str, task: TaskName, reports: AsyncIterator[Frame]
    ) -> AsyncIterator[Frame]:
        """Passes a loop's reports on and learns from them what is done.

        Args:
          loop: which.
          task: runs it.
          reports: from there.

        Raises:
          JGError: the loop's own error, or what ends it from here.
        """
        end = self._ends[loop] = asyncio.get_running_loop().create_future()
        event: Event = WorkerLost(loop)
        try:
            async for report in _until(end, reports):
                self._handle(Progressed(loop, body_of(report).data_done))
                if body_of(report).state != "running":
                    event = WorkerEnded(loop)
                yield report
        except JGError as error:
            if isinstance(error, BATCH_ERRORS):
                event = WorkerEnded(loop)  # it lives, and its batches ended nobody
            elif error.details.get("task", task) != task:
                event = LinkLost(loop)
            self._over(loop, end, event)
            if self._error is None or self._error is error:
                raise
            # Nobody else may be left to say that the data ended it.
            raise self._error from error
        finally:
            self._over(loop, end, event)

    def _over(self, loop: str, end: asyncio.Future[None], event: Event) -> None:
        if self._ends.pop(loop, None) is not None and not end.done():
            self._handle(event)
            if not self._timer.cancelled():
                self._timer.cancel()
                self._timer = self._look_in(min(_SETTLED_S, self._look_s))

    def close(self) -> None:
        """Deals no more."""
        self._timer.cancel()

    def _look_in(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = self._look_in(self._look_s)
        self._handle(TimePassed())

    def _handle(self, event: Event) -> None:
        for instruction in self._dispatch.handle(event, self._clock.now()):
            match instruction:
                case Deal(loop, leases):
                    failpoint("data.dealt")
                    self._answer(loop, deal_of(leases))
                    failpoint("data.answered")
                case Over(loop):
                    self._answer(loop, deal_of(None))
                case Expel(loop, error):
                    self._end(loop, error)
                case Fail(error):
                    self._error = error
                    for loop in {*self._answers, *self._ends}:
                        self._end(loop, error)

    def _answer(self, loop: str, deal: pb.DataDeal) -> None:
        answer = self._answers.pop(loop, None)
        if answer is not None and not answer.done():
            answer.set_result(deal)

    def _end(self, loop: str, error: JGError) -> None:
        for waiting in (self._answers.pop(loop, None), self._ends.get(loop)):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # seen: nobody may be left to await it


async def _until(
    end: asyncio.Future[None], reports: AsyncIterator[Frame]
) -> AsyncIterator[Frame]:
    """Yields reports until they end, or raises what ``end`` is given."""
    while True:
        report = asyncio.ensure_future(_next(reports))
        # Seen: who watches may be cancelled while the loop ends with an error.
        report.add_done_callback(lambda over: over.cancelled() or over.exception())
        either: set[asyncio.Future[Any]] = {report, end}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not report.done():
                report.cancel()
        if end.done():
            with suppress(asyncio.CancelledError, JGError):
                await report
            end.result()
        received = await report
        if received is None:
            return
        yield received


async def _next(reports: AsyncIterator[Frame]) -> Frame | None:
    return await anext(reports, None)


@final
class Dealers:
    """The runs whose data is dealt out here, by name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._runs: dict[str, Dealer] = {}
        # Loops of synchronous training: their workers may ask before they have begun.
        self._loops: dict[str, asyncio.Future[Deals]] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED)
        self._closed: dict[str, dict[str, Any]] = {}

    async def ask(self, question: pb.AskData) -> pb.DataDeal:
        """Answers a worker that asks for batches.

        Raises:
          ConfigError: there is no such run.
          JGError: see ``Dealer.ask``.
        """
        if not question.handle:
            return await self.get(question.run).ask(question)
        if question.run in self._ended:
            return deal_of(None)
        begins = self._loop(question.run)
        try:
            deals = await asyncio.wait_for(asyncio.shield(begins), ANSWER_S)
        except TimeoutError:
            # Who waits as well finds out by itself, and asks again.
            if self._loops.get(question.run) is begins and not begins.done():
                del self._loops[question.run]
            return deal_of(())
        return await deals.ask(question)

    async def sum(self, message: pb.SumMessage) -> pb.SumAnswer:
        """Answers a member of a secure sum."""
        loop = self._loops.get(message.run)
        if loop is None or not loop.done():
            return pb.SumAnswer(step="void")
        return await loop.result().sum(message)

    def loop_begins(self, name: str, deals: Deals) -> None:
        """A loop that deals out its data begins here."""
        self._loop(name).set_result(deals)

    def loop_ends(self, name: str) -> None:
        """That loop is over."""
        del self._loops[name]
        self._ended.append(name)

    def _loop(self, name: str) -> asyncio.Future[Deals]:
        if name not in self._loops:
            self._loops[name] = asyncio.get_running_loop().create_future()
        return self._loops[name]

    def open(self, order: pb.OpenDataRun) -> None:
        """Begins to deal for a run."""
        with reading("the data of a run"):
            if not order.lease_s > 0:
                raise ValueError(f"a lease of {order.lease_s} s")
            dispatch = Dispatch(
                SlotPlan.from_dict(json.loads(order.plan)),
                budget=order.budget,
                workers=order.workers,
                lease_s=order.lease_s,
                position=json.loads(order.position) if order.position else None,
            )
            if (before := self._runs.get(order.run)) is not None:
                before.close()
            self._runs[order.run] = Dealer(dispatch, self._clock, order.lease_s)

    def get(self, run: str) -> Dealer:
        """Returns the dealer of a run.

        Raises:
          ConfigError: there is none of that name.
        """
        if run not in self._runs:
            raise ConfigError(
                f"this master deals no data for run '{run}' (it may have been started "
                "anew); call fit again"
            )
        return self._runs[run]

    def position(self, run: str) -> dict[str, Any]:
        """Returns the position of a run, also of one that ended not long ago.

        Raises:
          ConfigError: there is none of that name.
        """
        return self._closed[run] if run in self._closed else self.get(run).position()

    def close(self, run: str) -> dict[str, Any]:
        """Ends a run and returns its position."""
        dealer = self.get(run)
        dealer.close()
        del self._runs[run]
        self._closed[run] = dealer.position()
        if len(self._closed) > _ENDED:
            del self._closed[next(iter(self._closed))]
        return self._closed[run]

    def close_all(self) -> None:
        """Ends every run."""
        for run in list(self._runs):
            self.close(run)
