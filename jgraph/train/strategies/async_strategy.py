"""AsyncPS: the options of asynchronous parameter-server training."""

from dataclasses import dataclass
from typing import final

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.graph.sharding import Partitioner
from jgraph.plan.placement.spread import PlacementFunction
from jgraph.train.arguments import is_count
from jgraph.train.state.placement import Placement
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.compress import GradientDtype, check_gradient_dtype
from jgraph.train.strategies.durability import Durability, check_durability
from jgraph.view import markup


@final
@dataclass(frozen=True, slots=True)
class AsyncPS:
    """Train on a cluster's workers against its parameter servers, asynchronously.

    Variables are spread over the ``ps`` tasks by bytes; an update runs where its
    variables are. A worker's gradient may be of a version that others have updated
    meanwhile. The master deals out the data as workers ask for it, so a slow one gets
    less; what a lost worker held goes to the others.

    Args:
      step_timeout_s: limit for one step of a worker.
      gradient_dtype: ``"bfloat16"`` or ``"int8"`` (a scale per array): gradients travel
        as that, and a worker adds what rounding took away to its next one. It then
        holds float32 left-overs of the size of these parameters, zeros at the start of
        a ``fit``. Gradients of rows travel as they are, without left-overs.
      max_staleness: an update is made from parameters to which at most that many
        others were applied meanwhile, on any ps; a worker that would run ahead waits.
        0 makes workers take turns. None: a gradient may be as old as it is. See
        ``Run.staleness``.
      durability: what a run is left with when a ps is lost. ``"checkpoint"``: what
        ``fit(checkpoint=…)`` saved last. The others: everything that a worker was
        told is applied. ``"replica"``: each ps has a copy on the next one, which makes
        the same updates in the same order. ``"log"``: each ps writes what it updates
        to a disk, below ``JGRAPH_RECORDS_DIR`` of its environment. A step is done when
        it is kept there too.
      variable_partitioner: cuts parameters into shards, for example
        ``jg.fixed_size_partitioner(2)``; the optimizer's state is cut alike.
      partition_strategy: which rows a shard has: ``"div"`` (consecutive ones) or
        ``"mod"`` (every n-th).
      placement: chooses the ps of each parameter or shard: ``jg.RoundRobin()``,
        ``jg.GreedyLoadBalancing()``, or a function of (bytes by name, tasks); by
        bytes, largest first, if unset.

    Raises:
      ConfigError: an option outside what is possible.

    Example:
      >>> AsyncPS(max_staleness=8).max_staleness
      8
    """

    step_timeout_s: float = 60.0
    max_staleness: int | None = None
    variable_partitioner: Partitioner | None = None
    partition_strategy: str = "div"
    placement: PlacementFunction | None = None
    gradient_dtype: GradientDtype | None = None
    durability: Durability = "checkpoint"

    def __post_init__(self) -> None:
        check_gradient_dtype(self.gradient_dtype)
        check_durability(self.durability)
        bound = self.max_staleness
        if bound is not None and not is_count(bound, 0):
            raise ConfigError(
                f"max_staleness is {bound!r}; give a whole number, 0 or more, or None "
                "for no bound"
            )
        if not self.step_timeout_s > 0:
            raise ConfigError(
                f"step_timeout_s is {self.step_timeout_s}; it must be over 0 seconds"
            )

    def arrangement(self, cluster: Cluster) -> Arrangement:
        """Returns how variables are cut and placed on a cluster.

        Raises:
          ConfigError: the cluster has no ps or no worker.
        """
        return Arrangement(
            Placement(cluster, self.placement),
            self.variable_partitioner,
            self.partition_strategy,
            tuple(cluster.tasks("ps")),
        )

    def _repr_html_(self) -> str:
        return markup.data(self)
