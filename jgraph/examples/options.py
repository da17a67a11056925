"""Options of every example, and the lines that each prints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from jgraph.client.cluster import Cluster
from jgraph.plan.sharding.partitioner import min_max_variable_partitioner
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.options import SyncPS
from jgraph.train.tables.row_step import Sparse
from jgraph.train.trainer import Trainer

Figures: TypeAlias = dict[str, float]
"""The final figures of an example, by name."""


@final
@dataclass(frozen=True, slots=True)
class Options:
    """How long and how loudly to train.

    Attributes:
      steps: updates of the model, all workers together.
      seed: decides initial values and the order of examples.
      progress: show a live line.
      say: takes text for people.
    """

    steps: int
    seed: int = 0
    progress: bool = False
    say: Callable[[str], None] = lambda _: None

    def fit(
        self,
        cluster: Cluster | None,
        model: Any,
        loss: Any,
        tx: Any,
        data: Any,
        batch_size: int,
        *,
        sparse: Sparse = "auto",
        strategy: SyncPS | None = None,
    ) -> tuple[Trainer, Run]:
        """Trains on a cluster, or here if unset; returns the Trainer and its run.

        Training is asynchronous unless a strategy says otherwise, and large parameters
        are sharded over all ps.

        Args:
          cluster: where to train.
          model: as for ``Trainer``.
          loss: as for ``Trainer``.
          tx: as for ``Trainer``.
          data: as for ``Trainer.fit``.
          batch_size: examples per step.
          sparse: as for ``Trainer``.
          strategy: on a cluster, in place of ``AsyncPS``.
        """
        trainer = Trainer(
            model,
            loss,
            tx,
            cluster=cluster,
            strategy=None if cluster is None else strategy or _strategy(cluster),
            seed=self.seed,
            sparse=sparse,
        )
        self.say(f"{trainer.plan(data, batch_size=batch_size)}\n")
        run = trainer.fit(
            data, steps=self.steps, batch_size=batch_size, progress=self.progress
        )
        return trainer, run


def _strategy(cluster: Cluster) -> AsyncPS:
    shards = len(cluster.tasks("ps"))
    return AsyncPS(variable_partitioner=min_max_variable_partitioner(shards))


Example: TypeAlias = Callable[[Cluster | None, Options], Figures]
"""Trains somewhere, for as long as told, and returns the final figures."""
