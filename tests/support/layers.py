"""Layers of one kind, for pipelines and towers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WORKERS, BATCH, STEPS = 2, 8, 5


def layer(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"] + params["b"])


def squares(y: Any, t: Any) -> Any:
    return ((y - t) ** 2).mean()


def params_of(stages: int, width: int = 4) -> list[dict[str, Any]]:
    keys = jax.random.split(jax.random.key(1), stages)
    normal = [jax.random.normal(key, (width, width)) for key in keys]
    return [{"w": w, "b": jnp.ones(width)} for w in normal]


def batches(count: int, width: int = 4) -> Any:
    values = np.random.default_rng(0).normal(size=(count, 2, BATCH, width))
    return values.astype(np.float32)
