"""Checks of a training step: bad updates, constant random numbers, no gradient."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgraph import _compat
from jgraph._compat import Jaxpr, Var
from jgraph.errors import GraphError
from jgraph.graph.graph import Graph
from jgraph.train.model.trees import Tree

FINITE = "<finite>"
"""Metric of a step with ``check_finite``: bool per leaf, the loss first."""


def finite(loss: jax.Array, grads: Tree) -> jax.Array:
    """Returns whether the loss and each gradient are finite, bool per leaf."""
    # The order is that of the parameters' variables: both flatten the same tree.
    leaves = [loss, *jax.tree.leaves(grads)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])


def all_finite(tree: Tree) -> jax.Array:
    """Returns whether all numbers of a tree are finite that can be otherwise, bool."""
    real = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in real]).all()


def value_and_grad(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``jax.value_and_grad`` of a loss that returns more than its value.

    Example:
      >>> (value, more), gradient = value_and_grad(lambda x: (3 * x, "more"))(2.0)
      >>> float(value), more, float(gradient)
      (6.0, 'more', 3.0)

    Raises:
      GraphError: what it returns does, if no parameter has an influence on the loss.
    """

    def compute(params: Tree, *args: Any) -> Any:
        has_gradient = False

        @jax.custom_jvp
        def looked_at(value: Any) -> Any:
            return value

        @looked_at.defjvp
        def follow(values: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
            nonlocal has_gradient
            has_gradient = True  # JAX does not ask for that of a constant
            return values[0], tangents[0]

        def watched(params: Tree, *args: Any) -> tuple[Any, Any]:
            value, more = loss(params, *args)
            return looked_at(value), more

        result = jax.value_and_grad(watched, has_aux=True)(params, *args)
        if not has_gradient:
            raise GraphError(
                "the loss has no gradient: no trained parameter has an influence on "
                "it, so nothing would be learned; compute it from its first argument, "
                "def loss(model, batch), or for linen def loss(params, batch), without "
                "jax.lax.stop_gradient around all of it"
            )
        return result

    return compute


def warn_of_same_draws(graph: Graph) -> None:
    """Warns of random numbers whose key depends on nothing that a step is given.

    A dropout mask of ``nnx.Rngs(0)``, made in the loss, is such a one.
    """
    draws = _same_draws(graph.jaxpr, graph.jaxpr.constvars)
    for line in dict.fromkeys(draws):
        warnings.warn(
            f"the loss draws the same random numbers in every step, at {line}: their "
            "key is made in the loss, as by nnx.Rngs(0) or jax.random.key(0), and "
            "nothing of the step is folded in; draw from the loss's third argument: "
            "def loss(model, batch, rngs), or for linen def loss(params, batch, rng)",
            UserWarning,
            stacklevel=2,
        )


def _same_draws(jaxpr: Jaxpr, inputs: Sequence[Any]) -> list[str]:
    """Returns where keys are made of draws that follow from constants alone.

    Args:
      jaxpr: what draws.
      inputs: those of its inputs that are constants.
    """
    draws: list[str] = []
    lines = dict.fromkeys(inputs, _compat.UNKNOWN_LINE)
    for equation in jaxpr.eqns:
        values = [v for v in equation.invars if isinstance(v, Var)]
        is_fixed = not equation.effects and all(v in lines for v in values)
        if is_fixed:
            # What a library has traced before has no line of the user's.
            candidates = [_compat.user_line(equation), *(lines[v] for v in values)]
            user_lines = [line for line in candidates if line != _compat.UNKNOWN_LINE]
            lines |= dict.fromkeys(equation.outvars, [*user_lines, candidates[0]][0])
            if equation.primitive.name == "random_bits":
                draws.append(lines[equation.outvars[0]])
        for _, inner in _compat.inner_jaxprs(equation):
            body = _compat.open_jaxpr(inner)
            draws += _same_draws(body, body.invars if is_fixed else body.constvars)
    return draws
