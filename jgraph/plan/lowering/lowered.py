"""Cache of lowered segments: segments of equal operations share their code.

Towers of one model on several workers, and the passes of a pipeline over its
microbatches, differ only in the names of their values.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np

from jgraph._compat import Atom, Literal, Var
from jgraph.plan.analysis.flow import Flow, Op
from jgraph.plan.lowering.lower import Segment, lower
from jgraph.plan.program.program import SegmentCode

Key: TypeAlias = Hashable


@final
@dataclass(slots=True)
class Lowered:
    """The codes of one graph's segments."""

    _codes: dict[Key, SegmentCode] = field(default_factory=dict)

    def code(
        self, flow: Flow, segment: Segment, platforms: tuple[str, ...]
    ) -> SegmentCode:
        """Returns the code of a segment; see ``lower``."""
        if segment.row_updates or segment.row_reads:
            return lower(flow, segment, platforms)  # ids make no two of them equal
        key = platforms, _Names(flow).key(segment)
        if key not in self._codes:
            self._codes[key] = lower(flow, segment, platforms)
        return self._codes[key]


@final
@dataclass(slots=True)
class _Names:
    """Values numbered as they first occur, so that keys do not depend on names."""

    flow: Flow
    numbers: dict[Var, int] = field(default_factory=dict)

    def key(self, segment: Segment) -> Key:
        """Returns what is equal for segments that lower to equal code."""
        specs = self.flow.graph.variables
        refs = self.flow.graph.jaxpr.invars[: len(specs)]
        return (
            tuple(self._op(op) for op in segment.ops),
            self._atoms(refs[v] for v in segment.updates),
            self._atoms(refs[v] for v in segment.reads),
            self._atoms(segment.inputs),
            self._atoms(segment.outs),
            self._atoms(refs[v] for v, _ in segment.blind),
            tuple(place for _, place in segment.blind),
        )

    def _op(self, op: Op) -> Key:
        equation = op.equation
        params = dict(equation.params)
        if equation.primitive.name == "alone":
            del params["label"]  # names the call, for people
        return (
            equation.primitive,
            getattr(equation, "ctx", None),  # JAX makes equal ones one object
            tuple((name, _hashable(params[name])) for name in sorted(params)),
            op.whole,
            self._atoms(equation.invars),
            self._atoms(equation.outvars),
        )

    def _atoms(self, atoms: Iterable[Atom]) -> Key:
        return tuple(self._atom(atom) for atom in atoms)

    def _atom(self, atom: Atom) -> Key:
        if isinstance(atom, Literal):
            return str(atom.aval), np.asarray(atom.val).tobytes()
        if self.flow.is_small_const(atom):
            return "constant", id(self.flow.consts[atom])
        number = self.numbers.setdefault(atom, len(self.numbers))
        return number, str(atom.aval)


def _hashable(value: Any) -> Key:
    """Returns a value, or what tells it from all other objects of the graph."""
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value), value
