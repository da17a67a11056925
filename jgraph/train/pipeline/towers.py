"""Towers: a model on every worker, each on its part of a batch, in one graph."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jgraph.errors import ConfigError
from jgraph.graph.device import device
from jgraph.train.data.fields import split_batch
from jgraph.train.model.trees import Tree

Towers: TypeAlias = Callable[[Tree, Tree], tuple[jax.Array, Tree]]


def towers(loss: Callable[[Tree, Tree], Any], tasks: int | Sequence[str]) -> Towers:
    """Returns a function like ``jax.value_and_grad(loss)`` that runs on several tasks.

    For use inside a ``jg.function``: each task computes loss and gradients of its part
    of the batch. The mean is not placed: it is made where it is used, so that of a
    variable on a ps is made on the ps, which gets each worker's gradient once. This is
    in-graph replication: one client, one graph, and a step is synchronous.

    Args:
      loss: ``loss(params, batch)``, the mean over the examples.
      tasks: devices, or how many workers.

    Returns:
      ``(params, batch) -> (loss, gradients)``; ``batch`` is arrays with the examples as
      first dimension.

    Raises:
      ConfigError: no task. From the function: a batch that cannot be cut.

    Source: ``deploy_model`` with clones, tensorflow/models, slim/deployment.

    Example:
      >>> import jax.numpy as jnp
      >>> run = towers(lambda w, x: (w * x).mean(), 2)
      >>> loss, gradient = run(jnp.ones(()), jnp.array([1.0, 2.0, 3.0, 6.0]))
      >>> float(loss), float(gradient)
      (3.0, 3.0)
    """
    count = tasks if isinstance(tasks, int) else len(tasks)
    if count < 1:
        raise ConfigError("towers need a task; give how many workers, 1 or more")
    names = (
        [f"/job:worker/task:{number}" for number in range(tasks)]
        if isinstance(tasks, int)
        else list(tasks)
    )

    def value_and_grad(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        results = []
        for name, part in zip(names, split_batch(batch, count, "batch"), strict=True):
            with device(name):
                results.append(jax.value_and_grad(loss)(params, part))
        total = jax.tree.map(lambda *each: sum(each[1:], each[0]), *results)
        mean: tuple[jax.Array, Tree] = jax.tree.map(lambda x: x / count, total)
        return mean

    return value_and_grad
