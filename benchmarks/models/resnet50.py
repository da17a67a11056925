"""ResNet-50 for pictures of 224 x 224: 25.6 million parameters, 102 MB.

Source: He et al., "Deep Residual Learning for Image Recognition", 2015, with the stride
of a block in its 3 x 3 convolution, as most have it since.
"""

from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.models.pictures import loss_fn

__all__ = ["BATCH", "ResNet50", "examples", "loss_fn"]

BATCH = 64
PICTURE = (224, 224, 3)
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
WIDER = 4


class Bottleneck(nnx.Module):
    """Three convolutions, narrow but for the last, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs) -> None:
        outputs = WIDER * width
        self.narrow = _normed(inputs, width, 1, 1, rngs)
        self.middle = _normed(width, width, 3, stride, rngs)
        self.wide = _normed(width, outputs, 1, 1, rngs)
        fits = inputs == outputs and stride == 1
        self.shortcut = (
            nnx.identity if fits else _normed(inputs, outputs, 1, stride, rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.middle(nnx.relu(self.narrow(x))))
        return nnx.relu(self.wide(y) + self.shortcut(x))


class ResNet50(nnx.Module):
    """A stem, sixteen blocks in four stages, and a dense layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        inputs = STAGES[0][0]
        self.stem = _normed(PICTURE[-1], inputs, 7, 2, rngs)
        blocks = []
        for width, count in STAGES:
            for index in range(count):
                stride = 2 if index == 0 and width != STAGES[0][0] else 1
                blocks.append(Bottleneck(inputs, width, stride, rngs=rngs))
                inputs = WIDER * width
        self.blocks = nnx.List(blocks)
        self.dense = nnx.Linear(inputs, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.stem(x)), (3, 3), (2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.dense(x.mean(axis=(1, 2)))


def examples(count: int = BATCH) -> tuple[np.ndarray[Any, Any], ...]:
    """Returns pictures and labels without content, for a plan."""
    return np.zeros((count, *PICTURE), np.float32), np.zeros(count, np.int32)


def _normed(
    inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs
) -> nnx.Sequential:
    conv = nnx.Conv(
        inputs, outputs, (size, size), strides=stride, use_bias=False, rngs=rngs
    )
    return nnx.Sequential(conv, nnx.BatchNorm(outputs, rngs=rngs))
