"""Loop unrolling: a short scan over several tasks becomes its iterations in order.

A loop is one operation and runs on one task. A scan whose body names several tasks is
taken apart, so that its operations are placed like any others; equal turns are equal
code, which is compiled once. A long one, a ``while`` and a ``cond`` are refused: their
tasks would have to be told of every turn, or of the branch, before they may go on.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from jgraph import _compat
from jgraph._compat import Equation, Jaxpr
from jgraph.graph.tracing.scopes import body_stamps, one_place

MOST_EQUATIONS: Final = 2_000
"""A scan of more equations in all its turns is not taken apart."""


def unrolled(equation: Equation) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Returns (jaxpr, its constants) of all turns of a scan over several tasks.

    None for everything else: a scan of one task, of too many turns or a symbolic number
    of them, or of variables (their values are to be read before it).
    """
    if equation.primitive.name != "scan":
        return None
    if any(_compat.is_ref(v.aval) for v in equation.invars):
        return None
    if _compat.is_symbolic(equation.params["length"]):
        return None
    if not 0 < num_equations(equation) <= MOST_EQUATIONS:
        return None
    if one_place(body_stamps(equation)) is not None:
        return None
    avals = [_compat.array_type(v) for v in equation.invars]
    jaxpr, consts, _ = _compat.make_jaxpr(_turns(equation), *avals)
    return jaxpr, consts


def num_equations(equation: Equation) -> int:
    """Returns how many equations a scan has in all its turns."""
    body = _compat.open_jaxpr(equation.params["jaxpr"])
    return int(equation.params["length"]) * len(body.eqns)


def _turns(equation: Equation) -> Any:
    params = equation.params
    body, length = params["jaxpr"], params["length"]
    num_consts, num_carry = _compat.scan_parts(equation)
    order = range(length)[::-1] if params["reverse"] else range(length)

    def run(*operands: Any) -> list[Any]:
        consts = operands[:num_consts]
        carry = list(operands[num_consts : num_consts + num_carry])
        rows_of = operands[num_consts + num_carry :]
        made: dict[int, list[Any]] = {}
        for turn in order:
            rows = [lax.index_in_dim(x, turn, keepdims=False) for x in rows_of]
            results = jax.core.eval_jaxpr(
                _compat.open_jaxpr(body),
                getattr(body, "consts", ()),
                *consts,
                *carry,
                *rows,
            )
            carry, made[turn] = results[:num_carry], results[num_carry:]
        per_turn = (made[turn] for turn in range(length))
        return [*carry, *(jnp.stack(ys) for ys in zip(*per_turn, strict=True))]

    return run
