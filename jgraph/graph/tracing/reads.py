"""Read hoisting: reads of variables inside loops move before the loop.

A loop over a Ref would have to run on the task of the variable. When its bodies only
read, the value is read once before, and the loop runs over a private Ref that holds
this value, closed in one call: it can be on any task.
"""

from typing import Any

import jax

from jgraph import _compat
from jgraph._compat import Equation, Var


def read_before(equation: Equation) -> list[Equation]:
    """Returns equations with the same results that pass no Ref into a reading loop.

    An equation without bodies, without Refs, or with a Ref that it writes, is returned
    as it is.
    """
    refs = dict.fromkeys(v for v in equation.invars if _compat.is_ref(v.aval))
    if not refs or next(_compat.inner_jaxprs(equation), None) is None:
        return [equation]
    if any(_compat.writes(equation, ref) for ref in refs):
        return [equation]
    reads = [_read(ref, equation) for ref in refs]
    values = {e.invars[0]: e.outvars[0] for e in reads}
    return [*reads, _over_values(equation, values)]


def _read(ref: Var, near: Equation) -> Equation:
    aval = _compat.array_type(ref)
    jaxpr = jax.make_jaxpr(lambda value: jax.new_ref(value)[...])(aval)
    read = next(e for e in jaxpr.eqns if e.primitive.name == "get")
    return _compat.rebuild_equation(
        read.replace(source_info=near.source_info),
        lambda v: ref if v is read.invars[0] else v,
        [_compat.fresh_var(read.outvars[0])],
    )


def _over_values(equation: Equation, values: dict[Var, Var]) -> Equation:
    operands = list(dict.fromkeys(v for v in equation.invars if isinstance(v, Var)))
    alone = _compat.build_jaxpr(
        invars=operands, outvars=equation.outvars, equations=[equation]
    )

    def loop(*arrays: Any) -> Any:
        held = [
            jax.new_ref(x) if v in values else x
            for v, x in zip(operands, arrays, strict=True)
        ]
        return jax.core.eval_jaxpr(alone, (), *held)

    call = jax.make_jaxpr(jax.jit(loop))(*map(_compat.array_type, operands)).eqns[0]
    return call.replace(
        invars=[values.get(v, v) for v in operands],
        outvars=equation.outvars,
        source_info=equation.source_info,
    )
