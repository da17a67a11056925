"""Aliases of optax, and a step of one as a Trainer traces it."""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.train.model.optimizer import CalledOptimizer

# What an optimizer needs beside its learning rate.
OPTIONS: dict[str, dict[str, Any]] = {
    "adafactor": {"min_dim_size_to_factor": 3},
    "lbfgs": {"linesearch": None, "memory_size": 2},
    "noisy_sgd": {"key": 0},
    "galore": {"rank": 2},
    "sam": {"adv_optimizer": optax.sgd(0.01), "reset_state": False},
}

BY_DAY = {"sgd", "adam", "adamw", "adagrad", "rmsprop", "lion", "lamb", "adafactor"}
"""Optimizers whose updates are of every kind; the others are tried nightly."""


def aliases() -> list[str]:
    """Names of the functions of optax that make an optimizer."""
    import optax._src.alias as made

    return sorted(
        name
        for name, fn in inspect.getmembers(made, inspect.isfunction)
        if fn.__module__ == made.__name__ and hasattr(optax, name)
    )


def alias(name: str, module: Any = optax) -> optax.GradientTransformation:
    """Returns the optimizer of that name."""
    make = getattr(module, name)
    options = dict(OPTIONS.get(name, {}))
    wanted = {
        "learning_rate": 0.1,
        "base_optimizer": optax.adam(0.1),
        "optimizer": optax.adam(0.1),
    }
    for parameter in inspect.signature(make).parameters.values():
        if parameter.default is parameter.empty and parameter.name in wanted:
            options[parameter.name] = wanted[parameter.name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # still an alias
        return make(**options)


def optimizer_step(
    tx: optax.GradientTransformation,
    variables: Sequence[Variable],
    tree: Any,
    worker: TaskName,
) -> Any:
    """Returns a step on ``{"params": …, "opt": …}``, whose gradients are a worker's.

    Args:
      tx: the optimizer.
      variables: one for each leaf of the tree.
      tree: its structure.
      worker: where the loss is computed.
    """
    called = CalledOptimizer(tx)

    def loss(params: Any, x: Any) -> Any:
        return sum(jnp.sum(jnp.tanh(p * x) ** 2) for p in params.values())

    def step(x: Any) -> Any:
        now = jax.tree.unflatten(tree, [v[...] for v in variables])
        with device(worker):
            value, grads = jax.value_and_grad(loss)(now["params"], x)
        old = jax.tree.unflatten(tree, [v[...] for v in variables])
        updates, opt = called.update(grads, old["opt"], old["params"], value=value)
        new = {"params": optax.apply_updates(old["params"], updates), "opt": opt}
        for variable, leaf in zip(variables, jax.tree.leaves(new), strict=True):
            variable[...] = leaf.astype(variable.dtype)
        return value

    return step
