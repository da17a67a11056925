"""Inlining: calls become equations of one flat jaxpr, each with its device stamp.

An equation inside a call has the scopes of the call around its own, so one cached
trace of a jitted function serves under several devices. Loops and conditionals stay
whole, on the one task that their bodies name; a short scan that names several becomes
its turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp

from jgraph import _compat
from jgraph._compat import Atom, Equation, Jaxpr, Literal, Var
from jgraph.graph.device import DeviceSpec
from jgraph.graph.tracing.reads import read_before
from jgraph.graph.tracing.scopes import body_stamps, one_place, stamp_of_whole
from jgraph.graph.tracing.unroll import unrolled

Placed: TypeAlias = tuple[Equation, DeviceSpec]
Env: TypeAlias = dict[Var, Atom]


@final
@dataclass(frozen=True, slots=True)
class Flat:
    """A jaxpr without calls, the values of its ``constvars``, a stamp per equation."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    stamps: tuple[DeviceSpec, ...]


def inline_calls(jaxpr: Jaxpr, consts: Sequence[Any]) -> Flat:
    """Returns the same computation without calls.

    Args:
      jaxpr: an open jaxpr; its ``invars`` (Refs too) and their order are kept.
      consts: the values of ``jaxpr.constvars``; constants of the calls join them.

    Raises:
      PlacementError: a loop or conditional whose body names two tasks.
    """
    constants = _Constants()
    env: Env = {v: v for v in jaxpr.invars}
    env.update(constants.bind(jaxpr.constvars, consts))
    placed = _inline_body(jaxpr, env, constants, None)
    flat = _compat.build_jaxpr(
        constvars=constants.variables,
        consts=constants.values,
        invars=jaxpr.invars,
        outvars=[_renamed(env, v) for v in jaxpr.outvars],
        equations=[equation for equation, _ in placed],
    )
    return Flat(flat, tuple(constants.values), tuple(stamp for _, stamp in placed))


@final
@dataclass(slots=True)
class _Constants:
    """The arrays that a function and its calls closed over, each once."""

    variables: list[Var] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    _by_id: dict[int, Var] = field(default_factory=dict)

    def bind(self, names: Sequence[Var], values: Sequence[Any]) -> Env:
        return {n: self._add(n, v) for n, v in zip(names, values, strict=True)}

    def _add(self, like: Var, value: Any) -> Var:
        # The list keeps the value alive, so its id names it.
        if id(value) not in self._by_id:
            self._by_id[id(value)] = _compat.fresh_var(like)
            self.variables.append(self._by_id[id(value)])
            self.values.append(value)
        return self._by_id[id(value)]


def _renamed(env: Env, atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else env[atom]


def _inline_body(
    jaxpr: Jaxpr, env: Env, constants: _Constants, caller: Equation | None
) -> list[Placed]:
    placed: list[Placed] = []
    for inner in jaxpr.eqns:
        equation = inner if caller is None else _compat.with_outer_scope(inner, caller)
        call = None
        if not _stays_whole(equation):
            call = _compat.call_body(equation) or unrolled(equation)
        if call is None:
            placed += _copy(equation, env)
        else:
            placed += _inline_call(equation, *call, env, constants)
    return placed


def _copy(equation: Equation, env: Env) -> list[Placed]:
    # A body may be inlined many times: every copy needs results of its own.
    outvars = [_compat.fresh_var(v) for v in equation.outvars]
    new = _compat.rebuild_equation(equation, lambda v: _renamed(env, v), outvars)
    env.update(zip(equation.outvars, outvars, strict=True))
    stamp = stamp_of_whole(new)
    return [(part, stamp) for part in read_before(new)]


def _inline_call(
    equation: Equation,
    body: Jaxpr,
    consts: Sequence[Any],
    env: Env,
    constants: _Constants,
) -> list[Placed]:
    operands = [_renamed(env, v) for v in equation.invars]
    inner = dict(zip(body.invars, operands, strict=True))
    inner.update(constants.bind(body.constvars, consts))
    placed = _inline_body(body, inner, constants, equation)
    outs = [_renamed(inner, v) for v in body.outvars]
    env.update(zip(equation.outvars, outs, strict=True))
    if _needs_barrier(equation):
        return _with_barriers(placed, operands)
    return placed


def _stays_whole(equation: Equation) -> bool:
    """Whether a call stays a call, when all of it is on one task.

    A checkpoint does: XLA then keeps the recomputation. A function with private Refs
    does, because these cannot be sent. Neither does when it uses a variable: the read
    is to live elsewhere.
    """
    if any(_compat.is_ref(v.aval) for v in equation.invars):
        return False
    if not (_compat.is_checkpoint(equation) or _has_private_refs(equation)):
        return False
    return one_place(body_stamps(equation)) is not None


def _has_private_refs(equation: Equation) -> bool:
    return any(
        inner.primitive.name == "new_ref" or _has_private_refs(inner)
        for _, body in _compat.inner_jaxprs(equation)
        for inner in _compat.open_jaxpr(body).eqns
    )


def _needs_barrier(equation: Equation) -> bool:
    params = equation.params
    return (
        _compat.is_checkpoint(equation)
        and bool(params.get("prevent_cse", True))
        and bool(params.get("differentiated", True))
    )


def _with_barriers(placed: list[Placed], operands: Sequence[Atom]) -> list[Placed]:
    """Puts back the barrier of an inlined checkpoint, one per device.

    Without it XLA would merge the recomputation with the first computation, and keep
    all the activations that the checkpoint was to free.
    """
    guarded = {v for v in operands if isinstance(v, Var) and _can_guard(v)}
    used: dict[DeviceSpec, dict[Var, Var]] = {}
    first: dict[DeviceSpec, Equation] = {}
    for equation, stamp in placed:
        first.setdefault(stamp, equation)
        for v in equation.invars:
            if isinstance(v, Var) and v in guarded:
                used.setdefault(stamp, {}).setdefault(v, _compat.fresh_var(v))
    barriers = [(_barrier(names, first[s]), s) for s, names in used.items()]
    return barriers + [
        (_rename_operands(equation, used.get(stamp, {})), stamp)
        for equation, stamp in placed
    ]


def _can_guard(v: Var) -> bool:
    if _compat.is_ref(v.aval):
        return False
    dtype = _compat.array_type(v).dtype
    return dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)


def _rename_operands(equation: Equation, names: dict[Var, Var]) -> Equation:
    def rename(v: Atom) -> Atom:
        return names.get(v, v) if isinstance(v, Var) else v

    return _compat.rebuild_equation(equation, rename, equation.outvars)


def _barrier(names: dict[Var, Var], near: Equation) -> Equation:
    avals = [_compat.array_type(v) for v in names]
    jaxpr = jax.make_jaxpr(lambda *xs: jax.lax.optimization_barrier(xs))(*avals)
    return jaxpr.eqns[0].replace(
        invars=list(names), outvars=list(names.values()), source_info=near.source_info
    )
