"""Choice of a training strategy, and the runner made for it."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from jgraph.client.cluster import Cluster
from jgraph.clock import Clock
from jgraph.errors import ConfigError
from jgraph.plan.placement.spread import spread
from jgraph.train.state.runner import Runner
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.compress import GradientDtype
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.async_runner import AsyncPS, AsyncRunner
from jgraph.train.strategies.local import Local, LocalRunner
from jgraph.train.strategies.owners import owners_of
from jgraph.train.strategies.sync_runner import SyncPS, SyncRunner

Strategy: TypeAlias = Local | AsyncPS | SyncPS


def choose_strategy(strategy: Strategy | None, cluster: Cluster | None) -> Strategy:
    """Returns the strategy to train with.

    Args:
      strategy: what the user asked for; None: what fits the cluster.
      cluster: where to train; None: this process.

    Raises:
      ConfigError: no strategy, or one that needs another cluster.

    Example:
      >>> choose_strategy(None, None)
      Local()
    """
    if strategy is None:
        return Local() if cluster is None else AsyncPS()
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy is {strategy!r}; there are jg.AsyncPS(), jg.SyncPS() and "
            "jg.Local()"
        )
    if not isinstance(strategy, Local) and cluster is None:
        raise ConfigError(
            f"{type(strategy).__name__} needs a cluster; give Trainer(…, "
            "cluster=jg.LocalCluster(ps=1, workers=2))"
        )
    if isinstance(strategy, Local) and cluster is not None:
        raise ConfigError(
            "Local trains in this process and would not use the cluster; leave out "
            "cluster=, or use strategy=jg.AsyncPS()"
        )
    return strategy


def arrangement_on(
    cluster: Cluster | None,
    strategy: Strategy,
    tables: Callable[[], frozenset[str]] = frozenset,
) -> Arrangement | None:
    """Returns how variables are cut and placed; None: they stay in this process.

    Args:
      cluster: where they live.
      strategy: how it trains.
      tables: finds the parameters of which rows travel, if that matters.

    Raises:
      ConfigError: the cluster has no ps or no worker.
    """
    if cluster is None or isinstance(strategy, Local):
        return None
    owns = isinstance(strategy, SyncPS) and strategy.dense != "ps"
    for job in ("worker",) if owns else ("ps", "worker"):
        if job not in cluster.spec.jobs:
            raise ConfigError(
                f"{type(strategy).__name__} needs tasks of job '{job}'; the cluster "
                f"has the jobs {', '.join(cluster.spec.jobs)}. Start one with "
                "jg.LocalCluster(ps=1, workers=1)"
            )
    ps = cluster.tasks("ps")
    return Arrangement(
        partial(spread, tasks=ps, placement=strategy.placement),
        strategy.variable_partitioner,
        strategy.partition_strategy,
        tuple(ps),
        owners_of(cluster, strategy, tables) if isinstance(strategy, SyncPS) else None,
    )


def gradient_dtype_of(strategy: Strategy) -> GradientDtype | None:
    """Returns in what dtype gradients travel; None: in their own."""
    return None if isinstance(strategy, Local) else strategy.gradient_dtype


def make_runner(
    step: TrainStep, cluster: Cluster | None, strategy: Strategy, clock: Clock
) -> Runner:
    """Returns what performs the steps of a strategy.

    Raises:
      ConfigError: the cluster has too few workers for it.
    """
    if cluster is None or isinstance(strategy, Local):
        return LocalRunner(step, clock)
    if isinstance(strategy, SyncPS):
        return SyncRunner(step, cluster, strategy)
    return AsyncRunner(step, cluster, strategy)


def batches_per_update(cluster: Cluster | None, strategy: Strategy) -> int:
    """Returns how many batches one update of the model is made of."""
    if cluster is None or not isinstance(strategy, SyncPS):
        return 1
    return strategy.contributions(len(cluster.tasks("worker")))


def replica_names(cluster: Cluster | None, strategy: Strategy) -> list[str]:
    """Returns whom the replicas of a run stand for; nobody else in this process."""
    if cluster is None or isinstance(strategy, Local):
        return []
    return list(cluster.tasks("worker"))
