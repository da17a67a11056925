"""Residuals of a forward pass: the values kept for its backward pass.

Autodiff names the values that the backward pass takes. Of these only what cannot be
had otherwise is kept: parameters and the inputs are there, what follows from the
parameters alone is computed again, and so is what elementwise operations make of what
is kept anyway (``1 - tanh(x)`` beside ``tanh(x)``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from jgraph import _compat
from jgraph._compat import Equation, Jaxpr, Literal, Var
from jgraph.graph.tracing.alone import needed_for
from jgraph.graph.tracing.inline import Flat

_CHEAP = {
    *("convert_element_type", "neg", "sub", "add", "mul", "broadcast_in_dim", "iota"),
    *("reshape", "squeeze", "transpose", "copy", "copy_p", "stop_gradient", "abs"),
    *("eq", "ne", "lt", "le", "gt", "ge", "not", "and", "or", "select_n", "max", "min"),
    *("square", "sign"),
}


@final
@dataclass(frozen=True, slots=True)
class Residuals:
    """A forward pass, and what of it is kept.

    Attributes:
      forward: a jaxpr that gives the outputs, and then what else is kept.
      kept: which of its results are kept.
      again: a jaxpr over the same inputs and what was kept, that gives all that the
        backward pass takes.
      consts: values of the ``constvars`` of both.
    """

    forward: Jaxpr
    kept: tuple[int, ...]
    again: Jaxpr
    consts: tuple[Any, ...]


def residuals(flat: Flat, num_outputs: int, num_params: int) -> Residuals:
    """Returns what to keep.

    Args:
      flat: gives the outputs, then what the backward pass takes.
      num_outputs: how many are outputs.
      num_params: how many of its inputs are parameters; the others change.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.tracing.inline import inline_calls
      >>> def forward(w, x):
      ...     y = jnp.tanh(w.T * x)
      ...     return y, w.T, x, y, 1 - y
      >>> jaxpr, consts, _ = _compat.make_jaxpr(forward, jnp.ones(3), jnp.ones(3))
      >>> found = residuals(inline_calls(jaxpr, consts), 1, 1)
      >>> len(found.forward.outvars), found.kept, len(found.again.outvars)
      (1, (0,), 4)
    """
    jaxpr = flat.jaxpr
    outputs, taken = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
    kept = _kept(jaxpr, set(_vars(taken)), num_params)
    made_again = [e for e in jaxpr.eqns if not kept.intersection(e.outvars)]
    ordered = [v for v in dict.fromkeys(_vars(taken)) if v in kept]
    results = [*outputs, *(v for v in ordered if v not in _vars(outputs))]
    forward = _compat.build_jaxpr(
        constvars=jaxpr.constvars,
        consts=flat.consts,
        invars=jaxpr.invars,
        outvars=results,
        equations=needed_for(results, jaxpr.eqns),
    )
    again = _compat.build_jaxpr(
        constvars=jaxpr.constvars,
        consts=flat.consts,
        invars=[*jaxpr.invars, *ordered],
        outvars=taken,
        equations=needed_for(taken, made_again),
    )
    places = tuple(results.index(v) for v in ordered)
    return Residuals(forward, places, again, flat.consts)


def _kept(jaxpr: Jaxpr, taken: set[Var], num_params: int) -> set[Var]:
    constant = {*jaxpr.constvars, *jaxpr.invars[:num_params]}
    at_hand = constant | taken.intersection(jaxpr.invars)
    kept = set()
    for equation in jaxpr.eqns:
        needs = _vars(equation.invars)
        if constant.issuperset(needs) and not equation.effects:
            constant.update(equation.outvars)
            at_hand.update(equation.outvars)
        elif _is_cheap(equation) and at_hand.issuperset(needs):
            at_hand.update(equation.outvars)
        else:
            stored = taken.intersection(equation.outvars)
            kept |= stored
            at_hand |= stored
    return kept


def _is_cheap(equation: Equation) -> bool:
    return equation.primitive.name in _CHEAP and not equation.effects


def _vars(atoms: Sequence[Any]) -> list[Var]:
    return [a for a in atoms if not isinstance(a, Literal)]
