"""VGG-16 for pictures of 224 x 224: 138 million parameters, 553 MB.

Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", 2014, configuration D.
"""

import itertools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

__all__ = ["BATCH", "PICTURE", "Vgg16", "examples", "loss_fn"]

BATCH = 32
PICTURE = (224, 224, 3)
STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


class Vgg16(nnx.Module):
    """Thirteen convolutions in five stages, and three dense layers."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        inputs, stages = 3, []
        for width, count in STAGES:
            stage = []
            for _ in range(count):
                stage.append(nnx.Conv(inputs, width, (3, 3), rngs=rngs))
                inputs = width
            stages.append(nnx.List(stage))
        self.stages = nnx.List(stages)
        sizes = 7 * 7 * 512, 4096, 4096, 1000
        pairs = itertools.pairwise(sizes)
        self.dense = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in pairs])

    def __call__(self, x: jax.Array) -> jax.Array:
        for stage in self.stages:
            for conv in stage:
                x = nnx.relu(conv(x))
            x = nnx.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for layer in self.dense[:-1]:
            x = nnx.relu(layer(x))
        return self.dense[-1](x)


def examples(count: int = BATCH) -> tuple[np.ndarray[Any, Any], ...]:
    """Returns pictures and labels without content, for a plan."""
    return np.zeros((count, *PICTURE), np.float32), np.zeros(count, np.int32)


def loss_fn(model: Vgg16, batch: Any) -> jax.Array:
    pictures, labels = batch
    loss = optax.softmax_cross_entropy_with_integer_labels
    mean: jax.Array = loss(model(pictures), labels).mean()
    return mean
