"""A client that begins a detached run: ``… TARGET STRATEGY DIRECTORY WAIT_S``."""

import sys
from pathlib import Path
from typing import Any

import optax
from flax import nnx

from jgraph.client.cluster import Cluster, connect
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, data, nnx_loss


def make(
    cluster: Cluster | None, strategy: Strategy | None = None, **options: Any
) -> Trainer:
    model, tx = NnxMLP(rngs=nnx.Rngs(0)), optax.adam(1e-2)
    strategy = strategy or AsyncPS()
    return Trainer(model, nnx_loss, tx, cluster=cluster, strategy=strategy, **options)


def main(target: str, strategy: str, directory: str, wait_s: str) -> None:
    """Says so when there is a checkpoint, of more than the beginning."""

    def tell(run: Any, report: Any) -> None:
        if len(steps_in(Path(directory))) > 1:
            sys.stdout.write("saved\n")
            sys.stdout.flush()

    make(connect(target), {"AsyncPS": AsyncPS, "SyncPS": SyncPS}[strategy]()).fit(
        data(),
        steps=10**6,
        batch_size=8,
        callbacks=[tell],
        checkpoint=Checkpoints(directory, every=50),
        progress=False,
        detached=True,
        wait_s=float(wait_s),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
