"""Inception-v3 on scanned digits, by synchronous SGD with backup workers.

The network is whole: 27,161,264 parameters for 1,000 classes, 23,834,568 without the
auxiliary classifier. What is trained here is a narrow one, on enlarged digits.

Sources: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision",
2015; Chen et al., "Revisiting Distributed Synchronous SGD", 2016.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.examples.demo import load_digits
from jgraph.examples.options import Figures, Options
from jgraph.train.strategies.options import SyncPS

SIZE: Final = 299
"""Pixels of a side, as published."""
LEAST_SIZE: Final = 75
BATCH_SIZE: Final = 32
LEARNING_RATE: Final = 0.1
SMOOTHING: Final = 0.1
AUXILIARY: Final = 0.4
"""Weight of the auxiliary classifier's loss."""

Layer: TypeAlias = tuple[int, int, int, int]
"""A convolution: its width, the rows and columns of its kernel, its stride."""
Branch: TypeAlias = Sequence[Layer]


@final
class Conv(nnx.Module):
    """A convolution without bias, batch normalization and ReLU.

    One with stride 2, or that is told so, takes whole windows only.
    """

    def __init__(
        self, inputs: int, layer: Layer, *, rngs: nnx.Rngs, whole: bool = False
    ) -> None:
        width, rows, columns, stride = layer
        self.conv = nnx.Conv(
            inputs,
            width,
            (rows, columns),
            (stride, stride),
            padding="VALID" if whole or stride > 1 else "SAME",
            use_bias=False,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(width, epsilon=0.001, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns float32[b, h, w, width] of float32[b, h, w, inputs]."""
        return nnx.relu(self.norm(self.conv(x)))


@final
class Block(nnx.Module):
    """Branches side by side, whose outputs are joined.

    Args:
      inputs: channels.
      branches: each some convolutions.
      pooled: width of the convolution after average pooling; 0: the maxima of windows
        with stride 2 in its place.
      ends: convolutions that each take what the last branches give, both of which are
        joined; of the blocks with the widest outputs.
      split: how many branches end so.
      rngs: for initial values.
    """

    def __init__(
        self,
        inputs: int,
        branches: Sequence[Branch],
        pooled: int = 0,
        ends: Branch = (),
        split: int = 0,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.branches = nnx.List([_chain(inputs, b, rngs) for b in branches])
        self.pooled = Conv(inputs, (pooled, 1, 1, 1), rngs=rngs) if pooled else None
        self.ends = nnx.List(
            [
                nnx.List([Conv(b[-1][0], end, rngs=rngs) for end in ends])
                for b in branches[len(branches) - split :]
            ]
        )
        whole = branches[: len(branches) - split]
        self.width = sum(b[-1][0] for b in whole) + (pooled or inputs)
        self.width += split * sum(width for width, *_ in ends)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns float32[b, h, w, width] of float32[b, h, w, inputs]."""
        found = [branch(x) for branch in self.branches]
        first = len(found) - len(self.ends)
        joined = found[:first]
        for ends, end in zip(self.ends, found[first:], strict=True):
            joined += [conv(end) for conv in ends]
        if self.pooled is None:
            joined.append(nnx.max_pool(x, (3, 3), (2, 2)))
        else:
            mean = nnx.avg_pool(
                x, (3, 3), (1, 1), padding="SAME", count_include_pad=True
            )
            joined.append(self.pooled(mean))
        return jnp.concatenate(joined, axis=-1)


@final
class Auxiliary(nnx.Module):
    """A classifier beside the middle of the network, for training alone."""

    def __init__(
        self, inputs: int, widths: tuple[int, int], classes: int, *, rngs: nnx.Rngs
    ) -> None:
        narrow, wide = widths
        self.narrow = Conv(inputs, (narrow, 1, 1, 1), rngs=rngs)
        self.wide = Conv(narrow, (wide, 5, 5, 1), rngs=rngs, whole=True)
        self.dense = nnx.Linear(wide, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits float32[b, classes] of float32[b, h, w, inputs]."""
        x = self.narrow(nnx.avg_pool(x, (5, 5), (3, 3)))
        return self.dense(self.wide(x).mean(axis=(1, 2)))


@final
class Inception(nnx.Module):
    """Inception-v3.

    Args:
      classes: how many.
      width: of all layers, times the published ones.
      auxiliary: with the auxiliary classifier, which needs 139 pixels or more.
      rngs: for initial values.
    """

    def __init__(
        self,
        classes: int = 1000,
        *,
        width: float = 1.0,
        auxiliary: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        def w(channels: int) -> int:
            return max(1, round(channels * width))

        def conv(inputs: int, layer: Layer, *, whole: bool = False) -> Conv:
            return Conv(inputs, layer, rngs=rngs, whole=whole)

        self.stem = nnx.List(
            [
                conv(3, (w(32), 3, 3, 2)),
                conv(w(32), (w(32), 3, 3, 1), whole=True),
                conv(w(32), (w(64), 3, 3, 1)),
                conv(w(64), (w(80), 1, 1, 1)),
                conv(w(80), (w(192), 3, 3, 1), whole=True),
            ]
        )
        blocks: list[Block] = []
        inputs = w(192)

        def add(*options: Any) -> None:
            nonlocal inputs
            blocks.append(Block(inputs, *options, rngs=rngs))
            inputs = blocks[-1].width

        for pooled in (32, 64, 64):
            add(_wide(w), w(pooled))
        add([[(w(384), 3, 3, 2)], [*_small(w, 64, 96), (w(96), 3, 3, 2)]])
        for narrow in (128, 160, 160, 192):
            add(_long(w, narrow), w(192))
        self.middle = len(blocks)
        widths = w(128), w(768)
        self.auxiliary = (
            Auxiliary(inputs, widths, classes, rngs=rngs) if auxiliary else None
        )
        add(
            [
                [(w(192), 1, 1, 1), (w(320), 3, 3, 2)],
                [
                    (w(192), 1, 1, 1),
                    (w(192), 1, 7, 1),
                    (w(192), 7, 1, 1),
                    (w(192), 3, 3, 2),
                ],
            ]
        )
        ends = [(w(384), 1, 3, 1), (w(384), 3, 1, 1)]
        for _ in range(2):
            fans = [[(w(384), 1, 1, 1)], _small(w, 448, 384)]
            add([[(w(320), 1, 1, 1)], *fans], w(192), ends, 2)
        self.blocks = nnx.List(blocks)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(inputs, classes, rngs=rngs)

    def both(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the logits, and those of the auxiliary classifier, float32[b, c].

        Args:
          x: pictures, float32[b, h, w, 3].
        """
        first, second, third, fourth, fifth = self.stem
        x = nnx.max_pool(third(second(first(x))), (3, 3), (2, 2))
        x = nnx.max_pool(fifth(fourth(x)), (3, 3), (2, 2))
        beside = None
        for number, block in enumerate(self.blocks):
            if number == self.middle and self.auxiliary is not None:
                beside = self.auxiliary(x)
            x = block(x)
        return self.dense(self.dropout(x.mean(axis=(1, 2)))), beside

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits float32[b, classes] of pictures float32[b, h, w, 3]."""
        return self.both(x)[0]


def _chain(inputs: int, branch: Branch, rngs: nnx.Rngs) -> nnx.Sequential:
    convs = []
    for layer in branch:
        convs.append(Conv(inputs, layer, rngs=rngs))
        inputs = layer[0]
    return nnx.Sequential(*convs)


def _small(w: Any, narrow: int, wide: int) -> list[Layer]:
    return [(w(narrow), 1, 1, 1), (w(wide), 3, 3, 1)]


def _wide(w: Any) -> list[Branch]:
    return [
        [(w(64), 1, 1, 1)],
        [(w(48), 1, 1, 1), (w(64), 5, 5, 1)],
        [*_small(w, 64, 96), (w(96), 3, 3, 1)],
    ]


def _long(w: Any, narrow: int) -> list[Branch]:
    n = w(narrow)
    return [
        [(w(192), 1, 1, 1)],
        [(n, 1, 1, 1), (n, 1, 7, 1), (w(192), 7, 1, 1)],
        [(n, 1, 1, 1), (n, 7, 1, 1), (n, 1, 7, 1), (n, 7, 1, 1), (w(192), 1, 7, 1)],
    ]


def loss_fn(model: Inception, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of smoothed labels, and the accuracy, of a batch."""
    logits, beside = model.both(batch["image"])
    wanted = jax.nn.one_hot(batch["label"], logits.shape[-1])
    wanted = optax.smooth_labels(wanted, SMOOTHING)
    loss = optax.softmax_cross_entropy(logits, wanted).mean()
    if beside is not None:
        loss += AUXILIARY * optax.softmax_cross_entropy(beside, wanted).mean()
    accuracy = jnp.mean(logits.argmax(axis=-1) == batch["label"])
    return loss, {"accuracy": accuracy}


def digits_loss(size: int) -> Any:
    """Returns the loss of digits that are enlarged to so many pixels."""

    def loss(model: Inception, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        images = 2 * batch["image"] - 1
        shape = (len(images), size, size, 1)
        large = jax.image.resize(images, shape, "bilinear")
        return loss_fn(model, {**batch, "image": jnp.repeat(large, 3, axis=-1)})

    return loss


def rmsprop(steps: int) -> optax.GradientTransformation:
    """Returns RMSProp as published, whose rate falls to nothing in so many steps."""
    rate = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    return optax.rmsprop(rate, decay=0.9, eps=1.0, momentum=0.9)


def run(
    cluster: Cluster | None,
    options: Options,
    *,
    width: float = 0.125,
    size: int = LEAST_SIZE,
    backup_workers: int = 0,
) -> Figures:
    """Trains a narrow network on scikit-learn's digits.

    Args:
      cluster: where to train; this process if unset.
      options: how long.
      width: of the layers, times the published ones.
      size: pixels of a side that the digits are enlarged to.
      backup_workers: workers that an update does not wait for.

    Returns:
      ``accuracy`` and ``loss`` on the test data, and how many ``parameters`` there are.

    Raises:
      ConfigError: too few pixels, or a width that is no number above 0.
    """
    if size < LEAST_SIZE:
        raise ConfigError(
            f"size is {size}; Inception-v3 halves a picture five times, so give "
            f"{LEAST_SIZE} or more"
        )
    if not 0 < width < float("inf"):
        raise ConfigError(f"width is {width}; give a number above 0, such as 0.25")
    train, test = load_digits(options.seed)
    model = Inception(10, width=width, auxiliary=False, rngs=nnx.Rngs(options.seed))
    trainer, _ = options.fit(
        cluster,
        model,
        digits_loss(size),
        rmsprop(options.steps),
        train,
        BATCH_SIZE,
        strategy=SyncPS(backup_workers=backup_workers),
    )
    return {
        **{name: round(value, 4) for name, value in trainer.evaluate(test).items()},
        "parameters": parameters(model),
    }


def parameters(model: nnx.Module) -> int:
    """Returns how many numbers are trained."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(leaf.size for leaf in leaves)
