"""A pipeline's step, traced pass by pass in the order of its schedule."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from jgraph.graph.device import device
from jgraph.plan.schedule import Pass, Schedule, simulate
from jgraph.train.pipeline.stage_passes import Leaves, StagePasses


@final
@dataclass(slots=True)
class PipelineGraph:
    """The values between the passes of one step, while it is traced.

    The order of tracing is the order of running on each task
    (``jgraph.graph.tracing.alone``), so going through the schedule is all that is
    needed to follow it.

    Attributes:
      schedule: who runs what.
      devices: of each stage.
      passes: of each stage.
      params: leaves of each stage's parameters.
      losses: of each microbatch.
      sums: of each stage, of its parameters' gradients.
      input_gradients: of each microbatch, of what the first stage takes.
    """

    schedule: Schedule
    devices: Sequence[str]
    passes: Sequence[StagePasses]
    params: Sequence[Leaves]
    losses: dict[int, Any] = field(default_factory=dict)
    sums: dict[int, Leaves] = field(default_factory=dict)
    input_gradients: dict[int, Leaves] = field(default_factory=dict)
    _inputs: dict[Pass, Leaves] = field(default_factory=dict)
    _kept: dict[Pass, Leaves] = field(default_factory=dict)
    _gradients: dict[Pass, Leaves] = field(default_factory=dict)
    _targets: Sequence[Leaves] = ()

    def run(self, inputs: Sequence[Leaves], targets: Sequence[Leaves]) -> None:
        """Traces all passes.

        Args:
          inputs: of each microbatch, what the first stage takes.
          targets: of each microbatch, what the last stage takes besides.
        """
        self._inputs = {Pass(0, k): leaves for k, leaves in enumerate(inputs)}
        self._targets = targets
        together = self._together()
        for work in simulate(self.schedule).begins:
            with device(self.devices[work.stage]):
                if work in together:
                    self._both(work)
                elif not work.backward:
                    self._forward(work)
                elif Pass(work.stage, work.microbatch) not in together:
                    self._backward(work)

    def _together(self) -> set[Pass]:
        """Returns forward passes of the last stage that their backward passes follow.

        Nothing comes in between, so both are one segment and keep nothing.
        """
        last = len(self.passes) - 1
        row = self.schedule.rows[self.schedule.row_of(last)]
        return {
            work
            for work, then in itertools.pairwise(row)
            if work.stage == last and then == Pass(last, work.microbatch, True)
        }

    def _taken(self, work: Pass) -> Leaves:
        found = self._inputs[Pass(work.stage, work.microbatch)]
        if work.stage == len(self.passes) - 1:
            return [*found, *self._targets[work.microbatch]]
        return found

    def _forward(self, work: Pass) -> None:
        outputs, self._kept[work] = self.passes[work.stage].forward(
            self.params[work.stage], self._taken(work), str(work)
        )
        self._give(work, outputs)

    def _give(self, work: Pass, outputs: Leaves) -> None:
        if work.stage == len(self.passes) - 1:
            (self.losses[work.microbatch],) = outputs
        else:
            self._inputs[Pass(work.stage + 1, work.microbatch)] = outputs

    def _backward(self, work: Pass) -> None:
        sums, gradients = self.passes[work.stage].backward(
            self.params[work.stage],
            self._taken(work),
            self._kept.pop(Pass(work.stage, work.microbatch)),
            self._gradients.pop(work, []),
            self.sums.get(work.stage, []),
            str(work),
        )
        self._pass_back(work, sums, gradients)

    def _both(self, work: Pass) -> None:
        sums = self.sums.get(work.stage, [])
        outputs, *found = self.passes[work.stage].both(
            self.params[work.stage], self._taken(work), sums, f"{work} and back"
        )
        self._give(work, outputs)
        self._pass_back(work, *found)

    def _pass_back(self, work: Pass, sums: Leaves, gradients: Leaves) -> None:
        self.sums[work.stage] = sums
        if work.stage:
            self._gradients[Pass(work.stage - 1, work.microbatch, True)] = gradients
        else:
            self.input_gradients[work.microbatch] = gradients
