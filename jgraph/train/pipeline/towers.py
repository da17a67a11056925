"""Towers: a model on every worker, each on its part of a batch, in one graph."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jgraph.counts import is_count
from jgraph.errors import ConfigError
from jgraph.graph.device import as_spec, device
from jgraph.train.data.fields import split_batch
from jgraph.train.model.losses import check_loss
from jgraph.train.model.trees import Tree
from jgraph.train.pipeline.pipeline import PipelineLoss
from jgraph.train.pipeline.replicas import TaskArray

Towers: TypeAlias = Callable[..., tuple[jax.Array, Tree]]


def towers(loss: Callable[..., Any], tasks: TaskArray) -> Towers:
    """Returns a function like ``jax.value_and_grad(loss)`` that runs on several tasks.

    For use inside a ``jg.function``: each task computes loss and gradients of its part
    of the batch. The mean is not placed: it is made where it is used, so that of a
    variable on a ps is made on the ps, which gets each worker's gradient once. This is
    in-graph replication: one client, one graph, and a step is synchronous.

    Of a pipeline, ``towers(pipe.loss, 2)`` makes two replicas, each over as many tasks
    as the pipeline has, and its gradients are summed where the parameters are.

    Args:
      loss: ``loss(params, batch)``, or with several parts of a batch ``loss(params, x,
        y)``, the mean over the examples. Or ``pipe.loss`` of a ``jg.Pipeline``.
      tasks: devices, or how many workers. Of a pipeline: how many replicas, or an array
        of devices with a row for each.

    Returns:
      ``(params, batch) -> (loss, gradients)``; ``batch`` is arrays with the examples as
      first dimension, and there may be several.

    Raises:
      ConfigError: no task, or no loss. From the function: a batch that cannot be cut.
      GraphError: from the function: the loss is no scalar.
      PipelineError: tasks that replicas of the pipeline cannot have.

    Source: ``deploy_model`` with clones, tensorflow/models, slim/deployment.

    Example:
      >>> import jax.numpy as jnp
      >>> run = towers(lambda w, x: (w * x).mean(), 2)
      >>> loss, gradient = run(jnp.ones(()), jnp.array([1.0, 2.0, 3.0, 6.0]))
      >>> float(loss), float(gradient)
      (3.0, 3.0)
      >>> import jgraph as jg
      >>> pipe = jg.Pipeline(
      ...     [lambda w, x: w * x, lambda w, x: w * x],
      ...     lambda y, t: ((y - t) ** 2).mean(),
      ...     microbatches=2,
      ... )
      >>> params, x = [jnp.ones(()), jnp.full((), 2.0)], jnp.arange(8.0)
      >>> loss, gradients = towers(pipe.loss, 2)(params, x, x)
      >>> float(loss), [float(g) for g in gradients]
      (17.5, [70.0, 35.0])
    """
    count = _count(tasks)
    if count < 1:
        raise ConfigError(
            "towers need a task; give how many workers, 1 or more, or a list of "
            f"devices, not {tasks!r}"
        )
    if not callable(loss):
        raise ConfigError(
            f"loss is {loss!r:.60}; give a function (params, batch) of its mean"
        )
    if isinstance(loss, PipelineLoss):
        return loss.over(tasks).value_and_grad
    names = (
        [f"/job:worker/task:{number}" for number in range(count)]
        if not isinstance(tasks, Sequence | np.ndarray)
        else [str(as_spec(task)) for task in tasks]
    )

    def scalar(*args: Tree) -> Any:
        value = loss(*args)
        check_loss(value, f"loss '{getattr(loss, '__name__', loss)}'")
        return value

    def value_and_grad(params: Tree, *batch: Tree) -> tuple[jax.Array, Tree]:
        results = []
        for name, part in zip(names, split_batch(batch, count, "batch"), strict=True):
            with device(name):
                results.append(jax.value_and_grad(scalar)(params, *part))
        total = jax.tree.map(lambda *each: sum(each[1:], each[0]), *results)
        mean: tuple[jax.Array, Tree] = jax.tree.map(lambda x: x / count, total)
        return mean

    return value_and_grad


def _count(tasks: Any) -> int:
    """Returns how many tasks there are; 0 for what is no number and no list."""
    if isinstance(tasks, Sequence | np.ndarray) and not isinstance(tasks, str):
        return len(tasks)
    return int(tasks) if is_count(tasks, 1) else 0
