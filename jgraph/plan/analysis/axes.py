"""Sharding rules of operations: the axes along which each can be done by shards.

``operand_axes`` says, for a cut of the result along one axis, how the operands must be
cut so that each shard of the result follows from one shard of each: the one table that
serves to carry cuts from operands to results and back.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jgraph._compat import Equation

Axes: TypeAlias = list[int | None]
"""Per operand the axis to cut, None for one that all shards take whole."""

_ELEMENTWISE = re.compile(
    r"(abs|acos|acosh|add|add_any|and|asin|asinh|atan|atan2|atanh|bessel_\w+|bitcast_convert_type|cbrt|ceil"
    r"|clamp|clz|complex|conj|convert_element_type|copy|copy_p|cos|cosh|digamma|div|eq"
    r"|eq_to|erf|erf_inv|erfc|exp|exp2|expm1|floor|ge|gt|igamma\w*|imag|integer_pow"
    r"|is_finite|le|le_to|lgamma|log|log1p|logistic|lt|lt_to|max|min|mul|mulhi|ne|neg"
    r"|nextafter|not|or|polygamma|population_count|pow|random_gamma_grad|real"
    r"|reduce_precision|regularized_incomplete_beta|rem|round|rsqrt|select_n"
    r"|shift_left|shift_right_arithmetic|shift_right_logical|sign|sin|sinh|sqrt|square"
    r"|stop_gradient|sub|tan|tanh|xor|zeta|one_minus_square)\Z"
)


def operand_axes(equation: Equation, axis: int) -> Axes | None:
    """Returns the axes to cut the operands along; None: it cannot be done by shards.

    Args:
      equation: an operation without effects.
      axis: the axis along which its results are cut.
    """
    shape = getattr(equation.outvars[0].aval, "shape", ())
    if axis >= len(shape):
        return None
    name = equation.primitive.name
    if is_elementwise(name):
        return _elementwise(equation, axis)
    rule = _RULES.get(name)
    if rule is None or any(hasattr(v.aval, "inner_aval") for v in equation.invars):
        return None
    return rule(equation, axis)


def is_light(equation: Equation) -> bool:
    """Whether doing it by shards besides costs no more than cutting its result."""
    name = equation.primitive.name
    return len(equation.outvars) == 1 and (name in _LIGHT or is_elementwise(name))


def is_elementwise(primitive: str) -> bool:
    """Whether each element of a result follows from those at its place."""
    return bool(_ELEMENTWISE.match(primitive))


def result_axis(equation: Equation, operand: int, axis: int) -> int | None:
    """Returns the axis of the results that a cut of one operand cuts, or None."""
    for out in range(len(getattr(equation.outvars[0].aval, "shape", ()))):
        axes = operand_axes(equation, out)
        if axes is not None and axes[operand] == axis:
            return out
    return None


def part_params(equation: Equation, axis: int, size: int) -> dict[str, Any]:
    """Returns the parameters for results of ``size`` along ``axis``."""
    params = dict(equation.params)
    for name in ("shape", "new_sizes", "limit_indices"):
        if name in params and equation.primitive.name in _SIZED:
            sizes = list(params[name])
            sizes[axis] = size
            params[name] = tuple(sizes)
    return params


_LIGHT = {"broadcast_in_dim", "iota", "reshape", "squeeze", "transpose"}
_SIZED = {"broadcast_in_dim", "iota", "reshape", "slice"}

_COMBINE = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
}


def combined_axes(equation: Equation, operand: int, axis: int) -> Axes | None:
    """Returns the cut of a reduction whose results are combined over shards.

    Args:
      equation: an operation.
      operand: which operand is cut.
      axis: along which axis.
    """
    name = equation.primitive.name
    if name in _COMBINE and axis in equation.params["axes"]:
        return [axis]
    if name == "dot_general":
        contracting = [list(axes) for axes in equation.params["dimension_numbers"][0]]
        if axis in contracting[operand]:
            place = contracting[operand].index(axis)
            return [contracting[0][place], contracting[1][place]]
    return None


def combiner(equation: Equation) -> str:
    """Returns the operation that combines results over shards: a name in lax."""
    name = _COMBINE.get(equation.primitive.name, "add")
    return {"and": "bitwise_and", "or": "bitwise_or"}.get(name, name)


def _shape(equation: Equation, operand: int = 0) -> Sequence[int]:
    shape: Sequence[int] = equation.invars[operand].aval.shape
    return shape


def _elementwise(equation: Equation, axis: int) -> Axes | None:
    shape = equation.outvars[0].aval.shape
    axes: Axes = []
    for position in range(len(equation.invars)):
        operand = _shape(equation, position)
        if operand and len(operand) != len(shape):
            return None
        axes.append(axis if operand and operand[axis] == shape[axis] else None)
    return axes


def _broadcast(equation: Equation, axis: int) -> Axes | None:
    dimensions = list(equation.params["broadcast_dimensions"])
    others: Axes = [None] * (len(equation.invars) - 1)
    if axis not in dimensions:
        return [None, *others]
    place = dimensions.index(axis)
    same = _shape(equation)[place] == equation.params["shape"][axis]
    return [place if same else None, *others]


def _transpose(equation: Equation, axis: int) -> Axes | None:
    return [equation.params["permutation"][axis]]


def _reshape(equation: Equation, axis: int) -> Axes | None:
    shape, new = _shape(equation), equation.params["new_sizes"]
    if equation.params.get("dimensions") is not None or len(equation.invars) > 1:
        return None
    for place, size in enumerate(shape):
        if size == new[axis] and math.prod(shape[:place]) == math.prod(new[:axis]):
            return [place]
    return None


def _without(axes: Sequence[int], equation: Equation, axis: int) -> Axes | None:
    rest = [n for n in range(len(_shape(equation))) if n not in set(axes)]
    return [rest[axis]]


def _squeeze(equation: Equation, axis: int) -> Axes | None:
    return _without(equation.params["dimensions"], equation, axis)


def _reduce(equation: Equation, axis: int) -> Axes | None:
    return _without(equation.params["axes"], equation, axis)


def _dot_general(equation: Equation, axis: int) -> Axes | None:
    contracting, batch = equation.params["dimension_numbers"]
    free = [
        [n for n in range(len(_shape(equation, i))) if n not in (*batch[i], *cut)]
        for i, cut in enumerate(contracting)
    ]
    if axis < len(batch[0]):
        return [batch[0][axis], batch[1][axis]]
    axis -= len(batch[0])
    if axis < len(free[0]):
        return [free[0][axis], None]
    return [None, free[1][axis - len(free[0])]]


def _not_along(*names: str) -> Callable[[Equation, int], Axes | None]:
    """Operations that mix elements along the axes in a parameter, along no other."""

    def rule(equation: Equation, axis: int) -> Axes | None:
        for name in names:
            mixed = equation.params[name]
            if axis in (mixed if isinstance(mixed, Sequence) else (mixed,)):
                return None
        return [axis] * len(equation.invars)

    return rule


def _pad(equation: Equation, axis: int) -> Axes | None:
    whole = tuple(equation.params["padding_config"][axis]) == (0, 0, 0)
    return [axis, None] if whole else None


def _slice(equation: Equation, axis: int) -> Axes | None:
    params = equation.params
    strides = params["strides"] or (1,) * len(_shape(equation))
    bounds = params["start_indices"][axis], params["limit_indices"][axis], strides[axis]
    return [axis] if bounds == (0, _shape(equation)[axis], 1) else None


def _iota(equation: Equation, axis: int) -> Axes | None:
    return [] if axis != equation.params["dimension"] and not equation.invars else None


_RULES: dict[str, Callable[[Equation, int], Axes | None]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot_general,
    "rev": _not_along("dimensions"),
    "sort": _not_along("dimension"),
    "concatenate": _not_along("dimension"),
    "split": _not_along("axis"),
    "pad": _pad,
    "slice": _slice,
    "iota": _iota,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _not_along("axis")),
    "cumlogsumexp": _not_along("axis"),
    **dict.fromkeys((*_COMBINE, "reduce_xor", "argmax", "argmin"), _reduce),
}
