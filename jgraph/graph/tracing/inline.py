"""Inlining: calls become equations of one flat jaxpr, each with its device stamp.

An equation inside a call has the scopes of the call around its own, so one cached
trace of a jitted function serves under several devices. Loops and conditionals stay
whole, on the one task that their bodies name; a short scan that names several becomes
its turns.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import lax

from jgraph import _compat
from jgraph._compat import Atom, Equation, Jaxpr, Literal, Var
from jgraph.errors import PlacementError
from jgraph.graph.device import DeviceSpec, stamp_of


def stamp_of_whole(equation: Equation) -> DeviceSpec:
    """Returns the device scope of an equation that is placed as one.

    An equation with bodies (a loop, a conditional) has the scope that the equations
    in its bodies name, merged over its own.

    Raises:
      PlacementError: the bodies name two different tasks.
    """
    own = stamp_of(_compat.name_stack_of(equation))
    if next(_compat.inner_jaxprs(equation), None) is None:
        return own
    stamps = body_stamps(equation)
    place = one_place(stamps)
    if place is None:
        raise _two_places(equation, stamps)
    return place


def body_stamps(equation: Equation) -> list[DeviceSpec]:
    """Returns the distinct scopes of an equation and of all equations in its bodies."""
    own = stamp_of(_compat.name_stack_of(equation))
    return list(dict.fromkeys((own, *_inside(equation, own))))


def one_place(stamps: Iterable[DeviceSpec]) -> DeviceSpec | None:
    """Returns the most specific of the stamps if it agrees with all, else None.

    Agreement is about job, replica and task; a disagreement about the device of one
    task leaves the device open.
    """
    stamps = [s for s in stamps if s]
    best = max(stamps, key=_set_fields, default=DeviceSpec())
    merged = best
    for stamp in stamps:
        merged = merged.merge(stamp)
    if _task_fields(merged) != _task_fields(best):
        return None
    devices = {(s.device_type, s.device_index) for s in stamps if s.device_type}
    kind, index = devices.pop() if len(devices) == 1 else (None, None)
    return DeviceSpec(best.job, best.replica, best.task, kind, index, best.beside)


def _inside(equation: Equation, outer: DeviceSpec) -> Iterator[DeviceSpec]:
    for _, body in _compat.inner_jaxprs(equation):
        for inner in _compat.open_jaxpr(body).eqns:
            stamp = stamp_of(_compat.name_stack_of(inner), outer)
            if next(_compat.inner_jaxprs(inner), None) is None:
                yield stamp
            else:
                yield from _inside(inner, stamp)


def _task_fields(spec: DeviceSpec) -> tuple[object, ...]:
    return spec.job, spec.replica, spec.task, spec.beside


def _set_fields(spec: DeviceSpec) -> int:
    return sum(f is not None for f in _task_fields(spec))


def _two_places(equation: Equation, stamps: list[DeviceSpec]) -> PlacementError:
    names = sorted({str(s) for s in stamps if s})
    listed = ", ".join(f"'{n}'" for n in names)
    advice = {
        "scan": "make it shorter: up to 2,000 operations in all turns together, over "
        "values and not variables (w[...] before the loop), are unrolled by themselves",
        "while": "write jax.lax.fori_loop or scan when the number of turns is known: "
        "short ones are unrolled by themselves",
        "cond": "compute the branches outside and choose with jnp.where",
    }.get(equation.primitive.name, "take it apart into operations of one task each")
    return PlacementError(
        f"'{equation.primitive.name}' at {_compat.user_line(equation)} has operations "
        f"on several tasks: {listed}; it runs whole on one task. Put all of it "
        f"under one jg.device scope, or {advice}",
        primitive=equation.primitive.name,
        devices=names,
    )


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


# Read hoisting: reads of variables inside loops move before the loop.
#
# A loop over a Ref would have to run on the task of the variable. When its bodies only
# read, the value is read once before, and the loop runs over a private Ref that holds
# this value, closed in one call: it can be on any task.


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


# Loop unrolling: a short scan over several tasks becomes its iterations in order.
#
# A loop is one operation and runs on one task. A scan whose body names several tasks is
# taken apart, so that its operations are placed like any others; equal turns are equal
# code, which is compiled once. A long one, a ``while`` and a ``cond`` are refused:
# their tasks would have to be told of every turn, or of the branch, before they may go
# on.


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
    if num_equations(equation) > MOST_EQUATIONS:
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
    stacked = [_compat.array_type(v) for v in equation.outvars[num_carry:]]
    order = range(length)[::-1] if params["reverse"] else range(length)

    def run(*operands: Any) -> list[Any]:
        consts = operands[:num_consts]
        carry = list(operands[num_consts : num_consts + num_carry])
        rows_of = operands[num_consts + num_carry :]
        outputs: dict[int, list[Any]] = {}
        for turn in order:
            rows = [lax.index_in_dim(x, turn, keepdims=False) for x in rows_of]
            results = jax.core.eval_jaxpr(
                _compat.open_jaxpr(body),
                getattr(body, "consts", ()),
                *consts,
                *carry,
                *rows,
            )
            carry, outputs[turn] = results[:num_carry], results[num_carry:]
        if not length:
            return [*carry, *(lax.full(t.shape, 0, t.dtype) for t in stacked)]
        per_turn = (outputs[turn] for turn in range(length))
        return [*carry, *(jnp.stack(ys) for ys in zip(*per_turn, strict=True))]

    return run
