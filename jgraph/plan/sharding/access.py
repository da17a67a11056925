"""Accesses of a graph: its sharded variables, and its tables used by rows."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import jax

from jgraph import _compat
from jgraph._compat import Equation, Literal, Var
from jgraph.graph.graph import Graph
from jgraph.graph.rows.rows import Layout
from jgraph.graph.sharding import Sharding
from jgraph.plan.sharding.sharded_values import ShardedLayout

_STATE = {"get": 1, "swap": 2, "addupdate": 2}


@final
@dataclass(slots=True)
class Accesses:
    """Which variables of a graph are cut, and which are read by rows.

    Attributes:
      graph: the graph.
      refs: position of the variable that a Ref is.
      unique: the ids that each ``unique_rows`` or ``join_rows`` gives, and the position
        of that equation.
      layouts: per such equation the layouts of the tables that it is for.
      computed_with: those whose ids are taken by other operations too.
    """

    graph: Graph
    refs: dict[Var, int] = field(default_factory=dict)
    unique: dict[Var, int] = field(default_factory=dict)
    layouts: dict[int, list[Layout]] = field(default_factory=dict)
    computed_with: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        graph = self.graph
        invars = graph.jaxpr.invars[: len(graph.variables)]
        self.refs = {ref: n for n, ref in enumerate(invars)}
        for number, equation in enumerate(graph.equations):
            if equation.primitive.name in {"unique_rows", "join_rows"}:
                self.unique[equation.outvars[0]] = number
            cut = self.rows(equation)
            if equation.primitive.name == "cut_rows":
                continue
            cut = self.spread(equation) or cut
            if cut is None or cut.rows is None:
                taken = [v for v in equation.invars if isinstance(v, Var)]
                self.computed_with |= {
                    self.unique[v] for v in taken if v in self.unique
                }
            else:
                found = self.layouts.setdefault(cut.rows, [])
                if cut.sharding.layout not in found:
                    found.append(cut.sharding.layout)

    @property
    def is_any(self) -> bool:
        """Whether there is anything to do by shards or rows."""
        return bool(self.layouts) or any(v.sharding for v in self.graph.variables)

    def touched(self, equation: Equation) -> list[int]:
        """Returns the positions of the variables that an equation works on."""
        atoms = [v for v in equation.invars if not isinstance(v, Literal)]
        return list(dict.fromkeys(self.refs[v] for v in atoms if v in self.refs))

    def whole(self, equation: Equation) -> ShardedLayout | None:
        """Returns the cut of the sharded variable that is read or written whole."""
        index = self._index(equation)
        if index is None or index or not self.touched(equation):
            return None
        variable = self.graph.variables[self.touched(equation)[0]]
        return None if variable.sharding is None else ShardedLayout(variable.sharding)

    def rows(self, equation: Equation) -> ShardedLayout | None:
        """Returns the cut of the rows that ``T[unique]`` reads or writes."""
        index = self._index(equation)
        if index is None or len(index) != 1 or index[0] not in self.unique:
            return None
        number = self.unique[index[0]]
        table = self.graph.variables[self.refs[equation.invars[0]]]
        kind = "div" if table.table is None else "hash"
        sharding = table.sharding or Sharding(Layout(table.shape[:1], kind))
        params = self.graph.equations[number].params
        rows = params["rows"] if "rows" in params else params["layout"].rows
        if sharding.axis or rows != table.shape[0]:
            return None
        return ShardedLayout(sharding, number)

    def handed_in(self, equation: Equation) -> ShardedLayout | None:
        """Returns the cut of the rows that ``cut_rows`` gives to their shards."""
        if equation.primitive.name != "cut_rows":
            return None
        number = self.unique.get(equation.invars[0], -1)
        layout = equation.params["layout"]
        if layout not in self.layouts.get(number, ()):
            return None
        return ShardedLayout(Sharding(layout), number)

    def spread(self, equation: Equation) -> ShardedLayout | None:
        """Returns the cut of the rows that ``spread_rows`` makes a whole table of."""
        if equation.primitive.name != "spread_rows":
            return None
        layout = equation.params["layout"]
        return ShardedLayout(Sharding(layout), self.unique[equation.invars[0]])

    def _index(self, equation: Equation) -> list[Any] | None:
        """Returns what a plain access takes of axis 0: nothing if it takes all.

        None if this is no access, or one that takes a part in another way.
        """
        first = _STATE.get(equation.primitive.name)
        if first is None or equation.invars[0] not in self.refs:
            return None
        params = equation.params
        indexers = jax.tree.unflatten(params["tree"], equation.invars[first:])
        found = []
        for indexer in indexers:
            if type(indexer).__name__ != "NDIndexer":
                return None
            found += list(_taken(indexer))
        if len(indexers) > 1 or any(v is None for v in found):
            return None
        return found


def _taken(indexer: Any) -> Iterator[Any]:
    """Yields the index of axis 0 if it has one; None for a part of another axis."""
    for axis, (index, size) in enumerate(
        zip(indexer.indices, indexer.shape, strict=True)
    ):
        if hasattr(index, "start"):
            is_all = (index.start, index.size, index.stride) == (0, size, 1)
            if not is_all:
                yield None
        elif axis == 0 and isinstance(index, Var) and len(_shape_of(index)) == 1:
            yield index
        else:
            yield None


def _shape_of(var: Var) -> tuple[int, ...]:
    shape: tuple[int, ...] = _compat.array_type(var).shape
    return shape
