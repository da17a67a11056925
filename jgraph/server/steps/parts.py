"""Parts of a task in the steps of other drivers: begun, ended late, reported."""

import asyncio
from typing import final

from jgraph.errors import DeadlineError, JGError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.status import to_status
from jgraph.runtime.compute_errors import as_error
from jgraph.runtime.executor import Outcome, StepTimes
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.task import TaskRuntime
from jgraph.server.gates.gates import Gates
from jgraph.server.steps.messages import StepMessages

# A participant gives a step up this long after its driver should have.
_GRACE_S = 10.0


@final
class StepParts:
    """Begins the parts of one task, and tells each driver how its part ended.

    Args:
      runtime: runs them.
      messages: to the drivers.
      gates: of the task.
    """

    def __init__(
        self, runtime: TaskRuntime, messages: StepMessages, gates: Gates
    ) -> None:
        self._runtime = runtime
        self._messages = messages
        self._gates = gates
        self._drivers: dict[StepKey, tuple[TaskName, asyncio.TimerHandle]] = {}

    def start(self, driver: TaskName, order: pb.StartStep) -> None:
        """Begins the part of a step."""
        failpoint("step.received")
        self._gates.step_started(driver, order.handle)
        step = order.handle, order.step_id

        def end(outcome: Outcome, times: StepTimes) -> None:
            _, timer = self._drivers.pop(step)
            timer.cancel()
            self._report(driver, step, outcome, times if order.trace else None)

        def late() -> None:
            causes = ", ".join(self._runtime.waiting_for(step)) or "its turn"
            error = DeadlineError(
                f"{self._runtime.task} gave up step {step[1]} of '{step[0]}' after "
                f"{order.timeout_s + _GRACE_S:g} s; it waited for {causes} and heard "
                f"nothing from its driver {driver}"
            )
            self._runtime.abort(step, error)

        timer = asyncio.get_running_loop().call_later(order.timeout_s + _GRACE_S, late)
        self._drivers[step] = driver, timer
        try:
            self._runtime.start_step(
                step,
                end,
                ordered=order.ordered,
                ahead=order.ahead,
                trace=order.trace,
            )
        except JGError as error:
            end(error, StepTimes())
        failpoint("step.begun")

    def _report(
        self,
        driver: TaskName,
        step: StepKey,
        outcome: Outcome,
        times: StepTimes | None,
    ) -> None:
        done = pb.StepDone(handle=step[0], step_id=step[1])
        if isinstance(outcome, BaseException):
            done.status.CopyFrom(to_status(as_error(outcome, self._runtime.task)))
        tensors = () if times is None else (times.nodes,)

        def say() -> None:
            failpoint("step.done")
            self._messages.report(driver, done, tensors)

        self._gates.when_settled(step, say)

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Ends the parts of the steps that ``peer`` drives."""
        for step, (driver, _) in list(self._drivers.items()):
            if driver == peer:
                self._runtime.abort(step, error)
