"""A model with one table of rows, and data of which workers share some rows."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

ROWS, DIM = 3000, 4
TABLE = "params/table/embedding"
rng = np.random.default_rng(0)
# Workers meet at some rows, and have others for themselves; some come twice.
data = {
    "ids": rng.integers(ROWS - 60, ROWS, (64, 3)).astype(np.int32),
    "y": rng.normal(size=64).astype(np.float32),
}


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rows: int = ROWS) -> None:
        self.table = nnx.Embed(rows, DIM, rngs=rngs)
        self.last = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.last(jnp.tanh(self.table(ids)).mean(1))[:, 0]


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2)
