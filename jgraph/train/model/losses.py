"""Loss functions: their accepted signatures and return values.

As Flax users expect:

* ``flax.nnx``: ``loss(model, batch)`` or ``loss(model, batch, rngs)``. The model may
  change its state (BatchNorm statistics) and draw random numbers (dropout); ``rngs`` is
  an ``nnx.Rngs`` of the step.
* ``flax.linen``: ``loss(params, batch)`` or ``loss(params, batch, rng)``. If the model
  has other collections than ``params`` (``batch_stats``), or if the first parameter is
  called ``variables``, it is given all of them: ``loss(variables, batch, rng)``. The
  third is called ``rng``, or ``key``, or has that, ``seed`` or ``rand`` in its name.

A loss returns a scalar, or ``(scalar, dict of metrics)``. A linen loss gives updated
collections back in that dict, under their names, as ``model.apply(…, mutable=[…])``
returns them: ``return loss, {**updates, "accuracy": accuracy}``.

What else comes beside the scalar, as in ``return loss, logits`` or ``return loss,
(logits, updates)``, has no name and is left out; dicts in it count, and a scalar
without a name is refused. Values of a dict in the dict get the names of both:
``{"top": {"1": a, "5": b}}`` is the metrics ``top/1`` and ``top/5``.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jgraph.errors import GraphError
from jgraph.train.model.metrics import named_metrics

Loss: TypeAlias = Callable[..., Any]

RNG_NAMES = ("rng", "rngs")
"""Names of a third parameter that is given also where it has a default."""


def positional(fn: Loss) -> list[str]:
    """Returns names of the parameters that have to be given, in order; rng always.

    Example:
      >>> positional(lambda params, batch, rng=None, scale=1.0: 0.0)
      ['params', 'batch', 'rng']
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.kind in kinds and (p.default is p.empty or p.name in RNG_NAMES)
    ]


def split_result(result: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Returns (loss, metrics) of what a loss returned.

    Raises:
      GraphError: not a scalar that has a gradient, or a metric without a name.

    Example:
      >>> loss, metrics = split_result((jnp.zeros(()), (jnp.ones(8), {"n": 8})))
      >>> loss.shape, metrics
      ((), {'n': 8})
    """
    loss, *rest = result if isinstance(result, tuple) and result else (result,)
    aux = _dicts_in(rest)
    check_loss(loss, "loss")
    if "loss" in aux:
        raise GraphError("a metric is called 'loss', as the loss itself; rename it")
    return loss, aux


def check_loss(loss: Any, what: str) -> None:
    """Refuses a value of a loss that is no scalar with a gradient.

    Raises:
      GraphError: says what the loss, named ``what``, returned.
    """
    if not hasattr(loss, "dtype") and not isinstance(loss, float):
        raise GraphError(
            f"{what} returned {loss!r:.60}; return a scalar array, for example "
            "losses.mean()"
        )
    if jnp.shape(loss) != ():
        raise GraphError(
            f"{what} returned an array of shape {jnp.shape(loss)}; return a scalar, "
            "for example losses.mean()"
        )
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise GraphError(
            f"{what} returned a scalar of dtype {loss.dtype}, which has no gradient; "
            "return a float, for example losses.mean()"
        )


def _dicts_in(value: Any) -> dict[str, Any]:
    """Returns the dicts in nested tuples and lists as one."""
    if isinstance(value, Mapping):
        return dict(value)
    inner = value if isinstance(value, tuple | list) else ()
    if isinstance(value, int | float) or getattr(value, "shape", None) == ():
        raise GraphError(
            "loss returned a scalar beside its value, which has no name; give it one, "
            'for example return loss, {"accuracy": accuracy}'
        )
    return {name: one for each in inner for name, one in _dicts_in(each).items()}


def loss_and_scalars(result: Any) -> dict[str, Any]:
    """Returns the loss and those metrics that have a mean over batches."""
    loss, aux = split_result(result)
    scalars = {k: v for k, v in named_metrics(aux).items() if v.ndim == 0}
    return {"loss": loss, **scalars}
