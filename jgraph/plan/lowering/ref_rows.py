"""Row accesses to a Ref, lowered as gathers and scatters of whole rows.

JAX turns ``ref[ids]`` into an access to each number by itself; XLA's CPU code for that
takes two to three times as long as for whole rows.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jgraph import _compat
from jgraph._compat import Equation, Jaxpr
from jgraph.plan.analysis.row_ids import row_ids
from jgraph.plan.analysis.run_each import run_each


def run(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Returns what ``jax.core.eval_jaxpr`` does, with rows of Refs taken as rows."""
    if all(row_ids(equation) is None for equation in jaxpr.eqns):
        results: list[Any] = jax.core.eval_jaxpr(jaxpr, (), *args)
        return results
    return run_each(jaxpr, args, _results)


def _results(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    if row_ids(equation) is None:
        return _compat.run_equation(equation, operands)
    ref, *new, ids = operands
    old = ref[...]
    for rows in new:
        ref[...] = old.at[ids].set(rows)
    return [old[ids]]
