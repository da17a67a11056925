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
from jgraph.plan.lowering.lower import lower
from jgraph.plan.lowering.packed import PackedSegment, packed_function
from jgraph.plan.program.program import SegmentCode

Key: TypeAlias = Hashable


@final
@dataclass(slots=True)
class Lowered:
    """The codes of one graph's segments."""

    _codes: dict[Key, SegmentCode] = field(default_factory=dict)

    def code(
        self, flow: Flow, packed: PackedSegment, platforms: tuple[str, ...]
    ) -> SegmentCode:
        """Returns the code of a segment; see ``lower``."""
        segment = packed.segment
        # Ids make no two of them equal.
        by_rows = segment.row_updates or segment.row_reads
        key = None if by_rows else (platforms, _Names(flow).key(packed))
        if key is not None and key in self._codes:
            return self._codes[key]
        code = lower(flow, segment, packed_function(flow, packed), platforms)
        if key is not None:
            self._codes[key] = code
        return code


@final
@dataclass(slots=True)
class _Names:
    """Values numbered as they first occur, so that keys do not depend on names."""

    flow: Flow
    numbers: dict[Var, int] = field(default_factory=dict)

    def key(self, packed: PackedSegment) -> Key:
        """Returns what is equal for segments that lower to equal code."""
        segment = packed.segment
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
            self._packs([refs[v] for v in run] for run in packed.update_runs),
            self._packs([refs[v] for v in run] for run in packed.read_runs),
            self._packs(packed.packs_in),
            self._packs(packed.packs_out),
        )

    def _packs(self, packs: Iterable[Iterable[Atom]]) -> Key:
        return tuple(map(self._atoms, packs))

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
