"""Work of operations, from their shapes: FLOPs, bytes, kernels, after fusion.

XLA fuses elementwise operations: what they make and only one of them takes is never in
memory. Products, convolutions and whatever else has a kernel of its own read and write
all of theirs.
"""

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from jgraph import _compat
from jgraph._compat import Atom, Equation, Literal, Var
from jgraph.graph.cost import flops_of, nbytes_of_value
from jgraph.graph.sizes import assumed_shape, assumed_size
from jgraph.plan.program.types import num_elements

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
_FUSED = re.compile(
    r"(add|add_any|sub|mul|div|neg|abs|sign|max|min|integer_pow|square|sqrt|rsqrt"
    r"|rem|floor|ceil|round|select_n|clamp|convert_element_type|copy|copy_p|and|or|not"
    r"|xor|eq|ne|lt|le|gt|ge|is_finite|stop_gradient|shift_.*|one_minus_square"
    r"|broadcast_in_dim|iota|reshape|squeeze|expand_dims|slice|rev|pad|nextafter"
    r"|exp|exp2|expm1|log|log1p|tanh|sinh|cosh|tan|sin|cos|asin|acos|atan|atan2|logistic"
    r"|pow|erf|erfc|erf_inv|cbrt|lgamma|digamma|optimization_barrier|optimisation_.*)\Z"
)
_SLOW = re.compile(
    r"(exp|exp2|expm1|log|log1p|tanh|sinh|cosh|tan|sin|cos|asin|acos|atan|atan2|logistic"
    r"|pow|erf|erfc|erf_inv|cbrt|lgamma|digamma|sort|top_k)\Z"
)
_NOTHING = frozenset({"get", "swap", "reshape", "squeeze", "expand_dims", "iota"})
# XLA's own count knows these, and their shapes alone do not say it.
_ASK_XLA = frozenset(
    {"cholesky", "triangular_solve", "fft", "reduce_window_sum", "reduce_window_max"}
)
_PARTS = ("gather", "dynamic_slice", "dynamic_update_slice", "scatter")
_THREEFRY_OPS = 60.0


@final
@dataclass(frozen=True, slots=True)
class Work:
    """What some operations ask for; of two after each other, the sum.

    Attributes:
      flops: of products and convolutions.
      elements: results of simple operations, counted one by one.
      slow: results of exponentials, logarithms and their like.
      nbytes: read and written.
      kernels: pieces that XLA runs one after the other.

    Example:
      >>> Work(flops=2.0) + Work(flops=3.0, kernels=1)
      Work(flops=5.0, elements=0.0, slow=0.0, nbytes=0.0, kernels=1)
    """

    flops: float = 0.0
    elements: float = 0.0
    slow: float = 0.0
    nbytes: float = 0.0
    kernels: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.elements + other.elements,
            self.slow + other.slow,
            self.nbytes + other.nbytes,
            self.kernels + other.kernels,
        )

    def times(self, turns: float) -> "Work":
        """Returns the work of that many turns."""
        return Work(
            self.flops * turns,
            self.elements * turns,
            self.slow * turns,
            self.nbytes * turns,
            self.kernels * turns,
        )


def work_of(equations: Sequence[Equation], needed: Iterable[Atom] = ()) -> Work:
    """Returns the work of equations that are compiled together.

    Args:
      equations: in program order.
      needed: values that others take.

    Example:
      >>> import jax.numpy as jnp
      >>> jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(x + 1) * 2)(jnp.ones(256))
      >>> work_of(jaxpr.eqns, jaxpr.jaxpr.outvars)
      Work(flops=0.0, elements=512.0, slow=256.0, nbytes=2048.0, kernels=1)
    """
    takers: dict[Var, list[Equation]] = {}
    for equation in equations:
        for var in _vars(equation.invars):
            takers.setdefault(var, []).append(equation)
    leaving = set(_vars(needed))
    # A value that only one equation takes, and is fused with, is not written.
    hidden = {
        v
        for e in equations
        if _fuses(e)
        for v in e.outvars
        if v not in leaving and len(takers.get(v, ())) <= 1
        if all(map(_takes_fused, takers.get(v, ())))
    }
    return sum((_one(e, hidden) for e in equations), Work())


def _one(equation: Equation, hidden: set[Var]) -> Work:
    name: str = equation.primitive.name
    bodies = [
        work_of(b.eqns, b.outvars)
        for b in (_compat.open_jaxpr(j) for _, j in _compat.inner_jaxprs(equation))
    ]
    if name == "scan":
        turns = float(assumed_size(equation.params["length"]))
        return sum(bodies, Work(kernels=1)).times(turns)
    if name == "cond":
        return max(bodies, key=lambda w: (w.flops, w.nbytes), default=Work())
    if bodies and not name.startswith(("reduce", "scatter", "custom_linear_solve")):
        return sum(bodies, Work())
    if name in _NOTHING:
        return Work()
    nbytes = sum(
        nbytes_of_value(v)
        for v in {*_vars(equation.invars), *_vars(equation.outvars)}
        if v not in hidden
    )
    if name in _PRODUCTS:
        return Work(flops=flops_of(equation), nbytes=nbytes, kernels=1)
    if name in _ASK_XLA:
        return Work(flops=_xla_flops(equation), nbytes=nbytes, kernels=1)
    if name.startswith(_PARTS):
        return _of_a_part(equation)
    is_hidden = _fuses(equation) and hidden.issuperset(equation.outvars)
    return _elementwise(equation, nbytes, kernels=0 if is_hidden else 1)


def _of_a_part(equation: Equation) -> Work:
    """Returns the work of what takes a part of an array, or replaces one."""
    name = equation.primitive.name
    if name in {"gather", "dynamic_slice"}:
        part, times = equation.outvars[0], 2.0
    elif name == "dynamic_update_slice":
        part, times = equation.invars[1], 3.0
    else:
        part, times = equation.invars[-1], 3.0
    return Work(
        elements=float(num_elements(part.aval)),
        nbytes=times * nbytes_of_value(part),
        kernels=1,
    )


def _elementwise(equation: Equation, nbytes: float, kernels: int) -> Work:
    name = equation.primitive.name
    size = float(max((num_elements(v.aval) for v in equation.outvars), default=0))
    if name.startswith(("random_bits", "threefry")):
        return Work(elements=_THREEFRY_OPS * size, nbytes=nbytes, kernels=kernels)
    if not _SLOW.match(name):
        return Work(elements=flops_of(equation), nbytes=nbytes, kernels=kernels)
    if name == "sort":
        size *= math.log2(max(2.0, size))
    return Work(slow=size, nbytes=nbytes, kernels=kernels)


def _fuses(equation: Equation) -> bool:
    return bool(_FUSED.match(equation.primitive.name))


def _takes_fused(equation: Equation) -> bool:
    """Whether an operation computes its operands itself where they are elementwise."""
    return _fuses(equation) or equation.primitive.name.startswith("reduce")


def _xla_flops(equation: Equation) -> float:
    """Returns the operations that XLA counts in one equation."""
    inputs = [v for v in equation.invars if not isinstance(v, Literal)]
    types = tuple((assumed_shape(v.aval.shape), v.aval.dtype) for v in inputs)
    return _counted(_Call(equation), types)


@final
class _Call:
    """A call of an equation; equal ones are one key of the cache."""

    def __init__(self, equation: Equation) -> None:
        self.equation = equation
        self._key = equation.primitive, str(sorted(equation.params.items(), key=str))

    def run(self, *args: Any) -> list[Any]:
        """Returns the results, of these operands that are no literals."""
        values = iter(args)
        operands = [
            v.val if isinstance(v, Literal) else next(values)
            for v in self.equation.invars
        ]
        return _compat.run_equation(self.equation, operands)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=1024)
def _counted(call: _Call, types: tuple[tuple[tuple[int, ...], Any], ...]) -> float:
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    found: Any = jax.jit(call.run).lower(*structs).cost_analysis()
    flops = float((found or {}).get("flops", 0.0))
    return max(flops, flops_of(call.equation))


def _vars(atoms: Iterable[Atom]) -> list[Var]:
    return [a for a in atoms if not isinstance(a, Literal)]
