"""Jaxpr walk with placeholders for tables: reports lookups and whole uses.

Equations without tables are evaluated as they are. What may happen to a table is told
to a visitor: a lookup of whole rows, or a use that needs all of it. Calls that take a
table are entered; a checkpoint stays one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import jax
import numpy as np

from jgraph import _compat
from jgraph._compat import Atom, Equation, Jaxpr, Literal, Var

# Elementwise, and zero at zero: before or after a lookup is the same.
_CASTS = {"convert_element_type", "copy", "copy_p", "reduce_precision", "neg"}


@final
@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Stands for a table, or for one that was cast.

    Attributes:
      number: which one.
      value: its rows, all or those that are here.
      casts: equations that were applied to it, elementwise.
    """

    number: int
    value: Any
    casts: tuple[Equation, ...] = ()

    def rows(self) -> Any:
        """Returns the rows with the casts applied."""
        value = self.value
        for equation in self.casts:
            params = equation.primitive.get_bind_params(equation.params)
            value = equation.primitive.bind(value, **params)
        return value


class Visitor(Protocol):
    """Decides what a use of a table means."""

    def lookup(self, table: Table, equation: Equation, index: Any) -> Any:
        """Returns the rows that a ``gather`` along axis 0 asks for."""

    def whole(self, table: Table, equation: Equation | None) -> Any:
        """Returns the table for a use of another kind; None: it is a result."""

    def checkpoint(
        self, fn: Callable[..., list[Any]], equation: Equation
    ) -> Callable[..., list[Any]]:
        """Returns the body of a checkpoint as it shall be run."""


def walk(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], visitor: Visitor
) -> list[Any]:
    """Returns the results of a jaxpr on ``args``, some of which are tables.

    Args:
      jaxpr: an open jaxpr.
      consts: the values of its ``constvars``.
      args: arrays and tables, one per operand.
      visitor: is asked about each use of a table.
    """
    results = _Walk(visitor).body(jaxpr, consts, args, None)
    return [visitor.whole(r, None) if isinstance(r, Table) else r for r in results]


@final
class _Walk:
    def __init__(self, visitor: Visitor) -> None:
        self._visitor = visitor

    def body(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        caller: Equation | None,
    ) -> list[Any]:
        env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        plain: list[Equation] = []
        for inner in jaxpr.eqns:
            equation = inner
            if caller is not None:
                equation = _compat.with_outer_scope(inner, caller)
            # What is not evaluated yet is of plain equations.
            operands = [env.get(v) for v in equation.invars if isinstance(v, Var)]
            if not any(isinstance(value, Table) for value in operands):
                plain.append(equation)
                continue
            _evaluate(plain, env)
            plain = []
            results = self._use(equation, [_of(env, v) for v in equation.invars])
            env.update(zip(equation.outvars, results, strict=True))
        _evaluate(plain, env)
        return [_of(env, v) for v in jaxpr.outvars]

    def _use(self, equation: Equation, operands: list[Any]) -> list[Any]:
        first = operands[0]
        if isinstance(first, Table):
            if equation.primitive.name in _CASTS and len(operands) == 1:
                return [replace(first, casts=(*first.casts, equation))]
            if is_lookup(equation) and not isinstance(operands[1], Table):
                return [self._visitor.lookup(first, equation, operands[1])]
        call = _compat.call_body(equation)
        if call is not None and not equation.primitive.name.startswith("custom_"):
            return self._call(equation, *call, operands)
        arrays = [
            self._visitor.whole(x, equation) if isinstance(x, Table) else x
            for x in operands
        ]
        pairs = zip(equation.invars, arrays, strict=True)
        env = {v: x for v, x in pairs if isinstance(v, Var)}
        _evaluate([equation], env)
        return [env.get(v) for v in equation.outvars]

    def _call(
        self,
        equation: Equation,
        body: Jaxpr,
        consts: Sequence[Any],
        operands: list[Any],
    ) -> list[Any]:
        if not _compat.is_checkpoint(equation):
            return self.body(body, consts, operands, equation)
        places = [i for i, x in enumerate(operands) if not isinstance(x, Table)]

        def run(*arrays: Any) -> list[Any]:
            arguments = list(operands)
            for place, array in zip(places, arrays, strict=True):
                arguments[place] = array
            results = self.body(body, consts, arguments, equation)
            whole = self._visitor.whole
            return [whole(r, equation) if isinstance(r, Table) else r for r in results]

        run = self._visitor.checkpoint(run, equation)
        return run(*(operands[i] for i in places))


def _of(env: dict[Var, Any], atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _evaluate(equations: Sequence[Equation], env: dict[Var, Any]) -> None:
    """Evaluates equations without tables, with their scopes and source lines."""
    if not equations:
        return
    outputs = dict.fromkeys(v for e in equations for v in e.outvars)
    inputs = dict.fromkeys(v for e in equations for v in e.invars if isinstance(v, Var))
    free = [v for v in inputs if v not in outputs]
    results = [v for v in outputs if not _compat.is_dropped(v)]
    jaxpr = _compat.build_jaxpr(invars=free, outvars=results, equations=equations)
    values = jax.core.eval_jaxpr(jaxpr, (), *(env[v] for v in free))
    env.update(zip(results, values, strict=True))


def is_lookup(equation: Equation) -> bool:
    """Whether the equation gathers whole rows along axis 0, one index each."""
    if equation.primitive.name != "gather":
        return False
    table, index = equation.invars
    numbers, sizes = (
        equation.params["dimension_numbers"],
        equation.params["slice_sizes"],
    )
    return (
        tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(sizes) == (1, *table.aval.shape[1:])
        and bool(np.issubdtype(index.aval.dtype, np.integer))
    )
