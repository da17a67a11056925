"""Federated digits: ten clients with two digits each, by FedAvg and with DiLoCo.

Each client has half of the images of two digits, so a model of any one of them is
useless. Both ways take the same steps; with an outer momentum the skew costs less.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", 2017, whose pathological partition this is; Douillard et al.,
"DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.examples.options import Figures, Options
from jgraph.runtime.data.batches import Array
from jgraph.train.data.source import Source
from jgraph.train.run.run import Run
from jgraph.train.strategies.federated import Federated
from jgraph.train.trainer import Trainer

CLIENTS = 10
BATCH_SIZE = 16
LOCAL_EPOCHS = 2
LEARNING_RATE = 1e-3
WIDTH = 64

WAYS = {
    "fedavg": None,
    "diloco": optax.sgd(0.7, momentum=0.9, nesterov=True),
}
"""The outer optimizer of each way."""


class Network(nnx.Module):
    """Classifies images of 8 x 8 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Returns logits float32[b, 10] of images float32[b, 64]."""
        return self.out(nnx.relu(self.hidden(x)))


def loss_fn(model: Network, batch: Any) -> Any:
    """Returns the mean cross entropy, and the accuracy."""
    logits, labels = model(batch["x"]), batch["y"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": (logits.argmax(1) == labels).mean()}


def split_by_label(labels: Array) -> list[Array]:
    """Returns the examples of each client: half of those of two digits.

    Args:
      labels: int[n], from 0 to 9.

    Example:
      >>> clients = split_by_label(np.arange(10).repeat(4))
      >>> clients[0].tolist(), clients[9].tolist()
      ([0, 1, 6, 7], [2, 3, 36, 37])
    """
    halves = [np.array_split(np.flatnonzero(labels == n), 2) for n in range(CLIENTS)]
    ends = [(halves[n][0], halves[(n + 1) % CLIENTS][1]) for n in range(CLIENTS)]
    return [np.sort(np.concatenate(pair)) for pair in ends]


def run(cluster: Cluster | None, options: Options) -> Figures:
    """Trains by each way for as many rounds as there are steps.

    Args:
      cluster: with ten workers.
      options: how long.

    Returns:
      Of each way the loss and the accuracy on a fifth of the images, and of both the
      steps of a client in a round.

    Raises:
      ConfigError: the cluster has other than ten workers.
    """
    from sklearn.datasets import load_digits

    workers = 0 if cluster is None else len(cluster.tasks("worker"))
    if workers != CLIENTS:
        raise ConfigError(
            f"each of the {CLIENTS} clients is a worker, and there are {workers}; give "
            f"--workers {CLIENTS}"
        )
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(options.seed).permutation(len(labels))
    x, y = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    test, train = slice(0, len(y) // 5), slice(len(y) // 5, None)
    figures: Figures = {"clients": CLIENTS, "rounds": options.steps}
    with tempfile.TemporaryDirectory(prefix="jgraph-clients-") as own:
        for client, examples in enumerate(split_by_label(y[train])):
            arrays = {"x": x[train][examples], "y": y[train][examples]}
            np.savez(Path(own) / f"{client}.npz", **arrays)
        source = Source.npz(f"{own}/{{task}}.npz")
        for way, outer in WAYS.items():
            trainer, done = _train(cluster, source, outer, options)
            found = trainer.evaluate({"x": x[test], "y": y[test]})
            steps = float(done.metrics("local_steps")["value"].mean())
            figures[f"{way}_accuracy"] = round(found["accuracy"], 4)
            figures[f"{way}_loss"] = round(found["loss"], 4)
            figures["local_steps"] = round(steps, 1)
            options.say(
                f"{way}: accuracy {found['accuracy']:.3f}, loss {found['loss']:.3f} "
                f"after {len(done.rounds())} rounds of {steps:.0f} steps of a client\n"
            )
            trainer.close()
    return figures


def _train(
    cluster: Cluster | None, source: Source, outer: Any, options: Options
) -> tuple[Trainer, Run]:
    strategy = Federated(
        local_epochs=LOCAL_EPOCHS,
        min_clients=CLIENTS,
        outer=outer,
        inner_state="keep",
    )
    trainer = Trainer(
        Network(nnx.Rngs(options.seed)),
        loss_fn,
        optax.adamw(LEARNING_RATE),
        cluster=cluster,
        strategy=strategy,
        seed=options.seed,
    )
    options.say(f"{trainer.plan(source, batch_size=BATCH_SIZE)}\n")
    done = trainer.fit(
        source, steps=options.steps, batch_size=BATCH_SIZE, progress=options.progress
    )
    return trainer, done
