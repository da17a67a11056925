"""Choice of a training strategy, and the runner made for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from jgraph.client.cluster import Cluster
from jgraph.clock import Clock
from jgraph.errors import ConfigError, DataError
from jgraph.plan.placement.spread import spread
from jgraph.runtime.data.batches import check_batch_size
from jgraph.train.data.clients import open_clients
from jgraph.train.data.data import Data, Dataset
from jgraph.train.data.forms import BATCH_SIZE
from jgraph.train.data.source import Source, as_source_or_dataset
from jgraph.train.privacy.options import Privacy
from jgraph.train.privacy.private_update import PrivateUpdate
from jgraph.train.state.runner import Runner
from jgraph.train.step.arrange import Arrangement, ElasticPs
from jgraph.train.step.compress import GradientDtype
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.async_runner import AsyncPS, AsyncRunner
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.federated import Federated
from jgraph.train.strategies.local import Local, LocalRunner
from jgraph.train.strategies.local_sgd import LocalSGD
from jgraph.train.strategies.owners import Tables, choose_owners, owned_by
from jgraph.train.strategies.sync_runner import SyncPS, SyncRunner
from jgraph.view.units import count_text

Strategy: TypeAlias = Local | AsyncPS | SyncPS | LocalSGD | Federated


def choose_strategy(strategy: Strategy | None, cluster: Cluster | None) -> Strategy:
    """Returns the strategy to train with.

    Args:
      strategy: what the user asked for; None: what fits the cluster.
      cluster: where to train; None: this process.

    Raises:
      ConfigError: no strategy, or one that needs another cluster.

    Example:
      >>> choose_strategy(None, None)
      Local(privacy=None)
    """
    if strategy is None:
        return Local() if cluster is None else AsyncPS()
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy is {strategy!r}; there are jg.AsyncPS(), jg.SyncPS(), "
            "jg.LocalSGD(), jg.Federated() and jg.Local()"
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
    tables: Callable[[], Tables] = lambda: (frozenset(), 0),
    known: Sequence[str] | None = None,
) -> Arrangement | None:
    """Returns how variables are cut and placed; None: they stay in this process.

    Args:
      cluster: where they live.
      strategy: how it trains.
      tables: see ``choose_owners``.
      known: of a run that another client began: the tables that its owners do not hold.

    Raises:
      ConfigError: the cluster has no ps or no worker.
    """
    if cluster is None or isinstance(strategy, Local):
        return None
    together = together_of(strategy)
    without_ps = together is not None and together.dense != "ps"
    for job in ("worker",) if without_ps else ("ps", "worker"):
        if job not in cluster.spec.jobs:
            raise ConfigError(
                f"{type(strategy).__name__} needs tasks of job '{job}'; the cluster "
                f"has the jobs {', '.join(cluster.spec.jobs)}. Start one with "
                "jg.LocalCluster(ps=1, workers=1)"
            )
    ps, owners, why = cluster.tasks("ps"), None, ""
    if (elastic := elastic_of(strategy)) is not None and elastic.ps is not None:
        elastic.check_ps_count(len(ps))
        all_ps = ElasticPs(*elastic.ps, elastic.vshards_per_ps)
        partitioner = strategy.variable_partitioner
        return Arrangement(None, partitioner, elastic=all_ps).on(len(ps))
    if together is not None:
        owners, why = (
            choose_owners(cluster, together, tables)
            if known is None
            else (owned_by(cluster, together, frozenset(known)), "")
        )
    return Arrangement(
        partial(spread, tasks=ps, placement=strategy.placement),
        strategy.variable_partitioner,
        strategy.partition_strategy,
        tuple(ps),
        owners,
        why,
    )


def elastic_of(strategy: Strategy) -> Elastic | None:
    """Returns how many tasks a run may have; None: those that it begins with."""
    return None if isinstance(strategy, Local) else strategy.elastic


def together_of(strategy: Strategy) -> SyncPS | None:
    """Returns how workers contribute to an update together; None: they do not."""
    if isinstance(strategy, LocalSGD | Federated):
        return None if strategy.apart is not None else strategy.rounds
    return strategy if isinstance(strategy, SyncPS) else None


def examples_of(strategy: Strategy, dataset: Dataset, request: int | None) -> int:
    """Returns the examples that a worker's contribution is made of.

    Args:
      strategy: how it trains.
      dataset: what on.
      request: examples of a batch as the user said; None: nothing was said.

    Raises:
      DataError: the data comes in batches of another size.
      ConfigError: it comes in batches at all, and a round takes several.
    """
    if isinstance(strategy, Federated):
        return 1  # a round
    size = dataset.batch_size(request)
    if not isinstance(strategy, LocalSGD):
        return size
    if dataset.fed is not None:
        raise ConfigError(
            "LocalSGD deals out the batches of a round together, and this data comes "
            "as it is read; give arrays, or a jg.Source that the workers read"
        )
    return size * strategy.sync_every // strategy.fragments


def check_round(strategy: Strategy, dataset: Dataset, request: int | None) -> None:
    """Refuses rounds of ``LocalSGD`` that take more than there is.

    Args:
      strategy: how it trains.
      dataset: what on.
      request: as for ``examples_of``.

    Raises:
      DataError: not even one worker has the examples for one; says what to write.
    """
    if not isinstance(strategy, LocalSGD):
        return
    size, count = dataset.batch_size(request), len(dataset)
    check_batch_size(size, count)
    steps, most = strategy.sync_every // strategy.fragments, count // size
    if steps > most:
        raise DataError(
            f"with LocalSGD(sync_every={strategy.sync_every}) a worker takes {steps} "
            f"batches of {size} from one exchange to the next, and the data has "
            f"{count_text(count, 'example')}, which are {most}; write "
            f"sync_every={most * strategy.fragments} or less, or a smaller batch_size",
            batch_size=size,
            examples=count,
        )


def gradient_dtype_of(strategy: Strategy) -> GradientDtype | None:
    """Returns in what dtype gradients travel; None: in their own."""
    return None if isinstance(strategy, Local) else strategy.gradient_dtype


def privacy_of(strategy: Strategy) -> Privacy | None:
    """Returns how a strategy trains privately; None: it does not."""
    return None if isinstance(strategy, AsyncPS) else strategy.privacy


def private_update_of(
    strategy: Strategy, cluster: Cluster | None
) -> PrivateUpdate | None:
    """Returns what a strategy does to gradients before an update; None: nothing."""
    if (privacy := privacy_of(strategy)) is None:
        return None
    if privacy.unit != "client":
        return PrivateUpdate(privacy)
    clients = batches_per_update(cluster, strategy)
    if isinstance(strategy, Federated):
        clients = strategy.invitations(0, clients).drawn(clients)
    return PrivateUpdate(privacy, clients)


def dealt(strategy: Strategy, cluster: Cluster | None, dataset: Dataset) -> Dataset:
    """Returns data as a strategy deals it out: cut into batches, or drawn.

    Raises:
      ConfigError: it would be drawn, and comes as it is read.
    """
    privacy = privacy_of(strategy)
    if privacy is None or privacy.unit != "example":
        return dataset
    if dataset.fed is not None:
        raise ConfigError(
            "privacy= draws each batch from all examples, and this data comes as it is "
            "read: no accountant knows what that hides; give arrays, or a jg.Source"
        )
    return replace(dataset, samplers=batches_per_update(cluster, strategy))


def rate_of(dataset: Dataset, batch_size: int) -> float:
    """Returns the probability of a unit to have a part in an update."""
    return dataset.plan(batch_size, 0).rate if dataset.samplers else 1.0


def open_data(
    data: Data | Source,
    cluster: Cluster | None,
    strategy: Strategy,
    *,
    batch_size: int | None,
    seed: int,
    finite: bool = False,
    known: Dataset | None = None,
) -> Dataset:
    """Opens what is to be trained on, where the strategy has it.

    Args:
      data: what the user gave.
      cluster: where to train; None: this process.
      strategy: how.
      batch_size: examples of a batch, if the user said so.
      seed: decides the order of a client's examples.
      finite: refuse NaN and infinity.
      known: data that was used before; an iterator goes on where it is.

    Raises:
      ConfigError: it cannot be trained on so.
      DataError: data that cannot be used.
      SourceError: it cannot be opened.
    """
    if isinstance(strategy, Federated) and cluster is not None:
        clients = len(cluster.tasks("worker"))
        members = strategy.invitations(seed, clients).drawn(clients)
        return open_clients(
            *(data, cluster),
            epochs=strategy.local_epochs,
            batch_size=batch_size or BATCH_SIZE,
            seed=seed,
            each=members if strategy.apart is None else 1,
        )
    return as_source_or_dataset(
        data, cluster, finite=finite, batch_size=batch_size, known=known
    )


def make_runner(
    step: TrainStep,
    cluster: Cluster | None,
    strategy: Strategy,
    clock: Clock,
    seed: int = 0,
) -> Runner:
    """Returns what performs the steps of a strategy.

    Raises:
      ConfigError: the cluster has too few workers for it.
    """
    if cluster is None or isinstance(strategy, Local):
        return LocalRunner(step, clock)
    if (together := together_of(strategy)) is not None:
        pace_s = strategy.sync_every_s if isinstance(strategy, LocalSGD) else None
        rule = secure = None
        if isinstance(strategy, Federated):
            rule = strategy.invitations(seed, len(cluster.tasks("worker")))
            secure = strategy.secure_sum
        return SyncRunner(step, cluster, together, pace_s or 0.0, rule, secure)
    alone = strategy.apart if isinstance(strategy, LocalSGD) else strategy
    if isinstance(strategy, Federated):
        alone = strategy.apart_among(len(cluster.tasks("worker")))
    assert isinstance(alone, AsyncPS)  # the others are in step
    return AsyncRunner(step, cluster, alone)


def batches_per_update(cluster: Cluster | None, strategy: Strategy) -> int:
    """Returns how many batches one update of the model is made of."""
    together = together_of(strategy)
    if cluster is None or together is None:
        return 1
    return together.contributions(len(cluster.tasks("worker")))


def replica_names(cluster: Cluster | None, strategy: Strategy) -> list[str]:
    """Returns whom the replicas of a run stand for; nobody else in this process."""
    if cluster is None or isinstance(strategy, Local):
        return []
    return list(cluster.tasks("worker"))
