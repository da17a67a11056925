"""ResNet-18 for 32 x 32 pictures: 11 million parameters, 45 MB.

Source: He et al., "Deep Residual Learning for Image Recognition", 2015, with the stem
for small pictures (one 3 x 3 convolution, no pooling).
"""

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.models import pictures
from benchmarks.models.pictures import loss_fn

__all__ = ["BATCH", "ResNet18", "loss_fn", "make_data", "make_model"]

BATCH = 16
WIDTHS = (64, 128, 256, 512)


class Block(nnx.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.conv1 = _conv(inputs, width, 3, stride, rngs)
        self.norm1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = _conv(width, width, 3, 1, rngs)
        self.norm2 = nnx.BatchNorm(width, rngs=rngs)
        fitting: list[Any] = [nnx.identity]
        if stride != 1 or inputs != width:
            norm = nnx.BatchNorm(width, rngs=rngs)
            fitting = [_conv(inputs, width, 1, stride, rngs), norm]
        self.shortcut = nnx.Sequential(*fitting)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nnx.Module):
    """Four stages of two blocks."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.stem = _conv(3, WIDTHS[0], 3, 1, rngs)
        self.norm = nnx.BatchNorm(WIDTHS[0], rngs=rngs)
        blocks, inputs = [], WIDTHS[0]
        for width in WIDTHS:
            stride = 1 if width == WIDTHS[0] else 2
            blocks.append(Block(inputs, width, stride, rngs=rngs))
            blocks.append(Block(width, width, 1, rngs=rngs))
            inputs = width
        self.blocks = nnx.List(blocks)
        self.dense = nnx.Linear(WIDTHS[-1], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.dense(x.mean(axis=(1, 2)))


def _conv(inputs: int, width: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(
        inputs, width, (size, size), strides=stride, use_bias=False, rngs=rngs
    )


def make_model() -> ResNet18:
    return ResNet18(rngs=nnx.Rngs(0))


def make_data(examples: int = 512, source: Path | None = None) -> tuple[Any, Any]:
    """Pictures float32[n, 32, 32, 3] and labels."""
    return pictures.make_data((32, 32, 3), examples, source)
