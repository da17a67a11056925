"""Row-polymorphic export: code of a segment for any number of rows.

A graph has the rows of a step in arrays of fixed length, padded at the end. Where a
segment does the same to every row, or adds rows of which the padding is zeros, its
result does not depend on how much padding there is: it is exported with the number of
rows left open (a symbolic dimension), and run with about as many as there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.export
import numpy as np
from jax import lax

from jgraph import _compat
from jgraph._compat import Atom, Equation, Jaxpr, Literal, Var
from jgraph.graph.rows.rows import may_be_ids
from jgraph.plan.analysis.axes import operand_axes, part_params, result_axis
from jgraph.plan.analysis.run_each import run_each
from jgraph.plan.program.row_values import LEAST_ROWS

# What is zero where all operands are, where one is, and where the first is.
_ALL = {"add", "add_any", "sub", "max", "min"}
_ANY = {"mul", "and"}
_FIRST = {
    *("abs", "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "cumsum"),
    *("div", "floor", "integer_pow", "neg", "reduce_max", "reduce_min", "reduce_sum"),
    *("reshape", "round", "sign", "sqrt", "square", "squeeze", "tanh", "transpose"),
}


@final
@dataclass(frozen=True, slots=True)
class Count:
    """Along ``axis`` a value has as many elements as there are ``ids``."""

    axis: int
    ids: Var


Counts: TypeAlias = "dict[Var, Count]"


def find_counts(
    jaxpr: Jaxpr, ragged: Mapping[Var, Var], outvars: Sequence[Atom]
) -> Counts:
    """Returns which values of a segment have as many rows as there are ids.

    Args:
      jaxpr: the segment.
      ragged: those that it takes, with the ids whose rows they have.
      outvars: results of which nobody knows how many rows are there.

    Returns:
      Nothing if a result depends on how much padding there is.
    """
    found = {v: Count(0, ids) for v, ids in ragged.items()}
    if all(_compat.array_type(v).shape[0] <= LEAST_ROWS for v in ragged):
        return {}
    zeros = {v for v, ids in ragged.items() if v is not ids and not may_be_ids(v.aval)}
    for equation in jaxpr.eqns:
        cut = [n for n, v in enumerate(equation.invars) if _in(v, found)]
        if cut:
            count = _result(equation, cut, found)
            if count is None:
                if not _adds_zeros(equation, found, zeros):
                    return {}
                continue  # a sum of rows has no padding, and is not zero
            found.update(dict.fromkeys(equation.outvars, count))
        if _is_zero(equation, zeros):
            zeros.update(equation.outvars)
    return {} if any(_in(v, found) for v in outvars) else found


def run(jaxpr: Jaxpr, counts: Counts, args: Sequence[Any]) -> list[Any]:
    """Returns the results of a segment on as many rows as ``args`` have."""
    sizes = {
        counts[v].ids: value.shape[counts[v].axis]
        for v, value in zip(jaxpr.invars, args, strict=True)
        if v in counts
    }

    def rule(equation: Equation, operands: list[Any]) -> list[Any]:
        params = equation.params
        count = counts.get(equation.outvars[0]) if equation.outvars else None
        if count is not None:
            size = sizes[count.ids]
            axes = operand_axes(equation, count.axis) or ()
            params = part_params(equation, count.axis, size)
            for n, axis in enumerate(axes):
                if axis is not None and not _in(equation.invars[n], counts):
                    operands[n] = lax.slice_in_dim(operands[n], 0, size, axis=axis)
        return _compat.run_equation(equation, operands, params)

    return run_each(jaxpr, args, rule)


def open_types(types: Sequence[Any], ids: Sequence[Var | None]) -> list[Any]:
    """Returns what a segment is exported for.

    Args:
      types: of its arguments.
      ids: of each, whose number of rows is left open; None: it has the type's.
    """
    most = {v: t.shape[0] for v, t in zip(ids, types, strict=True) if v is not None}
    names = {v: f"rows{n}" for n, v in enumerate(most)}
    scope = jax.export.SymbolicScope([f"{names[v]} <= {n}" for v, n in most.items()])
    sizes = {
        v: jax.export.symbolic_shape(name, scope=scope) for v, name in names.items()
    }
    return [
        t if v is None else jax.ShapeDtypeStruct((*sizes[v], *t.shape[1:]), t.dtype)
        for t, v in zip(types, ids, strict=True)
    ]


def _in(atom: Atom, counts: Mapping[Var, Any]) -> bool:
    return not isinstance(atom, Literal) and atom in counts


def _result(equation: Equation, cut: Sequence[int], counts: Counts) -> Count | None:
    """Returns the count of the results, None if they have not one."""
    first = counts[equation.invars[cut[0]]]
    axis = result_axis(equation, cut[0], first.axis)
    if axis is None:
        return None
    axes = operand_axes(equation, axis) or ()
    same = all(
        Count(axes[n] or 0, first.ids) == counts[equation.invars[n]] for n in cut
    )
    return (
        Count(axis, first.ids)
        if same and None not in map(axes.__getitem__, cut)
        else None
    )


def _adds_zeros(equation: Equation, counts: Counts, zeros: set[Var]) -> bool:
    (operand, *others) = equation.invars
    is_sum = equation.primitive.name == "reduce_sum" and not others
    return (
        is_sum and operand in zeros and counts[operand].axis in equation.params["axes"]
    )


def _is_zero(equation: Equation, zeros: set[Var]) -> bool:
    """Whether the results are zeros where there is padding."""
    name = equation.primitive.name
    known = [
        not np.any(v.val) if isinstance(v, Literal) else v in zeros
        for v in equation.invars
    ]
    if name == "select_n":
        return all(known[1:])
    if name == "integer_pow" and equation.params["y"] < 1:
        return False
    return (
        (name in _ALL and all(known))
        or (name in _ANY and any(known))
        or (name in _FIRST and known[0])
    )
