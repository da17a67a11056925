"""Placement of a Trainer's steps on tasks, and names of containers."""

import secrets
from collections.abc import Sequence

from jgraph.client.cluster import Cluster
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan


def plan_on(
    cluster: Cluster,
    graph: Graph,
    driver: TaskName,
    own: str | None = None,
    ps: Sequence[TaskName] = (),
) -> Plan:
    """Returns what goes where; all that is not placed goes to the driver.

    Args:
      cluster: where.
      graph: what.
      driver: the task where feeds enter and fetches leave.
      own: how the names begin of variables that are the driver's, whatever their
        device says; None: no name does.
      ps: that there are, though they need not be there yet.
    """
    tasks = cluster.tasks()
    return plan(
        graph,
        tasks=[*tasks, *(task for task in ps if task not in tasks)],
        driver=driver,
        default=DeviceSpec.from_string(driver),
        platforms=cluster.platforms,
        variable_tasks={
            v.key: driver
            for v in graph.variables
            if own is not None and v.name.startswith(own)
        },
    )


def new_container() -> str:
    """Returns a container of its own: Trainers on one cluster share no variables."""
    return f"train-{secrets.token_hex(4)}"
