"""Balanced cut of a chain of layers into stages, for tasks of unequal speeds.

The stage that takes longest sets the pace of a pipeline, so the cut makes that one as
short as it can be, among those that the limits of memory allow. What a stage sends
counts as part of its time: under 1F1B a task has as many microbatches under way as
there are stages from it to the end, so the time in which it sees one of them again is,
divided by their number, the mean of these stages with what they send.

Sources: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN
Training", 2019, section 3.1 (dynamic programming over the layers); Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training", 2021 (activations under 1F1B).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import add
from typing import TypeAlias, final

from jgraph.errors import MemoryLimitError
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.cost_model import CostModel
from jgraph.plan.auto.search import over_text
from jgraph.plan.auto.work import Work
from jgraph.view import markup
from jgraph.view.units import bytes_text, count_text, flops_text, ms_text

Bounds: TypeAlias = tuple[int, ...]
"""Stage ``s`` has the layers from ``bounds[s]`` on, before ``bounds[s + 1]``."""

Price: TypeAlias = Callable[[int, int, int], float]
"""Of (stage, its first layer, the layer after its last); infinite: it cannot be."""

_SAME = 1 + 1e-9


def least_bounds(layers: int, stages: int, price: Price) -> Bounds | None:
    """Returns the cut whose dearest stage is cheapest; None if there is none.

    Of several, the one whose prices have the least sum of squares: what the dearest
    stage leaves open is as even as it can be. Exact, by dynamic programming; asks for
    at most ``stages * layers ** 2 / 2`` prices.

    Args:
      layers: how many there are.
      stages: how many are wanted, each of one layer or more.
      price: of a stage.

    Example:
      >>> least_bounds(6, 2, lambda stage, first, end: (end - first) * (1 + stage))
      (0, 4, 6)
    """
    rows: list[dict[tuple[int, int], float]] = [{} for _ in range(stages)]
    for stage, row in enumerate(rows):
        remaining = stages - stage - 1
        for first in range(stage, layers - remaining if stage else 1):
            for end in range(first + 1, layers - remaining + 1):
                if (remaining or end == layers) and math.isfinite(
                    found := price(stage, first, end)
                ):
                    row[first, end] = found
    worst = _least(layers, rows, max)
    if worst is None:
        return None
    allowed = worst[0] * _SAME
    even = [{k: p * p for k, p in row.items() if p <= allowed} for row in rows]
    return (_least(layers, even, add) or worst)[1]


def _least(
    layers: int,
    rows: Sequence[Mapping[tuple[int, int], float]],
    join: Callable[[float, float], float],
) -> tuple[float, Bounds] | None:
    """Returns the least joined price of stages that have all layers, and their cut."""
    reached: dict[int, tuple[float, Bounds]] = {0: (0.0, (0,))}
    for row in rows:
        further: dict[int, tuple[float, Bounds]] = {}
        for (first, end), price in row.items():
            if first in reached:
                value, bounds = reached[first]
                joined = join(value, price)
                if end not in further or joined < further[end][0]:
                    further[end] = joined, (*bounds, end)
        reached = further
    return reached.get(layers)


@final
@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a layer asks for; bytes of values are those of one microbatch.

    Attributes:
      work: of its forward and its backward pass on a microbatch.
      output_nbytes: that it gives to the next layer.
      returned_nbytes: of the gradients that come back for them.
      stored_nbytes: of its parameters, and of the optimizer's state for them.
      gradient_nbytes: of the gradients of its parameters.
      held_nbytes: that it keeps between its passes, beside what it gives.
      held_output_nbytes: of what it gives that it keeps, too.
      extra_nbytes: the most bytes of other values while one of its passes runs.
    """

    work: Work
    output_nbytes: int = 0
    returned_nbytes: int = 0
    stored_nbytes: int = 0
    gradient_nbytes: int = 0
    held_nbytes: int = 0
    held_output_nbytes: int = 0
    extra_nbytes: int = 0


@final
@dataclass(frozen=True, slots=True)
class StageCost:
    """A stage of a balanced pipeline, and what it is predicted to take.

    Attributes:
      task: where it runs.
      first: number of its first layer.
      end: number of the layer after its last.
      flops: of its passes on a microbatch: products and convolutions.
      flops_per_s: of the task, measured.
      computing_s: of its passes on a microbatch.
      sending_s: until the next stage has its outputs, and it has their gradients.
      nbytes: of its variables and gradients, and the most of other values at a time.
      limit: bytes that the task may use; None for any.
    """

    task: TaskName
    first: int
    end: int
    flops: float
    flops_per_s: float
    computing_s: float
    sending_s: float
    nbytes: int
    limit: int | None = None

    @property
    def seconds(self) -> float:
        """What it takes for a microbatch."""
        return self.computing_s + self.sending_s

    def __str__(self) -> str:
        few = self.end - self.first == 1
        layers = f"layer {self.first}" if few else f"layers {self.first}-{self.end - 1}"
        limit = "" if self.limit is None else f" of {bytes_text(self.limit)}"
        work = f"{flops_text(self.flops)} at {flops_text(self.flops_per_s)}/s"
        return (
            f"{self.task}: {layers}, {work}, computes {ms_text(self.computing_s)}, "
            f"sends {ms_text(self.sending_s)}, {bytes_text(self.nbytes)}{limit}"
        )


@final
@dataclass(frozen=True, slots=True)
class Balance:
    """Which layers of a pipeline are on which task, and why; prints as a table.

    Times are those of a microbatch, forward and back.

    Attributes:
      stages: in order; with replicas those of the first one.
      even_s: what the slowest stage would take if each had as many layers.
      others: the same stages on the tasks of each other replica.
    """

    stages: tuple[StageCost, ...]
    even_s: float
    others: tuple[tuple[StageCost, ...], ...] = ()

    @property
    def bounds(self) -> Bounds:
        """The first layer of each stage, and the number of layers."""
        return (*(stage.first for stage in self.stages), self.stages[-1].end)

    @property
    def slowest_s(self) -> float:
        """What the slowest stage takes."""
        rows = self.stages, *self.others
        return max(stage.seconds for row in rows for stage in row)

    @property
    def layers_text(self) -> str:
        """The layers of each stage, in a few words."""
        return ", ".join(str(stage.end - stage.first) for stage in self.stages)

    def __str__(self) -> str:
        rows = self.stages, *self.others
        many = f"{len(rows)} times " if self.others else ""
        title = (
            f"{count_text(self.stages[-1].end, 'layer')} on {many}"
            f"{count_text(len(self.stages), 'task')}: the slowest stage takes "
            f"{ms_text(self.slowest_s)} for a microbatch, and {ms_text(self.even_s)} "
            "if all had as many layers"
        )
        lines = (f"  {stage}" for row in rows for stage in row)
        return "\n".join([title, *lines])

    def __repr__(self) -> str:
        return f"<Balance of {self.layers_text} layers; print it to see why>"

    def _repr_html_(self) -> str:
        return markup.lines(str(self))


@final
@dataclass(slots=True)
class Chain:
    """A chain of layers, and the tasks that its stages are for.

    Args:
      layers: in order.
      tasks: of each stage.
      most_held: of how many microbatches each stage keeps values at a time.
      model: of the tasks and the links between them.
      limits: bytes that tasks may use; those not named may use any.
      waiting: bytes of a batch that the first task has before it takes them.
      beside: tasks of other replicas, which compute at the same time.
    """

    layers: Sequence[LayerCost]
    tasks: Sequence[TaskName]
    most_held: Sequence[int]
    model: CostModel
    limits: Mapping[TaskName, int]
    waiting: int = 0
    beside: Sequence[TaskName] = ()
    _seconds: list[list[float]] = field(default_factory=list)
    _sums: list[list[int]] = field(default_factory=list)
    _extra: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("stored_nbytes", "gradient_nbytes", "held_nbytes"):
            sizes = (getattr(layer, name) for layer in self.layers)
            self._sums.append([0, *accumulate(sizes)])
        hosts = [self.model.tasks[task].host for task in (*self.tasks, *self.beside)]
        for task in self.tasks:
            speed = self.model.tasks[task]
            # Once the pipeline is full, all of its tasks compute.
            times = self.model.slowdown(speed.host, hosts.count(speed.host))
            each = (times * speed.seconds(layer.work) for layer in self.layers)
            self._seconds.append([0.0, *accumulate(each)])
        extra = [layer.extra_nbytes for layer in self.layers]
        self._extra = [[*accumulate(extra[n:], max)] for n in range(len(extra))]

    def balance(self, others: Sequence["Chain"] = ()) -> Balance:
        """Returns the best cut.

        Args:
          others: the same layers on the tasks of each other replica. A step ends with
            its slowest stage, of whichever replica that is, and all have one cut.

        Raises:
          MemoryLimitError: none keeps the limits; names the bytes and the limits.
        """
        count, stages = len(self.layers), len(self.tasks)
        chains = self, *others

        def slowest(*part: int) -> float:
            return max(chain.price(*part) for chain in chains)

        def largest(*part: int) -> float:
            return max(chain.excess(*part) for chain in chains)

        bounds = least_bounds(count, stages, slowest)
        if bounds is None:
            raise _too_large(chains, least_bounds(count, stages, largest) or ())
        even = [stage * count // stages for stage in range(stages + 1)]
        first, *rest = (tuple(chain.stages(bounds)) for chain in chains)
        return Balance(
            first,
            max(stage.seconds for chain in chains for stage in chain.stages(even)),
            tuple(rest),
        )

    def stages(self, bounds: Sequence[int]) -> list[StageCost]:
        """Returns the stages of a cut."""
        return [self._stage(n, *part) for n, part in enumerate(pairwise(bounds))]

    def _stage(self, stage: int, first: int, end: int) -> StageCost:
        task = self.tasks[stage]
        return StageCost(
            task,
            first,
            end,
            flops=sum(layer.work.flops for layer in self.layers[first:end]),
            flops_per_s=self.model.tasks[task].flops_per_s,
            computing_s=self._computing_s(stage, first, end),
            sending_s=self._sending_s(stage, end),
            nbytes=self._nbytes(stage, first, end),
            limit=self.limits.get(task),
        )

    def price(self, stage: int, first: int, end: int) -> float:
        """Returns what a stage takes; infinite: beyond the limit of its task."""
        if self.excess(stage, first, end):
            return math.inf
        return self._computing_s(stage, first, end) + self._sending_s(stage, end)

    def _computing_s(self, stage: int, first: int, end: int) -> float:
        passed = self._seconds[stage]
        segments = 2 * self.model.tasks[self.tasks[stage]].segment_s
        return segments + passed[end] - passed[first]

    def _sending_s(self, stage: int, end: int) -> float:
        if stage == len(self.tasks) - 1:
            return 0.0
        here, there = self.tasks[stage : stage + 2]
        last = self.layers[end - 1]
        ahead = self.model.link(here, there).seconds(last.output_nbytes)
        return ahead + self.model.link(there, here).seconds(last.returned_nbytes)

    def excess(self, stage: int, first: int, end: int) -> int:
        """Returns the bytes beyond the limit of the task."""
        limit = self.limits.get(self.tasks[stage])
        if limit is None:
            return 0
        return max(0, self._nbytes(stage, first, end) - limit)

    def _nbytes(self, stage: int, first: int, end: int) -> int:
        stored, gradients, held = (sums[end] - sums[first] for sums in self._sums)
        values = self.most_held[stage] * (
            held + self.layers[end - 1].held_output_nbytes
        )
        values += self._extra[first][end - first - 1]
        return stored + gradients + values + (0 if stage else self.waiting)


def _too_large(chains: Sequence[Chain], bounds: Bounds) -> MemoryLimitError:
    stages = [stage for chain in chains for stage in chain.stages(bounds)]
    over = [s for s in stages if s.limit is not None and s.nbytes > s.limit]
    used = {stage.task: stage.nbytes for stage in over}
    first = chains[0]
    return MemoryLimitError(
        f"{count_text(len(first.layers), 'layer')} do not fit "
        f"{count_text(len(first.tasks), 'task')}: in the best cut found "
        f"{over_text(first.limits, used)}, for variables, gradients, and what "
        "is kept of microbatches; give jg.auto a larger memory_limit, or more "
        "tasks, or more microbatches",
        memory=[f"{stage.task} {stage.nbytes}" for stage in over],
        limits=[f"{stage.task} {stage.limit}" for stage in over],
    )
