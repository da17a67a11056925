"""Replica loop on a worker: takes batches, drives steps, streams reports."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import final

import numpy as np

from jgraph.clock import Clock
from jgraph.cluster.loop_messages import finite_check_of, rows_of
from jgraph.coordination.data.shares import PieceTimes
from jgraph.coordination.run.loop_outcome import BATCH_ERRORS
from jgraph.coordination.step.pace import Pace
from jgraph.coordination.step.replica_loop import (
    End,
    Event,
    GoOnAsked,
    HaltAsked,
    Halted,
    LoopStarted,
    ReplicaLoop,
    Report,
    StartStep,
    StepAcknowledged,
    StepComputed,
    StepFailed,
    StepRefused,
    StepUnwanted,
    StepUnwell,
    StopAsked,
    Tell,
)
from jgraph.errors import JGError, RunOverError, StaleGradientError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Frame
from jgraph.runtime.executor import StepTimes
from jgraph.server.loops.data_feed import DataFeed
from jgraph.server.loops.halt_timer import HaltTimer
from jgraph.server.loops.reports import LoopReports, LoopTimes
from jgraph.server.loops.step_inputs import FedStep, StepInputs
from jgraph.server.loops.sum_part import SumPart
from jgraph.server.steps.driver import Fetches, StepDriver


@final
class LoopRun:
    """Runs one order of ``RunLoop`` and streams its reports.

    Args:
      order: what to run.
      feed: gives the batches.
      driver: drives the steps.
      clock: time for reports.
      piece_times: learns how long it takes for a piece, where steps are of several.
      part: in secure sums; None: it has none.

    Attributes:
      record: what it reports.
    """

    def __init__(
        self,
        order: pb.RunLoop,
        feed: DataFeed,
        driver: StepDriver,
        clock: Clock,
        piece_times: PieceTimes,
        part: SumPart | None = None,
    ) -> None:
        self._order = order
        self._piece_times = piece_times
        self._driver = driver
        self._clock = clock
        self._feed = feed
        self._inputs = StepInputs(order, feed, part, self._drive, self._take)
        self._pieces_done = 0  # since the last report
        self._refused = 0
        self._finite = finite_check_of(order)
        self._pace = None
        if order.pace_feed:
            self._pace = Pace(order.pace_s, order.pace_most)
        self._unwell: int | None = None
        self._leaving = False
        self._machine = ReplicaLoop(
            first_step=order.first_step,
            steps=order.steps,
            report_every_s=order.report_every_s,
            prefetch=order.prefetch,
            tell_every=order.tell_every,
        )
        self._events: deque[Event] = deque()
        self._turn_used = False
        self.record = LoopReports(clock)
        self._halts = HaltTimer(order.loop, self.go_on)
        self._times = LoopTimes(clock.now())

    def leave(self) -> None:
        """Asks the loop to end likewise, and to say that its task does."""
        self._leaving = True
        self.stop()

    def stop(self) -> None:
        """Asks the loop to end after the steps in flight."""
        self._take(StopAsked())
        self._inputs.give_up(over=False)
        self._feed.close()

    def halt(self, number: int, limit_s: float) -> None:
        """Asks the loop to start no more steps, for so long at most."""
        self._halts.begin(number, limit_s)
        self._take(HaltAsked(number))

    def go_on(self, number: int) -> bool:
        """Ends a halt; returns whether the loop stood still until now."""
        stood = self._machine.halted == number
        self._halts.end(number)
        self._take(GoOnAsked(number))
        return stood

    async def reports(self) -> AsyncIterator[Frame]:
        """Runs the loop to its end; yields reports, the last with its final state.

        Raises:
          JGError: a step failed.
        """
        self._take(LoopStarted())
        try:
            async for report in self.record.stream():
                yield report
        finally:
            self.stop()  # the watcher may be gone

    def _take(self, event: Event) -> None:
        # Handled at once, so that the next step's start travels with this step's last
        # values; but only one step is started per turn of the event loop: steps that
        # need nobody else would end inside their own start, and nothing else would run.
        self._events.append(event)
        if not self._turn_used:
            self._handle_events()

    def _handle_events(self) -> None:
        while self._events and not self._turn_used:
            now = self._clock.now()
            for instruction in self._machine.handle(self._events.popleft(), now):
                match instruction:
                    case StartStep(step):
                        self._use_turn()
                        self._inputs.start(step, now)
                    case Report():
                        self._report("running")
                    case Tell():
                        done = self._feed.done
                        self.record.tell(pb.LoopReport(state="running", data_done=done))
                    case Halted(number, in_flight):
                        self._report("running", number, in_flight)
                    case End(state, error):
                        self._end(state, error)

    def _use_turn(self) -> None:
        self._turn_used = True
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_used = False
        self._handle_events()

    def _drive(self, step: int, fed: FedStep) -> None:
        fed.started_s = self._clock.now()
        order = self._order
        if self._pace is not None:
            fed.feeds[order.pace_feed] = np.asarray(self._pace.steps, np.int32)
        try:
            self._driver.start(
                order.handle,
                fed.feeds,
                lambda fetches, times: self._computed(step, fed, fetches, times),
                lambda error: self._over(step, error),
                # It waits for the steps that are computed before it.
                timeout_s=order.step_timeout_s * (1 + order.prefetch),
                ordered=True,
                ahead=order.prefetch,
                compute_wait_s=order.compute_wait_s * fed.pieces,
                # Of an update of several workers, which the number of the batch tells.
                awaited=bool(order.batch_feed),
            )
        except JGError as error:
            self._take(StepFailed(step, error))

    def _computed(
        self, step: int, fed: FedStep, fetches: Fetches, times: StepTimes
    ) -> None:
        parts = self._times.add(
            self._clock.now(),
            wanted_s=fed.wanted_s,
            started_s=fed.started_s,
            parts=times.parts(),
        )
        if self._order.pieces:
            self._piece_times.learn(parts["compute"], fed.pieces)
            self._pieces_done += fed.pieces
        if self._pace is not None:
            self._pace.took(parts["compute"])
        error = None
        if self._finite is not None:
            replica = self._order.replica
            where = f"of replica {replica}"
            error = self._finite.take(fetches, step, where, replica)
        if error is None:
            self.record.add(step, fetches)
            self._take(StepComputed(step))
        else:
            self._unwell = step
            self._give_up(step, error)

    def _over(self, step: int, error: JGError | None) -> None:
        if isinstance(error, StaleGradientError):
            self._refused += 1
            self._take(StepRefused(step))
            return
        self._inputs.forget(step)
        match error:
            case None:
                if step != self._unwell:  # of which the batch comes again
                    self._feed.acknowledge(step - self._order.first_step)
                self._take(StepAcknowledged(step))
            case RunOverError():
                self._take(StepUnwanted(step))
            case _ if isinstance(error, BATCH_ERRORS):
                self._give_up(step, error)
                self._take(StepAcknowledged(step))
            case _:
                self._take(StepFailed(step, error))

    def _give_up(self, step: int, error: JGError) -> None:
        """Ends after the steps in flight, as a batch cannot be trained on."""
        self._take(StepUnwell(step, error))
        self._inputs.give_up(over=False)

    def _end(self, state: str, error: JGError | None) -> None:
        self._halts.end()
        self._inputs.close()
        if error is None:
            self._report("left" if self._leaving and state == "stopped" else state)
        self.record.end(error)

    def _report(self, state: str, halted: int = 0, in_flight: int = 0) -> None:
        pieces, self._pieces_done = self._pieces_done, 0
        dropped = {self._order.task: self._refused} if self._refused else {}
        self.record.send(
            pb.LoopReport(
                state=state,
                times=self._times.take(),
                data_done=self._feed.done,
                dropped=dropped,
                done=rows_of(self._feed.take_done()),
                halted=halted,
                in_flight=in_flight,
                pieces=pieces,
            )
        )
