"""Prediction of step time and memory by task, before anything is compiled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from jgraph import _compat
from jgraph._compat import Literal, Var
from jgraph.graph.cost import peak_nbytes
from jgraph.graph.ir import TaskName
from jgraph.plan.analysis.flow import Flow, Op
from jgraph.plan.auto.cost_model import CostModel
from jgraph.plan.auto.timing import Job, Jobs, Timing, timing_of
from jgraph.plan.auto.work import work_of
from jgraph.plan.partition.segments import Segmentation, SegmentGroup
from jgraph.plan.placement.spread import nbytes_of

_WITHOUT_CODE_S = 0.3
"""What a node without code costs, as part of what a segment costs by itself."""


@final
@dataclass(frozen=True, slots=True)
class Predicted:
    """What a step of a cut graph is predicted to take.

    Attributes:
      timing: when its jobs run.
      jobs: what runs, in the order of the cut.
      memory: bytes by task: variables, and the most of other values at a time.
    """

    timing: Timing
    jobs: Jobs
    memory: Mapping[TaskName, int]

    @property
    def seconds(self) -> float:
        """Time of a step, for its client."""
        return self.timing.seconds


def predict(
    cut: Segmentation,
    driver: TaskName,
    variable_tasks: Sequence[TaskName],
    model: CostModel,
) -> Predicted:
    """Returns what a step of a cut graph takes.

    Args:
      cut: from ``jgraph.plan.partition.segments``.
      driver: where feeds enter and fetches leave.
      variable_tasks: one per variable of the graph.
      model: of tasks and links.
    """
    jobs = jobs_of(cut, driver, model)
    timing = timing_of(jobs, model)
    memory = dict.fromkeys([*variable_tasks, *timing.peaks], 0)
    for spec, task in zip(cut.flow.graph.variables, variable_tasks, strict=True):
        memory[task] += nbytes_of(spec)
    for task, nbytes in timing.peaks.items():
        memory[task] += nbytes
    return Predicted(timing, jobs, memory)


def jobs_of(cut: Segmentation, driver: TaskName, model: CostModel) -> Jobs:
    """Returns the clusters of a cut graph as jobs."""
    flow = cut.flow
    fetched = [a for a in flow.fetches if not isinstance(a, Literal)]
    numbers: dict[Var, int] = {}
    for var in [*cut.users, *fetched]:
        if var in flow.feeds or var in flow.producer:
            numbers.setdefault(var, len(numbers))
    takes: list[list[int]] = [[] for _ in cut.clusters]
    for var, users in cut.users.items():
        for user in users if var in numbers else ():
            takes[user].append(numbers[var])
    jobs: list[Job] = []
    last: dict[TaskName, int] = {}
    for position, cluster in enumerate(cut.clusters):
        results = [
            v for i in sorted(cluster.roots) for v in flow.ops[i].equation.outvars
        ]
        leaving = [v for v in results if v in numbers]
        after: tuple[int, ...] = ()
        if cluster.kind == "alone":
            after = (last[cluster.task],) if cluster.task in last else ()
            last[cluster.task] = position
        jobs.append(
            Job(
                task=cluster.task,
                seconds=_seconds(flow, cluster, leaving, model),
                takes=tuple(takes[position]),
                makes=tuple(numbers[v] for v in leaving),
                nbytes=_nbytes(flow, cluster),
                after=after,
            )
        )
    return Jobs(
        jobs=tuple(jobs),
        nbytes={n: flow.type_of(v).nbytes for v, n in numbers.items()},
        feeds=tuple(n for v, n in numbers.items() if v in flow.feeds),
        fetches=tuple(numbers[v] for v in dict.fromkeys(fetched) if v in numbers),
        driver=driver,
    )


def _seconds(
    flow: Flow, cluster: SegmentGroup, leaving: Sequence[Var], model: CostModel
) -> float:
    speed = model.tasks[cluster.task]
    if cluster.kind not in {"segment", "alone"}:
        return _WITHOUT_CODE_S * speed.segment_s
    ops = [flow.ops[i] for i in cluster.ops]
    needed = [*leaving, *_written(ops)]
    return speed.segment_s + speed.seconds(work_of([op.equation for op in ops], needed))


def _nbytes(flow: Flow, cluster: SegmentGroup) -> int:
    """Returns the memory of a cluster; stored values are updated where they are."""
    if cluster.kind not in {"segment", "alone"}:
        return 0
    ops = [flow.ops[i] for i in cluster.ops]
    if cluster.kind == "alone":
        return max(
            peak_nbytes(_compat.open_jaxpr(body).eqns)
            for op in ops
            for _, body in _compat.inner_jaxprs(op.equation)
        )
    stored = {op.equation.outvars[0] for op in ops if op.is_whole_read}
    stored.update(_written(ops))
    return peak_nbytes([op.equation for op in ops], stored=stored)


def _written(ops: Sequence[Op]) -> list[Var]:
    values = [op.equation.invars[1] for op in ops if op.is_whole_write]
    return [v for v in values if not isinstance(v, Literal)]
