"""Clients of federated runs, each with as many examples, of which a batch is of all."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.graph.ir import TaskName
from jgraph.train.data.source import Source
from jgraph.train.strategies.federated import Federated
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, cross_entropy, data

EXAMPLES = 8


def written(directory: Path, clients: int) -> Source:
    """Writes what each client has; returns it as a source."""
    directory.mkdir(exist_ok=True)
    for number, own in enumerate(_shares(clients)):
        np.savez(directory / f"{number}.npz", **own)
    return Source.npz(str(directory / "{task}.npz"))


def _shares(clients: int) -> Sequence[dict[str, Any]]:
    x, y = data()
    cuts = [slice(n * EXAMPLES, (n + 1) * EXAMPLES) for n in range(clients)]
    return [{"x": x[cut], "y": y[cut]} for cut in cuts]


def loss(model: Any, batch: Any) -> Any:
    return cross_entropy(model(batch["x"]), batch["y"])


def client_trainer(
    cluster: Cluster, strategy: Federated, tx: Any = None, **options: Any
) -> Trainer:
    """A trainer whose clients take plain steps of gradient descent, or those of tx."""
    model, tx = NnxMLP(rngs=nnx.Rngs(0)), tx or optax.sgd(0.1)
    return Trainer(model, loss, tx, cluster=cluster, strategy=strategy, **options)


def mean_of_clients(
    clients: int, rounds: Sequence[Collection[TaskName]], epochs: int = 1
) -> list[Any]:
    """What rounds of these members come to, in one process."""
    shares = _shares(clients)
    graph, params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))
    gradient = jax.jit(jax.grad(lambda p, own: loss(nnx.merge(graph, p), own)))
    for members in rounds:
        came = []
        for task in members:
            mine = params
            for _ in range(epochs):
                grads = gradient(mine, shares[int(task.rsplit(":", 1)[1])])
                mine = jax.tree.map(lambda p, g: p - 0.1 * g, mine, grads)
            came.append(mine)
        params = jax.tree.map(lambda *each: np.mean(np.stack(each), 0), *came)
    return [np.asarray(x) for x in jax.tree.leaves(nnx.to_pure_dict(params))]


class Tally(nnx.Module):
    """Of each client, how many of its contributions were applied."""

    def __init__(self, clients: int) -> None:
        self.counts = nnx.Param(jnp.zeros(clients))


def tallied(cluster: Cluster, strategy: Federated, clients: int) -> Trainer:
    """A trainer whose model is a tally, if a round is a step, and the mean is taken."""

    def loss(model: Tally, batch: Any) -> Any:
        return -(model.counts[...] * batch["who"].mean(0)).sum()

    tx, model = optax.sgd(1.0), Tally(clients)
    return Trainer(model, loss, tx, cluster=cluster, strategy=strategy)


def named(directory: Path, clients: int) -> Source:
    """Writes for each client examples that say who it is."""
    directory.mkdir(exist_ok=True)
    for number, row in enumerate(np.eye(clients, dtype=np.float32)):
        np.savez(directory / f"{number}.npz", who=np.stack([row] * EXAMPLES))
    return Source.npz(str(directory / "{task}.npz"))
