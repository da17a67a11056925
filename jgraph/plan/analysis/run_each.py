"""Jaxpr interpreter: a rule of the caller evaluates every equation."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jgraph._compat import Atom, Equation, Jaxpr, Literal

Rule: TypeAlias = Callable[[Equation, list[Any]], Sequence[Any]]
"""Takes an equation and the values of its operands; returns its results."""


def run_each(
    jaxpr: Jaxpr, args: Sequence[Any], rule: Rule, consts: Sequence[Any] = ()
) -> list[Any]:
    """Returns the results of a jaxpr, each of whose equations ``rule`` does.

    With ``_compat.run_equation`` for the rule, what ``jax.core.eval_jaxpr`` returns.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def value(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for equation in jaxpr.eqns:
        results = rule(equation, [value(v) for v in equation.invars])
        env.update(zip(equation.outvars, results, strict=True))
    return [value(v) for v in jaxpr.outvars]
