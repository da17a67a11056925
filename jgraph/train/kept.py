"""Analysis of model state that a loss never changes, so that it is not written back."""

from typing import Any

import jax
import jax.numpy as jnp

from jgraph.train.adapters import Adapter
from jgraph.train.trees import Tree


def unchanged_state(
    adapter: Adapter, params: Tree, state: Tree, batch: Any
) -> list[bool]:
    """Returns, for each leaf of state, whether a loss gives it back unchanged.

    Args:
      adapter: has the loss.
      params: parameters, or their shapes and dtypes.
      state: likewise.
      batch: likewise.
    """
    same: list[bool] = []

    def follow(params: Tree, state: Tree, batch: Any, step: Any) -> None:
        _, (_, new) = adapter.loss(params, state, batch, (step, step))
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)
        same.extend(after is before for after, before in pairs)

    if jax.tree.leaves(state):
        number = jax.ShapeDtypeStruct((), jnp.int32)
        jax.eval_shape(follow, params, state, batch, number)
    return same
