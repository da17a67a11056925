"""State accesses by shard: reads and writes of sharded variables and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from jgraph import _compat
from jgraph._compat import Equation, Literal, Var
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import VariableSpec
from jgraph.graph.rows.padded_rows import joined_ids, spread_over, whole_ids
from jgraph.graph.rows.rows import Layout, route_rows, unique_rows
from jgraph.graph.sharding import Sharding
from jgraph.plan.sharding.access import Accesses
from jgraph.plan.sharding.sharded_values import Route, ShardedLayout, Value, Values
from jgraph.plan.sharding.wanted import is_placed


@final
@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of a graph in shards.

    Attributes:
      accesses: how the graph uses it.
      values: the values so far.
      refs: the Refs of each variable's shards.
    """

    accesses: Accesses
    values: Values
    refs: dict[Var, list[Any]]

    def run(self, equation: Equation, stamp: DeviceSpec) -> None:
        """Does what an equation does to variables."""
        cut = self.accesses.rows(equation)
        if cut is not None:
            self._access(equation, cut, self.values.route(cut).local)
            return
        cut = self.accesses.whole(equation)
        if cut is not None:
            self._access(equation, cut, None)
            return
        if not is_placed(stamp):
            for atom in equation.invars:
                if not self._is_ref(atom):
                    self.values.note_gather(equation, atom, None)
        refs = [v for v in equation.invars if self._is_ref(v)]
        if any(self._spec(ref).sharding for ref in refs):
            self._on_copies(equation, stamp)
        else:
            with _compat.under(equation):
                operands = [
                    self.refs[v][0] if self._is_ref(v) else self.values.whole(v, stamp)
                    for v in equation.invars
                ]
            self.values.results(equation, _compat.run_equation(equation, operands))

    def hand_in(self, equation: Equation, cut: ShardedLayout) -> None:
        """Gives each shard the ids and rows that ``cut_rows`` has for it."""
        with _compat.under(equation):
            rows = self.values.parts(equation.invars[1], cut)
        both = self.values.route(cut).local, rows
        for var, parts in zip(equation.outvars, both, strict=True):
            value = Value(parts[0])
            if cut.shards > 1:
                value = Value(parts={_kept(var, cut.shards): tuple(parts)})
            self.values.entries[var] = value

    def spread(self, equation: Equation, cut: ShardedLayout) -> None:
        """Makes each shard of a table of the rows that it has of ``spread_rows``."""
        layout = cut.sharding.layout
        rows = self.values.parts(equation.invars[1], cut)
        with _compat.under(equation):
            parts = tuple(
                map(spread_over, self.values.route(cut).local, rows, layout.sizes)
            )
        value = Value(parts[0])
        if cut.shards > 1:
            origin = self.values.of(equation.invars[1]).origin
            value = Value(parts={ShardedLayout(cut.sharding): parts}, origin=origin)
        self.values.entries[equation.outvars[0]] = value

    def route(self, number: int, equation: Equation, stamp: DeviceSpec) -> None:
        """Replaces ``unique_rows`` by one ``route_rows`` per layout of its tables.

        What ``join_rows`` joins is at the shards already: there it stays.
        """
        if equation.primitive.name == "join_rows":
            self._join(number, equation)
            return
        params = {k: equation.params[k] for k in ("feature", "drop", "most")}
        layouts = self.accesses.layouts[number]
        in_order = all(la.kind != "mod" or la.shards == 1 for la in layouts)
        with _compat.under(equation):
            ids = self.values.whole(equation.invars[0], stamp)
            unique, positions = unique_rows(ids, rows=equation.params["rows"], **params)
            for layout in layouts:
                routed, local = route_rows(ids, layout=layout, **params)
                order = inverse = None
                if in_order:
                    positions = routed
                else:
                    order = _places(positions, routed)
                    inverse = _places(routed, positions)
                self.values.routes[number, layout] = Route(
                    layout, local, order, inverse
                )
        self.values.results(equation, [unique, positions])
        if number in self.accesses.computed_with:
            for layout in layouts:
                self._cut_ids(
                    equation.outvars[0], ShardedLayout(Sharding(layout), number)
                )

    def _join(self, number: int, equation: Equation) -> None:
        layout: Layout = equation.params["layout"]
        cut = ShardedLayout(Sharding(layout), number)
        ids, rows = (
            self.values.parts(v, _kept(v, cut.shards))
            if cut.shards > 1
            else (self.values.whole(v),)
            for v in equation.invars
        )
        kind = "hash" if layout.kind == "hash" else "div"
        with _compat.under(equation):
            local = tuple(
                route_rows(part, layout=Layout((size,), kind), drop=True)[1][0]
                for part, size in zip(ids, layout.sizes, strict=True)
            )
            self.values.routes[number, layout] = Route(layout, local)
            indices = ids if kind == "hash" else local
            whole = tuple(whole_ids(x, n, layout) for n, x in enumerate(indices))
            unique = joined_ids(local, whole, layout)
        self.values.entries[equation.outvars[0]] = Value(unique)
        origin = self.values.of(equation.invars[1]).origin
        self.values.entries[equation.outvars[1]] = Value(
            parts={cut: rows}, origin=origin
        )
        if number in self.accesses.computed_with:
            self.values.entries[equation.outvars[0]].parts[cut] = whole

    def _cut_ids(self, unique: Var, cut: ShardedLayout) -> None:
        """Gives each shard its ids, padded as the whole ones are."""
        layout = cut.sharding.layout
        self.values.entries[unique].parts[cut] = tuple(
            whole_ids(local, shard, layout)
            for shard, local in enumerate(self.values.route(cut).local)
        )

    def _is_ref(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in self.refs

    def _spec(self, ref: Var) -> VariableSpec:
        return self.accesses.graph.variables[self.accesses.refs[ref]]

    def _access(
        self, equation: Equation, cut: ShardedLayout, local: Sequence[Any] | None
    ) -> None:
        """Reads or writes each shard: all of it, or its rows."""
        ref = equation.invars[0]
        kind = equation.primitive.name
        places = [...] * cut.shards if local is None else local
        pairs = list(zip(self.refs[ref], places, strict=True))
        old: tuple[Any, ...] = ()
        with _compat.under(equation):
            if kind != "swap" or not _compat.is_dropped(equation.outvars[0]):
                old = tuple(shard[place] for shard, place in pairs)
                name = self._spec(ref).name
                for out in equation.outvars:
                    self.values.entries[out] = Value(parts={cut: old}, origin=name)
            if kind != "get":
                new = self.values.parts(equation.invars[1], cut)
                if kind == "addupdate":
                    new = tuple(map(lax.add, old, new))
                for (shard, place), part in zip(pairs, new, strict=True):
                    shard[place] = part

    def _on_copies(self, equation: Equation, stamp: DeviceSpec) -> None:
        """Puts variables together, does it on private copies, and cuts them again."""
        atoms = [v for v in equation.invars if not isinstance(v, Literal)]
        whole = self.values.whole
        with _compat.under(equation):
            values = [
                self._read(equation, v) if self._is_ref(v) else whole(v, stamp)
                for v in atoms
            ]
            run = jax.jit(lambda *arrays: _run_on_copies(equation, atoms, arrays))
            results, after = run(*values)
            refs = [v for v in atoms if v in self.refs]
            for ref, value in zip(refs, after, strict=True):
                if _compat.writes(equation, ref):
                    self._write(ref, value)
        self.values.results(equation, results)

    def _read(self, equation: Equation, ref: Var) -> Any:
        spec, shards = self._spec(ref), self.refs[ref]
        if spec.sharding is None:
            return shards[0][...]
        self.values.note(equation, spec.name, spec.aval)
        return spec.sharding.join([shard[...] for shard in shards])

    def _write(self, ref: Var, value: Any) -> None:
        sharding = self._spec(ref).sharding
        parts = (value,) if sharding is None else sharding.split(value)
        for shard, part in zip(self.refs[ref], parts, strict=True):
            shard[...] = part


def _kept(var: Var, shards: int) -> ShardedLayout:
    """Returns the cut of ids or rows that lie one shard after the other."""
    size = _compat.array_type(var).shape[0] // shards
    return ShardedLayout(Sharding(Layout((size,) * shards)))


def _places(source: Any, target: Any) -> Any:
    """Returns, for each place in the source order, the place in the target order."""
    count = source.shape[0]
    return jnp.full(count, count, source.dtype).at[source].set(target, mode="drop")


def _run_on_copies(
    equation: Equation, atoms: Sequence[Var], arrays: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    refs = {
        v: jax.new_ref(x)
        for v, x in zip(atoms, arrays, strict=True)
        if _compat.is_ref(v.aval)
    }
    arguments = iter([refs.get(v, x) for v, x in zip(atoms, arrays, strict=True)])
    operands = [
        None if isinstance(v, Literal) else next(arguments) for v in equation.invars
    ]
    results = _compat.run_equation(equation, operands)
    return results, [ref[...] for ref in refs.values()]
