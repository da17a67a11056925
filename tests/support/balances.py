"""What ``jg.auto`` gives for tasks of speeds that are made up."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jgraph.client.placement.auto import AutoPlacement
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.auto import AutoPlanner
from jgraph.plan.auto.cost_model import Link
from tests.support.costs import model, speed

NO_TIME = Link(0.0, math.inf)


def of_speeds(
    speeds: Sequence[float],
    *,
    link: Link = NO_TIME,
    limits: Mapping[TaskName, int] | None = None,
) -> AutoPlacement:
    """Returns a placement on as many workers, by their operations per second."""
    tasks = tuple(TaskName(f"/job:worker/task:{n}") for n in range(len(speeds)))
    made = {t: speed(t, s) for t, s in zip(tasks, speeds, strict=True)}
    costs = replace(model(tasks, link), tasks=made)
    return AutoPlacement(AutoPlanner(costs, tasks, limits or {}))
