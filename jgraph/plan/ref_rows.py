"""Rows of a Ref, taken and put back as rows.

JAX turns ``ref[ids]`` into an access to each number by itself; XLA's CPU code for that
takes two to three times as long as for whole rows.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jgraph import _compat
from jgraph._compat import Atom, Equation, Jaxpr, Literal
from jgraph.plan.row_ids import row_ids


def run(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Returns what ``jax.core.eval_jaxpr`` does, with rows of Refs taken as rows."""
    if all(row_ids(equation) is None for equation in jaxpr.eqns):
        results: list[Any] = jax.core.eval_jaxpr(jaxpr, (), *args)
        return results
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))

    def value(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for equation in jaxpr.eqns:
        results = _results(equation, [value(v) for v in equation.invars])
        env.update(zip(equation.outvars, results, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _results(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    if row_ids(equation) is None:
        return _compat.run_equation(equation, operands)
    ref, *new, ids = operands
    old = ref[...]
    for rows in new:
        ref[...] = old.at[ids].set(rows)
    return [old[ids]]
