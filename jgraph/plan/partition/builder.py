"""Builder of one partition: emits its nodes in order."""

from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from jgraph._compat import Atom, Literal, Var
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ConstNode, Node, ValueId, ValueType
from jgraph.plan.program.types import is_float0, to_plain, value_type


@final
@dataclass(slots=True)
class Builder:
    """One partition while its nodes are emitted."""

    task: TaskName
    nodes: list[Node] = field(default_factory=list)
    types: list[ValueType] = field(default_factory=list)
    ids: dict[Any, ValueId] = field(default_factory=dict)
    variables: dict[int, int] = field(default_factory=dict)
    writer: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)
    made_here: set[ValueId] = field(default_factory=set)
    _alone: int | None = None

    def new(self, type_: ValueType) -> ValueId:
        """Returns the id of a new value."""
        self.types.append(type_)
        return len(self.types) - 1

    def define(self, var: Var, type_: ValueType) -> ValueId:
        """Returns the id that ``var`` has from now on."""
        self.ids[var] = self.new(type_)
        return self.ids[var]

    def variable(self, index: int) -> int:
        """Returns the number that a variable of the graph has here."""
        return self.variables.setdefault(index, len(self.variables))

    def constant(self, atom: Atom, value: Any) -> ValueId:
        """Returns the id of a constant; makes its node once."""
        key: Any = (id(atom), "literal") if isinstance(atom, Literal) else atom
        if key not in self.ids:
            self.ids[key] = self.new(value_type(atom.aval))
            self.nodes.append(ConstNode(_array(atom, value), self.ids[key]))
        return self.ids[key]

    def order(self, reads: set[int], writes: set[int]) -> tuple[int, ...]:
        """Returns the earlier nodes that a node on these variables must follow."""
        node = len(self.nodes)
        after = {self.writer[v] for v in reads | writes if v in self.writer}
        for v in writes:
            after.update(self.readers.pop(v, ()))
            self.writer[v] = node
        for v in reads - writes:
            self.readers.setdefault(v, []).append(node)
        return tuple(sorted(after))

    def order_alone(self) -> tuple[int, ...]:
        """Returns the earlier node that the next one follows if both are alone."""
        last, self._alone = self._alone, len(self.nodes)
        return () if last is None else (last,)


def _array(atom: Atom, value: Any) -> np.ndarray[Any, Any]:
    type_ = value_type(atom.aval)
    if is_float0(atom.aval):
        return np.zeros(type_.shape, type_.np_dtype)
    plain = np.asarray(to_plain(value) if hasattr(value, "dtype") else value)
    return plain.astype(type_.np_dtype)
