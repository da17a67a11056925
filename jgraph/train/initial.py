"""Initial state of a training run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.train.adapters import Make
from jgraph.train.optimizer import CalledOptimizer
from jgraph.train.trees import Tree


def new_state(params: Tree, opt: Tree, state: Tree) -> Tree:
    """Returns the state of a run that begins."""
    step = jnp.zeros((), jnp.int32)
    return {"params": params, "opt": opt, "state": state, "global_step": step}


def made_state(make: Make, tx: CalledOptimizer) -> Tree:
    """Returns the state of a run, made by a function."""
    params, state = make()
    return new_state(params, tx.init(params), state)


def on_its_task(made: Callable[[], Tree] | None, number: int, value: Any) -> Any:
    """Returns a value, or its type and the function that makes it alone."""
    if made is None or not isinstance(value, jax.ShapeDtypeStruct):
        return value
    return value.shape, value.dtype, lambda *_: jax.tree.leaves(made())[number]
