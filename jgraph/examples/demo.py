"""The demonstration: a small CNN on scanned digits, trained by a local cluster.

``python -m jgraph.examples.demo`` or ``jgraph demo``. The digits are those of
scikit-learn: 1,797 pictures of 8 x 8 pixels, inside that package.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from jgraph.clock import Clock, SystemClock
from jgraph.errors import ConfigError
from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.data.batches import Array
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.trainer import Trainer

_TEST_EXAMPLES = 360


class CNN(nnx.Module):
    """Two convolutions and two dense layers for 8 x 8 pictures."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(4 * 4 * 32, 64, rngs=rngs)
        self.dense2 = nnx.Linear(64, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits float32[b, 10] of pictures float32[b, 8, 8, 1]."""
        x = nnx.relu(self.conv1(x))
        x = nnx.relu(self.conv2(x))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        x = self.dropout(x.reshape(x.shape[0], -1))
        logits: jax.Array = self.dense2(self.dropout(nnx.relu(self.dense1(x))))
        return logits


def loss_fn(model: CNN, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean cross entropy, and the accuracy, of a batch."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    accuracy = jnp.mean(logits.argmax(axis=-1) == batch["label"])
    return losses.mean(), {"accuracy": accuracy}


def load_digits(seed: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns (training data, test data); the seed decides which is which.

    Fields: ``image`` float32[n, 8, 8, 1] in 0 … 1, ``label`` int32[n].

    Raises:
      ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise ConfigError(
            "the demonstration needs scikit-learn and matplotlib; "
            "pip install 'jgraph[demo]'"
        ) from None
    digits = datasets.load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    fields = {"image": images, "label": digits.target[order].astype(np.int32)}
    train = {name: array[_TEST_EXAMPLES:] for name, array in fields.items()}
    return train, {name: array[:_TEST_EXAMPLES] for name, array in fields.items()}


def main(
    *,
    ps: int = 2,
    workers: int = 2,
    steps: int = 800,
    seed: int = 0,
    output: str | Path = "demo-output",
    console: Console | None = None,
    clock: Clock | None = None,
) -> float:
    """Runs the demonstration and returns the accuracy on the test data, 0 to 1.

    Args:
      ps: parameter server processes.
      workers: worker processes.
      steps: updates of the model, all workers together.
      seed: decides the split, the model and the order of examples.
      output: directory for the checkpoint and the picture; earlier ones are replaced.
      console: where to write.
      clock: measures how long things take.
    """
    console = console or Console()
    now = (clock or SystemClock()).now
    say = functools.partial(console.print, highlight=False, soft_wrap=True)
    train, test = load_digits(seed)
    began = now()
    with LocalCluster(ps=ps, workers=workers) as cluster:
        say(f"{cluster}\nready after {now() - began:.1f} s\n")
        trainer = Trainer(
            CNN(rngs=nnx.Rngs(seed)),
            loss_fn,
            optax.adam(2e-3),
            cluster=cluster,
            strategy=AsyncPS(),
            seed=seed,
        )
        say(f"{trainer.plan(train, batch_size=64)}\n")
        run = trainer.fit(
            train, steps=steps, batch_size=64, eval_data=test, eval_every=200
        )
        accuracy = _keep(run, Path(output), say)
    say(f"all processes have ended; {now() - began:.1f} s in all")
    say(f"test accuracy: {accuracy:.4f}")
    return accuracy


def _keep(run: Run, output: Path, say: Callable[[str], None]) -> float:
    checkpoint = run.save(output / "checkpoint", overwrite=True)
    curves = run.curves(output / "curves.png")
    say(f"\ncheckpoint: {checkpoint}\ncurves:     {curves}")
    return float(run.metrics("eval_accuracy")["value"][-1])


if __name__ == "__main__":
    main()
