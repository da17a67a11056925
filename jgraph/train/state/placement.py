"""Placement of a Trainer's variables and steps on tasks, and names of containers."""

import secrets
from collections.abc import Mapping
from typing import final

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.plan.placement.spread import PlacementFunction, spread
from jgraph.plan.plan import Plan, plan


@final
class Placement:
    """Variables over the ps tasks of a cluster, by bytes or as a function says.

    Raises:
      ConfigError: the cluster has no ps or no worker.
    """

    def __init__(
        self,
        cluster: Cluster,
        placement: PlacementFunction | None = None,
        strategy: str = "AsyncPS",
    ) -> None:
        for job in ("ps", "worker"):
            if job not in cluster.spec.jobs:
                raise ConfigError(
                    f"{strategy} needs tasks of job '{job}'; the cluster has the jobs "
                    f"{', '.join(cluster.spec.jobs)}. Start one with "
                    "jg.LocalCluster(ps=1, workers=1)"
                )
        self._tasks = cluster.tasks("ps")
        self._placement = placement

    def place(self, sizes: Mapping[str, int]) -> dict[str, TaskName]:
        """Returns the task of each group, given its bytes."""
        return spread(sizes, self._tasks, self._placement)


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
