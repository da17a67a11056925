"""Blockwise initialization: large initial values made in blocks of rows, in place.

In one go an initial value takes several times its own memory: the bits of random
numbers exist beside the numbers, and a shard is cut from the whole. Here its
computation is followed back from the result, and each block does its rows of every
operation. That the rows are the same bit by bit rests on two facts: the operations of
``_EXACT`` treat rows one by one, and JAX's threefry counts, so that the bits of some
rows follow from the places of their elements (``jax_threefry_partitionable``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random as jex_random

from jgraph import _compat
from jgraph._compat import Equation, Jaxpr, Literal, Var
from jgraph.graph.sharding import array_nbytes
from jgraph.graph.tracing.inline import inline_calls
from jgraph.plan.analysis.axes import is_elementwise, operand_axes, part_params

BLOCK_BYTES = 16 << 20

# Of what ``operand_axes`` knows, what gives the same bits whatever is done besides; a
# matrix product or a sum may add up in another order.
_EXACT = {
    "argmax",
    "argmin",
    "broadcast_in_dim",
    "concatenate",
    "pad",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reshape",
    "rev",
    "sort",
    "split",
    "squeeze",
    "transpose",
}


@final
@dataclass(frozen=True, slots=True)
class _Rows:
    """For row r of the result, row ``offset + stride * r`` along ``axis``."""

    axis: int
    offset: int = 0
    stride: int = 1


def initial_value(
    init: Callable[[], Any], block_nbytes: int = BLOCK_BYTES
) -> tuple[Any, int]:
    """Returns what ``init()`` returns, and the bytes of the largest array on the way.

    To be called while tracing: then the value is a loop over blocks of rows, unless no
    array is larger than a block, or the computation does not go by rows.

    Args:
      init: makes an array.
      block_nbytes: size of a block.

    Example:
      >>> draw = lambda: jax.random.normal(jax.random.key(0), (1000, 8))
      >>> value, largest = initial_value(draw, 1024)
      >>> bool((value == draw()).all()), largest
      (True, 1024)
    """
    jaxpr, consts, out = _compat.make_jaxpr(init)
    size = array_nbytes(out.shape, out.dtype)
    is_key = jnp.issubdtype(out.dtype, jax.dtypes.prng_key)
    if not size or not out.shape or is_key:
        return init(), size
    flat = inline_calls(jaxpr, consts)
    (result,) = flat.jaxpr.outvars
    outputs = {v for equation in flat.jaxpr.eqns for v in equation.outvars}
    if result not in outputs:
        return init(), size
    needed = _needed(flat.jaxpr)
    largest = max(_nbytes(v) for v in needed)
    if largest <= block_nbytes:
        return init(), largest
    count = max(1, out.shape[0] * block_nbytes // size)
    demand = _Demand(flat.jaxpr)
    whole = max((_nbytes(v) for v in demand.whole & outputs), default=0)
    if count >= out.shape[0] or whole > block_nbytes or out.shape[0] >= 1 << 31:
        return init(), largest
    env = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    return demand.value(env, count), block_nbytes


def _nbytes(var: Var) -> int:
    aval: Any = var.aval
    return array_nbytes(aval.shape, aval.dtype)


def _needed(jaxpr: Jaxpr) -> set[Var]:
    """Returns the results of operations that the result follows from."""
    needed = set(_vars(jaxpr.outvars))
    found = set()
    for equation in reversed(jaxpr.eqns):
        if mine := needed.intersection(equation.outvars):
            found |= mine
            needed.update(_vars(equation.invars))
    return found


def _vars(atoms: Sequence[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


@final
class _Demand:
    """What of each value a block needs: rows, or all of it."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._jaxpr = jaxpr
        (self._out,) = jaxpr.outvars
        self.whole: set[Var] = set()
        self._rows: dict[Var, dict[_Rows, None]] = {self._out: {_Rows(0): None}}
        for equation in reversed(jaxpr.eqns):
            self._follow(equation)

    def _follow(self, equation: Equation) -> None:
        wanted = self._wanted(equation)
        cuts = [_operand_rows(equation, rows) for rows in wanted]
        if None in cuts or self.whole.intersection(equation.outvars):
            self.whole.update(equation.outvars, _vars(equation.invars))
            return
        for operands in cuts:
            for atom, rows in zip(equation.invars, operands or (), strict=True):
                if isinstance(atom, Literal):
                    continue
                if rows is None:
                    self.whole.add(atom)
                else:
                    self._rows.setdefault(atom, {})[rows] = None

    def _wanted(self, equation: Equation) -> list[_Rows]:
        found: dict[_Rows, None] = {}
        for out in equation.outvars:
            found |= self._rows.get(out, {})
        return list(found)

    def value(self, env: dict[Var, Any], count: int) -> Any:
        """Returns the result, ``count`` rows at a time.

        Args:
          env: the values of the constants; gets those of what is needed whole.
          count: rows of a block, fewer than the result's.
        """
        for equation in self._jaxpr.eqns:
            if self.whole.intersection(equation.outvars):
                operands = [_of(env, atom) for atom in equation.invars]
                results = _compat.run_equation(equation, operands)
                env.update(zip(equation.outvars, results, strict=True))
        out: Any = self._out.aval
        total = out.shape[0]

        def put(number: Any, value: Any) -> Any:
            # The last block begins early enough to fit.
            start = jnp.minimum(number * count, total - count)
            block = self._block(env, start, count)
            return lax.dynamic_update_slice_in_dim(value, block, start, 0)

        empty = lax.full(out.shape, 0, out.dtype)
        return lax.fori_loop(0, -(-total // count), put, empty)

    def _block(self, env: dict[Var, Any], start: Any, count: int) -> Any:
        parts: dict[tuple[Var, _Rows], Any] = {}

        def part(atom: Any, rows: _Rows | None) -> Any:
            if rows is None or isinstance(atom, Literal):
                return _of(env, atom)
            if (atom, rows) not in parts:
                parts[atom, rows] = _taken(env[atom], rows, start, count)
            return parts[atom, rows]

        for equation in self._jaxpr.eqns:
            if self.whole.intersection(equation.outvars):
                continue
            for rows in self._wanted(equation):
                cut = _operand_rows(equation, rows)
                assert cut is not None  # else its results were made whole
                operands = list(map(part, equation.invars, cut))
                results = _run(equation, operands, rows, start, count)
                for out, result in zip(equation.outvars, results, strict=True):
                    parts[out, rows] = result
        return part(self._out, _Rows(0))


def _of(env: dict[Var, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _operand_rows(equation: Equation, rows: _Rows) -> list[_Rows | None] | None:
    """Returns the rows of each operand, None for all of it; None: not by rows."""
    name = equation.primitive.name
    if name == "random_bits":
        return [None] if _counts(equation) else None
    if name == "iota":
        return None if equation.invars else []
    if name == "slice":
        return [_sliced(equation, rows)]
    if not (name in _EXACT or is_elementwise(name)):
        return None
    axes = operand_axes(equation, rows.axis)
    if axes is None:
        return None
    return [None if a is None else _Rows(a, rows.offset, rows.stride) for a in axes]


def _sliced(equation: Equation, rows: _Rows) -> _Rows:
    params, axis = equation.params, rows.axis
    first = params["start_indices"][axis]
    step = params["strides"][axis] if params["strides"] else 1
    return _Rows(axis, first + step * rows.offset, step * rows.stride)


def _run(
    equation: Equation, operands: list[Any], rows: _Rows, start: Any, count: int
) -> list[Any]:
    """Returns the results of an operation, ``count`` rows of them."""
    name, axis = equation.primitive.name, rows.axis
    if name == "random_bits":
        return [_random_bits(equation, operands[0], rows, start, count)]
    params = part_params(equation, axis, count)
    if name == "iota" and equation.params["dimension"] == axis:
        places = _places(params["shape"], rows, start, jnp.int32)
        return [places.astype(params["dtype"])]
    if name == "slice":
        # The rows were taken already.
        params["start_indices"] = _at(params["start_indices"], axis, 0)
        if params["strides"]:
            params["strides"] = _at(params["strides"], axis, 1)
    return _compat.run_equation(equation, operands, params)


def _at(sizes: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def _places(shape: Sequence[int], rows: _Rows, start: Any, dtype: Any) -> Any:
    """Returns, for each element of a block, its index along the axis in the whole."""
    index = lax.broadcasted_iota(dtype, shape, rows.axis)
    return rows.offset + rows.stride * (start.astype(dtype) + index)


def _taken(value: Any, rows: _Rows, start: Any, count: int) -> Any:
    """Returns the rows of a value that is there whole."""
    span = (count - 1) * rows.stride + 1
    first = rows.offset + rows.stride * start
    part = lax.dynamic_slice_in_dim(value, first, span, axis=rows.axis)
    return lax.slice_in_dim(part, 0, span, rows.stride, axis=rows.axis)


# ------------------------------------------------------------------- random bits


def _counts(equation: Equation) -> bool:
    """Whether the bits of an element follow from the key and the element's place."""
    (key,) = equation.invars
    config: Any = jax.config
    return (
        bool(config.jax_threefry_partitionable)
        and not key.aval.shape
        and key.aval.dtype.name == "key<fry>"
        and max(equation.params["shape"], default=0) < 1 << 32
    )


def _random_bits(
    equation: Equation, key: Any, rows: _Rows, start: Any, count: int
) -> Any:
    """Returns threefry of the places of a block's elements in the whole array."""
    shape, width = equation.params["shape"], equation.params["bit_width"]
    high = low = jnp.zeros(_at(shape, rows.axis, count), jnp.uint32)
    for axis in range(len(shape)):
        mine = rows if axis == rows.axis else _Rows(axis)
        first = start if axis == rows.axis else jnp.zeros((), jnp.int32)
        index = _places(low.shape, mine, first, jnp.uint32)
        above, below = divmod(math.prod(shape[axis + 1 :]), 1 << 32)
        low = low + (more := index * jnp.uint32(below))
        if math.prod(shape) > 1 << 32:  # else all places fit into the lower half
            high = high + lax.mulhi(index, jnp.full_like(index, below))
            high = high + index * jnp.uint32(above) + (low < more)
    first_half, second_half = jax.random.key_data(key)
    above, below = jex_random.threefry2x32_p.bind(first_half, second_half, high, low)
    if width == 64:
        return above.astype(jnp.uint64) << 32 | below.astype(jnp.uint64)
    return (above ^ below).astype(f"uint{width}")
