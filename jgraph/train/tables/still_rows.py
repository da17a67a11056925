"""Proof from a jaxpr that zero gradients leave rows unchanged.

An optimizer may update rows alone if it leaves those without a gradient as they are, in
every step that will ever come. A few steps that are tried cannot tell: a schedule may
begin to decay later, and accumulated gradients may be applied later. The jaxpr is all
steps at once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax.numpy as jnp
import numpy as np

from jgraph import _compat
from jgraph._compat import Atom, Equation, Jaxpr, Literal, Var
from jgraph.graph.tracing.inline import inline_calls

# Zero where the first operand is, and where all are.
_FIRST = {
    *("abs", "asin", "asinh", "atan", "atanh", "broadcast_in_dim", "cbrt", "ceil"),
    *("conj", "copy", "copy_p", "cumsum", "div", "dynamic_slice", "erf", "expand_dims"),
    *("expm1", "floor", "gather", "imag", "log1p", "neg", "real", "reduce_max"),
    *("reduce_min", "reduce_or", "reduce_precision", "reduce_sum", "rem", "reshape"),
    *("rev", "round", "sign", "sin", "sinh", "slice", "sort", "sqrt", "square"),
    *("squeeze", "stop_gradient", "tan", "tanh", "transpose", "convert_element_type"),
}
_ALL = {"add", "add_any", "concatenate", "max", "min", "or", "sub", "clamp", "pad"}
_ANY = {"and", "dot_general", "mul"}
_SAME = {"copy", "copy_p", "reduce_precision", "stop_gradient"}
_MOST_KNOWN = 4096


@final
@dataclass(frozen=True, slots=True)
class _Is:
    """What is known of a value.

    Attributes:
      zero: all of it is zero.
      same: it has the numbers of this operand of the function; -1: nobody knows.
      known: its value, if it is a small constant.
    """

    zero: bool = False
    same: int = -1
    known: Any = None


_ANYTHING = _Is()
_Env: TypeAlias = dict[Var, _Is]


def unchanged_operands(
    fn: Any, operands: Sequence[Any], zeros: Collection[int]
) -> set[int]:
    """Returns which results are certain to be the operands of the same positions.

    Args:
      fn: a function of arrays that returns a sequence of arrays.
      operands: arrays, or their shapes and dtypes.
      zeros: positions of the operands that are zeros.

    Example:
      >>> def step(n, total, g):
      ...     total = total + g * g
      ...     return jnp.where(n > 9, total, 0 * n), total, g
      >>> unchanged_operands(step, [1.0, 2.0, 3.0], zeros=[2])
      {1, 2}
    """
    jaxpr, consts, _ = _compat.make_jaxpr(fn, *operands)
    flat = inline_calls(jaxpr, consts)
    given = [_Is(zero=n in zeros, same=n) for n in range(len(flat.jaxpr.invars))]
    proof = _Proof([_compat.array_type(v).dtype for v in flat.jaxpr.invars])
    results = proof.results(flat.jaxpr, flat.consts, given)
    return {
        n
        for n, (value, wanted) in enumerate(zip(results, given, strict=False))
        if value.same == n or (value.zero and wanted.zero)
    }


@final
@dataclass(frozen=True, slots=True)
class _Proof:
    dtypes: Sequence[Any]

    def results(
        self, jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[_Is]
    ) -> list[_Is]:
        env: _Env = dict(zip(jaxpr.invars, given, strict=True))
        env.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        for equation in jaxpr.eqns:
            values = [_of(env, atom) for atom in equation.invars]
            found = self._equation(equation, values)
            env.update(zip(equation.outvars, found, strict=True))
        return [_of(env, atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Equation, values: list[_Is]) -> list[_Is]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name == "cond":
            return self._branches(equation, values)
        if name == "optimization_barrier":
            return values
        known = _folded(equation, values)
        if known is not None:
            return known
        if count != 1:
            return [_ANYTHING] * count
        return [_Is(_is_zero(name, values, equation), self._same(equation, values))]

    def _branches(self, equation: Equation, values: list[_Is]) -> list[_Is]:
        columns = [
            self.results(
                _compat.open_jaxpr(body), getattr(body, "consts", ()), values[1:]
            )
            for _, body in _compat.inner_jaxprs(equation)
        ]
        return [_either(column) for column in zip(*columns, strict=True)]

    def _same(self, equation: Equation, values: list[_Is]) -> int:
        name, first = equation.primitive.name, values[0].same if values else -1
        out = _compat.array_type(equation.outvars[0])
        shapes = [_compat.array_type(v).shape for v in equation.invars]
        if name == "select_n":
            return _either(values[1:]).same
        if name in _SAME:
            return first
        if name == "convert_element_type" and first >= 0:
            holds_all = jnp.promote_types(self.dtypes[first], out.dtype) == out.dtype
            return first if holds_all else -1
        if name in {"add", "add_any", "sub"}:
            sums = [(values[0], values[1], shapes[0])]
            if name != "sub":
                sums.append((values[1], values[0], shapes[1]))
            for value, other, shape in sums:
                if other.zero and shape == out.shape:
                    return value.same
        return -1


def _of(env: _Env, atom: Atom) -> _Is:
    return _constant(atom.val) if isinstance(atom, Literal) else env[atom]


def _constant(value: Any) -> _Is:
    is_array = isinstance(value, np.ndarray | np.generic | int | float | complex)
    array = np.asarray(value) if is_array or hasattr(value, "__array__") else None
    if array is None or array.size > _MOST_KNOWN or array.dtype == object:
        return _ANYTHING
    return _Is(zero=not array.any(), known=array)


def _folded(equation: Equation, values: list[_Is]) -> list[_Is] | None:
    """Returns the results of an operation on small constants, if it is one."""
    sizes = [_compat.array_type(v).size for v in equation.outvars]
    if (
        equation.effects
        or not values
        or any(v.known is None for v in values)
        or max(sizes, default=0) > _MOST_KNOWN
        or any(_compat.inner_jaxprs(equation))
    ):
        return None
    results = _compat.run_equation(equation, [v.known for v in values])
    return [_constant(np.asarray(result)) for result in results]


def _is_zero(name: str, values: list[_Is], equation: Equation) -> bool:
    zeros = [value.zero for value in values]
    if name == "select_n":
        return all(zeros[1:])
    if name == "integer_pow":
        return zeros[0] and equation.params["y"] > 0
    if name in {"max", "min"} and any(zeros):
        # Clipping to a range that has zero in it.
        other = values[1 - zeros.index(True)].known
        if other is not None:
            return bool((other <= 0).all() if name == "max" else (other >= 0).all())
    return bool(
        (name in _FIRST and zeros[0])
        or (name in _ALL and all(zeros))
        or (name in _ANY and any(zeros))
    )


def _either(values: Sequence[_Is]) -> _Is:
    same = {value.same for value in values}
    return _Is(
        zero=all(value.zero for value in values),
        same=same.pop() if len(same) == 1 else -1,
    )
