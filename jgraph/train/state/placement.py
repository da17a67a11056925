"""Placement of a Trainer's steps on tasks, and names of containers."""

import secrets

from jgraph.client.cluster import Cluster
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan


def plan_on(cluster: Cluster, graph: Graph, driver: TaskName) -> Plan:
    """Returns what goes where; all that is not placed goes to the driver."""
    return plan(
        graph,
        tasks=cluster.tasks(),
        driver=driver,
        default=DeviceSpec.from_string(driver),
        platforms=cluster.platforms,
    )


def new_container() -> str:
    """Returns a container of its own: Trainers on one cluster share no variables."""
    return f"train-{secrets.token_hex(4)}"
