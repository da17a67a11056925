"""Cost of equations, from their shapes: FLOPs, and peak memory."""

import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

from jgraph import _compat
from jgraph._compat import Atom, Equation, Literal, Var
from jgraph.graph.sizes import assumed_shape, assumed_size

# These move or name data; what they compute, if anything, is not arithmetic.
_MOVES = frozenset(
    {
        *("bitcast_convert_type", "broadcast_in_dim", "concatenate", "copy", "copy_p"),
        *("convert_element_type", "device_put", "expand_dims", "iota", "pad", "rev"),
        *("dynamic_slice", "dynamic_update_slice", "slice", "split", "squeeze"),
        *("gather", "scatter", "get", "swap", "reshape", "transpose", "stop_gradient"),
        *("random_bits", "random_seed", "random_unwrap", "random_wrap"),
    }
)
_OVER_INPUTS = ("reduce", "arg", "cum", "sort", "scatter", "top_k")


def flops_of(equation: Equation) -> float:
    """Returns the floating-point operations of an equation, an estimate.

    A matrix product of (m, k) and (k, n) counts ``2 m k n``, an elementwise operation
    one per element of its result, a reduction one per element that it takes, a scan
    its body as often as it runs, a conditional its dearest branch. Of a ``while`` one
    turn is counted, as nobody knows how many there will be.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> jaxpr = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4)))
      >>> flops_of(jaxpr.eqns[0])
      48.0
    """
    name: str = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * _largest_result(equation) * _elements(shape[n] for n in contracted)
    if name == "conv_general_dilated":
        out_axis = equation.params["dimension_numbers"].rhs_spec[0]
        kernel = list(equation.invars[1].aval.shape)
        kernel[out_axis] = 1
        return 2.0 * _largest_result(equation) * _elements(kernel)
    bodies = [
        flops_of_all(_compat.open_jaxpr(b).eqns)
        for _, b in _compat.inner_jaxprs(equation)
    ]
    if name == "scan":
        return float(assumed_size(equation.params["length"])) * sum(bodies)
    if name == "cond":
        return max(bodies, default=0.0)
    if name.startswith(_OVER_INPUTS):
        return float(_size(equation.invars[0]))
    if bodies:
        return float(sum(bodies))
    return 0.0 if name in _MOVES else float(_largest_result(equation))


def flops_of_all(equations: Iterable[Equation]) -> float:
    """Returns the floating-point operations of equations together."""
    return sum((flops_of(e) for e in equations), 0.0)


def peak_nbytes(equations: Sequence[Equation], *, stored: Container[Var] = ()) -> int:
    """Returns the most bytes of values at a time when equations run in this order.

    A value lives from its equation, or from the beginning if it comes from outside, to
    its last use. XLA needs less where it fuses; so this is an upper bound.

    Args:
      equations: in the order in which they run.
      stored: values that are not counted: they lie elsewhere.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x + 1).sum())(jnp.ones(256))
      >>> peak_nbytes(jaxpr.eqns)
      2048
    """

    def size(var: Var) -> int:
        return 0 if var in stored else nbytes_of_value(var)

    last = {v: n for n, e in enumerate(equations) for v in _vars(e.invars)}
    results = {v for e in equations for v in e.outvars}
    live = sum(size(v) for v in last if v not in results)
    peak = live
    for n, equation in enumerate(equations):
        live += sum(size(v) for v in equation.outvars)
        peak = max(peak, live)
        ended = {v for v in _vars(equation.invars) if last[v] == n}
        ended |= {v for v in equation.outvars if _compat.is_dropped(v)}
        live -= sum(size(v) for v in ended)
    return peak


def nbytes_of_value(atom: Atom) -> int:
    """Returns the bytes of a value; a Ref only names what is stored elsewhere."""
    if _compat.is_ref(atom.aval):
        return 0
    array = _compat.array_type(atom)
    itemsize = getattr(array.dtype, "itemsize", 0)
    return int(_size(atom)) * int(itemsize)


def _largest_result(equation: Equation) -> int:
    return max((_size(v) for v in equation.outvars), default=0)


def _size(atom: Any) -> int:
    return _elements(getattr(atom.aval, "shape", ()))


def _elements(sizes: Iterable[Any]) -> int:
    return math.prod(assumed_shape(sizes))


def _vars(atoms: Iterable[Atom]) -> set[Var]:
    return {a for a in atoms if not isinstance(a, Literal)}
