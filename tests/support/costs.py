"""Cost models with round numbers."""

import math
from collections.abc import Sequence

from jgraph.graph.ir import TaskName
from jgraph.plan.auto.cost_model import CostModel, Link, TaskSpeed

FAST = Link(1e-6, 1e12)
SLOW = Link(1.0, 1e6)


def speed(host: str = "host", flops_per_s: float = 1e9) -> TaskSpeed:
    return TaskSpeed(
        host,
        flops_per_s=flops_per_s,
        elements_per_s=math.inf,
        slow_per_s=math.inf,
        bytes_per_s=math.inf,
        kernel_s=0.0,
        segment_s=0.0,
    )


def model(
    tasks: Sequence[TaskName],
    link: Link = FAST,
    *,
    crowding: float | None = None,
) -> CostModel:
    """Returns a model of tasks on hosts of their own, or all on one that is crowded."""
    one = crowding is not None
    return CostModel(
        {t: speed("host" if one else f"host of {t}") for t in tasks},
        {(a, b): link for a in tasks for b in tasks if a != b},
        Link(0.0, math.inf),
        {} if crowding is None else {"host": crowding},
    )
