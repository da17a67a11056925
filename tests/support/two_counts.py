"""A model of two parameters, each on its ps, that count updates."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.trainer import Trainer

X = np.zeros((600, 1), np.float32)


class Counts(nnx.Module):
    """Two parameters that count updates; each is on a ps of its own."""

    def __init__(self) -> None:
        self.first = nnx.Param(jnp.zeros(4))
        self.second = nnx.Param(jnp.zeros(4))


def one_more(model: Any, batch: Any) -> Any:
    return -(model.first[...].sum() + model.second[...].sum()) + 0.0 * batch.sum()


def counting(cluster: Cluster | None, strategy: Strategy | None = None) -> Trainer:
    strategy = strategy or Local()
    tx = optax.sgd(1.0)
    return Trainer(Counts(), one_more, tx, cluster=cluster, strategy=strategy)
