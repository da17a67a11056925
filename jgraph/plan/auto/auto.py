"""Automatic placement: assigns operations to tasks so that a step takes least time.

A graph is taken apart into blocks; a search over tasks for them gives a few candidates;
each of these, and everything on one task, is placed and cut as any graph is, and run on
paper. The best one wins. Several tasks must be predicted to be faster by more than the
prediction may be wrong; else all goes on one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, final

from jgraph.errors import MemoryLimitError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName, VariableKey
from jgraph.plan.analysis.affinity import companions
from jgraph.plan.analysis.flow import Flow
from jgraph.plan.auto.blocks import Blocks, blocks_of
from jgraph.plan.auto.cost_model import CostModel
from jgraph.plan.auto.predict import Predicted, predict
from jgraph.plan.auto.search import Assignment, Search, nbytes_over, over_text
from jgraph.plan.partition.segments import cut
from jgraph.plan.placement.colocate import colocated_with, with_resolved_stamps
from jgraph.plan.placement.place import place, stamped_tasks, state_groups
from jgraph.plan.placement.tasks import Tasks, asked_tasks, assign_variables
from jgraph.view.units import bytes_text, ms_text

GAIN: Final = 0.9
"""Several tasks are used if they take at most this part of the time of one."""
_CANDIDATES, _MOST_TRIED = 2, 12


@final
@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step is predicted to take.

    Attributes:
      seconds: from a client's call to its result.
      alone: the same with everything that is free on one task, by task, for the best.
      memory: bytes by task: variables, and the most of other values at a time.
      by_task: seconds that each task computes.
    """

    seconds: float
    alone: Mapping[TaskName, float]
    memory: Mapping[TaskName, int]
    by_task: Mapping[TaskName, float]

    def __str__(self) -> str:
        tasks = [
            f"{task} computes {ms_text(self.by_task.get(task, 0.0))} with "
            f"{bytes_text(nbytes)}"
            for task, nbytes in sorted(self.memory.items())
            if nbytes or task in self.by_task
        ]
        alone = [f"all on {t}: {ms_text(s)}" for t, s in self.alone.items()]
        text = "; ".join([f"predicted {ms_text(self.seconds)} per step", *alone])
        return "\n".join([text, *(f"  {line}" for line in tasks)])


@final
@dataclass(frozen=True, slots=True)
class Arrangement:
    """A graph with a task for all that the search placed, and what it will take."""

    graph: Graph
    variable_tasks: Mapping[VariableKey, TaskName]
    prediction: Prediction


@final
@dataclass(frozen=True, slots=True)
class AutoPlanner:
    """Places graphs by a cost model.

    Attributes:
      model: of all tasks of the cluster.
      tasks: where operations and variables go that nobody has placed.
      limits: bytes that tasks may use; those not named may use any.
    """

    model: CostModel
    tasks: tuple[TaskName, ...]
    limits: Mapping[TaskName, int] = field(default_factory=dict)

    def arrange(
        self,
        flow: Flow,
        where: Tasks,
        variable_tasks: Mapping[VariableKey, TaskName],
    ) -> Arrangement:
        """Returns where everything goes.

        Args:
          flow: the graph, analyzed.
          where: the tasks of the cluster.
          variable_tasks: tasks of variables that have one.

        Raises:
          MemoryLimitError: nothing keeps the limits; names the bytes and the limits.
        """
        self.model.check(where.names)
        return _Arranging(self, flow, where, variable_tasks).best()


@final
@dataclass(frozen=True, slots=True)
class _Tried:
    """A placement, and what it will take."""

    assignment: Assignment
    graph: Graph
    chosen: Mapping[VariableKey, TaskName]
    predicted: Predicted
    excess: int

    @property
    def price(self) -> tuple[int, float]:
        return self.excess, self.predicted.seconds


@final
@dataclass(slots=True)
class _Arranging:
    """One graph being placed."""

    planner: AutoPlanner
    flow: Flow
    where: Tasks
    variable_tasks: Mapping[VariableKey, TaskName]

    def best(self) -> Arrangement:
        planner, specs = self.planner, self.flow.graph.variables
        beside = self._beside()
        stamped = {
            op.index: found
            for op in self.flow.ops.values()
            if op.index not in beside
            and (found := stamped_tasks(self.flow, self.where, op))
        }
        homes = [
            asked_tasks(v, self.where, self.variable_tasks)
            if v.key in self.variable_tasks or colocated_with(v.device, specs) is None
            else ()
            for v in specs
        ]
        blocks = blocks_of(self.flow, planner.tasks, stamped, homes, beside)
        search = Search(
            blocks, planner.tasks, self.where.driver, planner.model, planner.limits
        )
        one = alone = self._tried(blocks, search.alone()[0])
        near = search.near_fixed()
        if near != alone.assignment:
            # Its parts are on several tasks already: one task is no safer choice.
            one = min(alone, self._tried(blocks, near), key=lambda t: t.price)
        several: list[_Tried] = []
        for assignment in search.found(_MOST_TRIED):
            several.append(self._tried(blocks, assignment))
            if len(several) >= _CANDIDATES and not min(t.excess for t in several):
                break
        best = min(several, key=lambda plan: plan.price, default=one)
        if best.price >= (one.excess, GAIN * one.predicted.seconds):
            best = one
        if best.excess:
            raise self._too_large(best.predicted.memory)
        options = zip(alone.assignment, blocks.options, strict=True)
        free = [task for task, open_to in options if len(open_to) > 1]
        prediction = Prediction(
            seconds=best.predicted.seconds,
            alone={free[0]: alone.predicted.seconds}
            if free and not alone.excess
            else {},
            memory=best.predicted.memory,
            by_task=_computing(best.predicted),
        )
        return Arrangement(best.graph, best.chosen, prediction)

    def _beside(self) -> dict[int, int]:
        """Returns the variable of the graph that ops are to be beside."""
        stamps, specs = self.flow.graph.stamps, self.flow.graph.variables
        found = {i: colocated_with(stamps[i], specs) for i in self.flow.ops}
        return {i: other for i, other in found.items() if other is not None}

    def _tried(self, blocks: Blocks, assignment: Assignment) -> _Tried:
        graph = self.flow.graph
        stamps = list(graph.stamps)
        for block in blocks.blocks:
            task = DeviceSpec.from_string(assignment[block.group])
            for index in block.ops if block.is_placed else ():
                stamps[index] = stamps[index].merge(task)
        chosen = dict(self.variable_tasks)
        for spec, group in zip(graph.variables, blocks.variables, strict=True):
            chosen.setdefault(spec.key, assignment[group])
        graph = replace(graph, stamps=tuple(stamps))
        flow = replace(self.flow, graph=graph)
        homes = assign_variables(
            graph.variables,
            self.where,
            chosen,
            together=state_groups(flow),
            near=companions(flow),
        )
        known = {v.key: t for v, t in zip(graph.variables, homes, strict=True)}
        placeable = with_resolved_stamps(graph, {**chosen, **known})
        flow = replace(self.flow, graph=placeable)
        driver = self.where.driver
        clusters = cut(flow, place(flow, self.where, homes), driver, buckets=False)
        predicted = predict(clusters, driver, homes, self.planner.model)
        excess = nbytes_over(self.planner.limits, predicted.memory)
        return _Tried(assignment, graph, chosen, predicted, excess)

    def _too_large(self, memory: Mapping[TaskName, int]) -> MemoryLimitError:
        limits = self.planner.limits
        over = over_text(limits, dict(sorted(memory.items())))
        return MemoryLimitError(
            f"'{self.flow.graph.name}' does not fit: in the best arrangement found "
            f"{over}, for variables and the most of other values at a time; "
            "give jg.auto a larger memory_limit, or more tasks, or a smaller batch",
            memory=[f"{task} {nbytes}" for task, nbytes in sorted(memory.items())],
            limits=[f"{task} {nbytes}" for task, nbytes in sorted(limits.items())],
        )


def _computing(predicted: Predicted) -> dict[TaskName, float]:
    """Returns the seconds that each task computes."""
    found: dict[TaskName, float] = {}
    for job in predicted.jobs.jobs:
        found[job.task] = found.get(job.task, 0.0) + job.seconds
    return found
