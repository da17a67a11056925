"""Layers for pipelines and towers: dense ones of one kind, and modules over ids."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

WORKERS, BATCH, STEPS = 2, 8, 5


def layer(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"] + params["b"])


def squares(y: Any, t: Any) -> Any:
    return ((y - t) ** 2).mean()


def params_of(stages: int, width: int = 4) -> list[dict[str, Any]]:
    keys = jax.random.split(jax.random.key(1), stages)
    normal = [jax.random.normal(key, (width, width)) for key in keys]
    return [{"w": w, "b": jnp.ones(width)} for w in normal]


class Embed(nn.Module):
    width: int

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        return {"h": nn.Embed(10, self.width)(ids), "ids": ids}


class Head(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(10)(x["h"]), x["ids"]


def next_token(outputs: Any, t: Any) -> Any:
    logits, ids = outputs
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, t + 0 * ids)
    return losses.mean()


def batches(count: int, width: int = 4) -> Any:
    values = np.random.default_rng(0).normal(size=(count, 2, BATCH, width))
    return values.astype(np.float32)
