"""Step driver: the shell around ``coordination.step.step`` on the driver's task."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.coordination.step.explain import STEPS_TOLD
from jgraph.coordination.step.run_metadata import PartTimes
from jgraph.coordination.step.step import (
    Abort,
    DeadlinePassed,
    Event,
    Fail,
    Finish,
    PartDone,
    PartFailed,
    PeerLost,
    StepTracker,
)
from jgraph.errors import CancelledStepError, InvalidProgramError, JGError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import RecvNode
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.status import to_status
from jgraph.runtime.compute_errors import as_error
from jgraph.runtime.executor import Outcome, StepTimes
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.task import TaskRuntime
from jgraph.server.steps.messages import StepMessages

Fetches: TypeAlias = list[np.ndarray[Any, Any]]
NodeTimes: TypeAlias = np.ndarray[Any, Any]
OnComputed: TypeAlias = Callable[[Fetches, StepTimes], None]
OnOver: TypeAlias = Callable[[JGError | None], None]


@final
class DrivenStep:
    """A step under way.

    Attributes:
      step: program handle and step id.
      tracker: who still has to finish.
      on_computed: called when the driver's own part is done, with the fetches.
      on_over: called when every part is done, or with the step's first error.
      asked_s: when the other tasks were asked for their parts.
      is_awaited: whether others wait for what the driver's part sends.
      is_traced: whether they tell when their nodes ran.
      parts: what each task measured, if the step is traced.
    """

    __slots__ = (
        "asked_s",
        "is_awaited",
        "is_traced",
        "on_computed",
        "on_over",
        "parts",
        "step",
        "timer",
        "tracker",
    )

    def __init__(
        self,
        step: StepKey,
        tracker: StepTracker,
        on_computed: OnComputed,
        on_over: OnOver,
        asked_s: float,
        is_awaited: bool,
        is_traced: bool,
    ) -> None:
        self.is_awaited = is_awaited
        self.is_traced = is_traced
        self.asked_s = asked_s
        self.parts: list[PartTimes] = []
        self.step = step
        self.tracker = tracker
        self.on_computed = on_computed
        self.on_over = on_over
        self.timer: asyncio.TimerHandle | None = None


@final
class StepDriver:
    """Starts steps on all their tasks, and ends them together.

    Args:
      runtime: the task's own.
      messages: to the other tasks.
    """

    def __init__(
        self,
        runtime: TaskRuntime,
        messages: StepMessages,
    ) -> None:
        self._runtime = runtime
        self._messages = messages
        self._steps: dict[StepKey, DrivenStep] = {}
        self._ids = itertools.count(1)

    def start(
        self,
        handle: str,
        feeds: Mapping[str, Any],
        on_computed: OnComputed,
        on_over: OnOver,
        *,
        timeout_s: float,
        ordered: bool = False,
        ahead: int = 0,
        compute_wait_s: float = 0.0,
        awaited: bool = False,
        trace: bool = False,
    ) -> DrivenStep:
        """Starts a step of a registered program whose driver is this task.

        Args:
          handle: the program.
          feeds: arrays by feed name.
          on_computed: gets the fetches as soon as this task's part is done, and when
            its stages were over; not called when that fails.
          on_over: gets None when every part is done, or the step's error; called once,
            and last.
          timeout_s: limit for the whole step.
          ordered: begin on each task only after the handle's earlier steps.
          ahead: read and send on each task while so many of these are under way.
          compute_wait_s: emulated computing on this task, see ``StepRun``.
          awaited: others wait for what this task's part sends: it leaves as soon as the
            part is computed, and does not wait for the order to begin the next step.
          trace: have every task note when its nodes run, see ``DrivenStep.parts``.

        Raises:
          InvalidProgramError: no such program or gate here; no other task goes on.
          FeedError: the feeds are not the program's.
        """
        program = self._runtime.program(handle)
        tasks = self._runtime.participants(handle)
        step = handle, next(self._ids)
        tracker = StepTracker(program.name, tasks)
        asked_s = self._runtime.now()
        driven = DrivenStep(
            step, tracker, on_computed, on_over, asked_s, awaited, trace
        )
        order = pb.StartStep(
            handle=handle,
            step_id=step[1],
            ordered=ordered,
            timeout_s=timeout_s,
            trace=trace,
            ahead=ahead,
        )
        self._runtime.check_feeds(handle, feeds)
        self._steps[step] = driven
        driven.timer = asyncio.get_running_loop().call_later(
            timeout_s, self._late, driven, timeout_s
        )
        for task in tasks:
            if task != self._runtime.task:
                self._messages.order(task, order)
        try:
            self._runtime.start_step(
                step,
                lambda outcome, times: self._own_part_over(driven, outcome, times),
                feeds=feeds,
                ordered=ordered,
                ahead=ahead,
                compute_wait_s=compute_wait_s,
                trace=trace,
            )
        except BaseException as error:
            self._take_back(driven, as_error(error, self._runtime.task))
            raise
        return driven

    async def run(
        self,
        handle: str,
        feeds: Mapping[str, Any],
        *,
        timeout_s: float,
        trace: bool = False,
    ) -> tuple[Fetches, list[PartTimes]]:
        """Runs one step to its end; returns its fetches, and its times if traced."""
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        fetches: Fetches = []

        def on_over(error: JGError | None) -> None:
            if end.done():
                return
            if error is None:
                end.set_result(None)
            else:
                end.set_exception(error)

        driven = self.start(
            handle,
            feeds,
            lambda values, _: fetches.extend(values),
            on_over,
            timeout_s=timeout_s,
            trace=trace,
        )
        try:
            await end
        except asyncio.CancelledError:
            self.cancel(driven)
            raise
        return fetches, driven.parts

    def cancel(self, driven: DrivenStep) -> None:
        """Stops a step on all its tasks."""
        error = CancelledStepError(f"step of '{driven.step[0]}' was cancelled")
        self._handle(driven, PartFailed(TaskName(""), error))

    def part_over(
        self,
        src: TaskName,
        step: StepKey,
        error: JGError | None,
        nodes: NodeTimes | None = None,
    ) -> None:
        """Learns that another task's part is done, or why it failed."""
        driven = self._steps.get(step)
        if driven is not None:
            if nodes is not None:
                self._note_times(driven, src, nodes)
            done = PartDone(src) if error is None else PartFailed(src, error)
            self._handle(driven, done)

    @property
    def steps(self) -> Mapping[StepKey, DrivenStep]:
        """The steps under way that this task drives."""
        return self._steps

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Learns that a task went away."""
        for driven in list(self._steps.values()):
            self._handle(driven, PeerLost(peer, error))

    def close(self, error: JGError) -> None:
        """Fails everything under way."""
        for driven in list(self._steps.values()):
            self._handle(driven, PartFailed(TaskName(""), error))

    def _take_back(self, driven: DrivenStep, error: JGError) -> None:
        """Ends a step that could not begin here; who started it knows why."""
        self._forget(driven)
        for instruction in driven.tracker.handle(PartFailed(TaskName(""), error)):
            if isinstance(instruction, Abort):
                self._abort(instruction.task, driven.step, error)

    def _own_part_over(
        self, driven: DrivenStep, outcome: Outcome, times: StepTimes
    ) -> None:
        if isinstance(outcome, BaseException):
            error = as_error(outcome, self._runtime.task)
            self._handle(driven, PartFailed(self._runtime.task, error))
            return
        if driven.is_awaited:
            self._messages.post()
        driven.on_computed(outcome, times)
        if driven.is_traced:
            self._note_times(driven, self._runtime.task, times.nodes)
        self._handle(driven, PartDone(self._runtime.task))

    def _note_times(self, driven: DrivenStep, task: TaskName, nodes: NodeTimes) -> None:
        told_s = self._runtime.now()
        driven.parts.append(PartTimes(task, nodes, driven.asked_s, told_s))

    def _late(self, driven: DrivenStep, timeout_s: float) -> None:
        waited_for = tuple(self._runtime.waiting_for(driven.step))
        self._handle(driven, DeadlinePassed(timeout_s, waited_for))

    def _handle(self, driven: DrivenStep, event: Event) -> None:
        for instruction in driven.tracker.handle(event):
            match instruction:
                case Abort(task, error):
                    self._abort(task, driven.step, error)
                case Finish():
                    self._forget(driven)
                    driven.on_over(None)
                case Fail(error):
                    self._forget(driven)
                    driven.on_over(error)

    def _abort(self, task: TaskName, step: StepKey, error: JGError) -> None:
        if task == self._runtime.task:
            self._runtime.abort(step, error)
            return
        order = pb.AbortStep(handle=step[0], step_id=step[1], reason=to_status(error))
        self._messages.abort(task, order)

    def _forget(self, driven: DrivenStep) -> None:
        self._steps.pop(driven.step, None)
        if driven.timer is not None:
            driven.timer.cancel()


def waits_of(runtime: TaskRuntime, driver: StepDriver) -> Iterator[pb.StepWait]:
    """Yields what the oldest steps of each program wait for on a task."""
    counts = Counter[str]()
    for step in dict.fromkeys([*runtime.steps, *driver.steps]):
        counts[step[0]] += 1
        if counts[step[0]] <= STEPS_TOLD:
            yield _wait(runtime, driver, step)


def _wait(runtime: TaskRuntime, driver: StepDriver, step: StepKey) -> pb.StepWait:
    run, driven = runtime.steps.get(step), driver.steps.get(step)
    began = run.times.started if run is not None else 0.0
    if driven is not None:
        began = driven.asked_s
    try:
        program = runtime.program(step[0])
    except InvalidProgramError:  # removed, and its steps are ending
        return pb.StepWait(handle=step[0], step_id=step[1])
    lacking = set(runtime.waiting_for(step))
    lacks = [
        node
        for node in program.partition(runtime.task).nodes
        if isinstance(node, RecvNode) and node.key in lacking
    ]
    return pb.StepWait(
        handle=step[0],
        step_id=step[1],
        program=program.name,
        age_s=runtime.now() - began if began else 0.0,
        state="queued" if run is not None and not run.times.started else "running",
        keys=[node.key for node in lacks],
        senders=[node.src for node in lacks],
        drives=driven is not None,
        pending=driven.tracker.pending if driven is not None else (),
    )
