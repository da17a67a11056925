"""Row accesses of a segment: variables that it uses by rows only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

from jgraph import _compat
from jgraph._compat import Atom, Equation, Literal, Var
from jgraph.plan.analysis.flow import Flow, Op

RowAccess: TypeAlias = tuple[int, Var]
"""(variable, routed ids)."""


def row_accesses(flow: Flow, ops: Sequence[Op]) -> dict[int, Var]:
    """Returns the ids of each variable that ``ops`` use by the rows of these ids only.

    A variable of which they use anything else is taken whole: what one access writes,
    the next may read under another index.
    """
    found: dict[int, set[Var | None]] = {}
    for op in ops:
        ids = op.rows if flow.is_row_access(op) else None
        for variable in {*(v for v, _ in op.reads), *op.writes}:
            found.setdefault(variable, set()).add(ids)
    by_rows = {}
    for variable, all_ids in found.items():
        ids = next(iter(all_ids))
        if len(all_ids) == 1 and ids is not None:
            by_rows[variable] = ids
    return by_rows


@final
@dataclass(slots=True)
class RowValues:
    """A segment's equations with its rows as plain values.

    Attributes:
      inputs: the value that stands for the rows of each variable at the beginning.
      outputs: what the rows of each variable are at the end.
      equations: the others, on these values.
    """

    inputs: dict[int, Var] = field(default_factory=dict)
    outputs: dict[int, Atom] = field(default_factory=dict)
    equations: list[Equation] = field(default_factory=list)
    _names: dict[Var, Atom] = field(default_factory=dict)

    def add(self, op: Op, variable: int | None) -> None:
        """Takes the next operation.

        Args:
          op: the operation.
          variable: which one's rows it reads or writes; None if it does neither.
        """
        equation = op.equation
        if variable is None:
            renamed = _compat.rebuild_equation(equation, self.renamed, equation.outvars)
            self.equations.append(renamed)
            return
        (out,) = equation.outvars
        if variable not in self.inputs:
            self.inputs[variable] = _compat.new_var(out.aval)
            self.outputs[variable] = self.inputs[variable]
        self._names[out] = self.outputs[variable]
        if op.writes:
            self.outputs[variable] = self.renamed(equation.invars[1])

    def renamed(self, atom: Atom) -> Atom:
        """Returns what stands for a value of the graph."""
        return atom if isinstance(atom, Literal) else self._names.get(atom, atom)
