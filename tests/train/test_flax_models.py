"""Models as Flax's tutorials and examples have them train as they are."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

from jgraph.train.trainer import Trainer

RNG = np.random.default_rng(0)
LABELS = np.arange(128) % 4
IMAGES = np.zeros((128, 12, 12, 1), np.float32)
for number, label in enumerate(LABELS):  # a bar in one of four places
    IMAGES[number, 3 * label : 3 * label + 3] = 1.0
IMAGES += RNG.normal(scale=0.1, size=IMAGES.shape).astype(np.float32)
PICTURES = {"image": IMAGES, "label": LABELS.astype(np.int32)}
WORDS = RNG.integers(0, 16, (128, 1)) + np.arange(9)
TEXT = (WORDS % 16).astype(np.int32)  # which word follows is certain


class Convolutional(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.025, rngs=rngs)
        self.second = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.last = nnx.Linear(144, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.pool(nnx.relu(self.norm(self.dropout(self.first(x)))))
        x = self.pool(nnx.relu(self.second(x)))
        return self.last(x.reshape(x.shape[0], -1))


class LinenConvolutional(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for features in (8, 16):
            x = nn.relu(nn.Conv(features, kernel_size=(3, 3))(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        return nn.Dense(4)(x.reshape((x.shape[0], -1)))


class Autoencoder(nn.Module):
    """A variational one: what it draws depends on a key that the loss gives."""

    latents: int = 4

    @nn.compact
    def __call__(self, x: Any, key: Any) -> Any:
        shape = x.shape
        x = nn.relu(nn.Dense(32)(x.reshape((shape[0], -1))))
        mean, logvar = nn.Dense(self.latents)(x), nn.Dense(self.latents)(x)
        drawn = mean + jnp.exp(logvar / 2) * jax.random.normal(key, logvar.shape)
        x = nn.Dense(144)(nn.relu(nn.Dense(32)(drawn)))
        return x.reshape(shape), mean, logvar


class Language(nn.Module):
    """A decoder of one block: embedding, position, masked attention, layer norm."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(16, 16)(ids)
        x += self.param("position", nn.initializers.normal(0.1), (ids.shape[1], 16))
        mask = nn.make_causal_mask(ids)
        x += nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
        x += nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(16)(nn.LayerNorm()(x))


class Recurrent(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        self.cells = nnx.RNN(nnx.GRUCell(16, 32, rngs=rngs))
        self.last = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.last(self.cells(self.embed(ids)))


def picture_loss(model: Any, batch: Any) -> Any:
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    ).mean()


def picture_loss_and_logits(model: Any, batch: Any) -> Any:
    """As the tutorials have it, for ``nnx.value_and_grad(…, has_aux=True)``."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


def linen_picture_loss(params: Any, batch: Any) -> Any:
    apply = lambda x: LinenConvolutional().apply({"params": params}, x)
    return picture_loss(apply, batch)


def autoencoder_loss(params: Any, batch: Any, rng: Any) -> Any:
    given: Any = Autoencoder().apply({"params": params}, batch["image"], rng)
    made, mean, logvar = given
    spread = -0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(-1).mean()
    return ((made - batch["image"]) ** 2).mean() + 1e-3 * spread


def next_word_loss(model: Any, ids: Any) -> Any:
    logits = model(ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def linen_next_word_loss(params: Any, ids: Any) -> Any:
    return next_word_loss(lambda x: Language().apply({"params": params}, x), ids)


def variables_of(model: nn.Module, *inputs: Any) -> Any:
    return model.init(jax.random.key(0), *inputs)


MODELS: dict[str, Any] = {
    "images, nnx": lambda: (
        *(Convolutional(rngs=nnx.Rngs(0)), picture_loss_and_logits, PICTURES),
    ),
    "images, linen": lambda: (
        *(LinenConvolutional(), linen_picture_loss, PICTURES),
        variables_of(LinenConvolutional(), IMAGES[:1]),
    ),
    "autoencoder, linen": lambda: (
        *(Autoencoder(), autoencoder_loss, PICTURES),
        variables_of(Autoencoder(), IMAGES[:1], jax.random.key(1)),
    ),
    "transformer, linen": lambda: (
        *(Language(), linen_next_word_loss, TEXT),
        variables_of(Language(), TEXT[:1, :-1]),
    ),
    "recurrent, nnx": lambda: (Recurrent(rngs=nnx.Rngs(0)), next_word_loss, TEXT),
}
OFTEN = ("images, nnx", "transformer, linen")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.nightly)
        for name in MODELS
    ],
)
def test_a_model_learns_as_it_is(name: str) -> None:
    model, loss, data, *variables = MODELS[name]()
    given = {"variables": variables[0]} if variables else {}
    trainer = Trainer(model, loss, optax.adamw(5e-3, b1=0.9), **given)
    run = trainer.fit(data, steps=60, batch_size=32, progress=False)
    losses = run.metrics("loss")["value"]
    assert losses[-5:].mean() < 0.6 * losses[:5].mean()
