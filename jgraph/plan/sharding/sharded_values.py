"""Sharded values: values of a graph that exist by shards, whole, or both."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax.numpy as jnp

from jgraph import _compat
from jgraph._compat import Atom, Equation, Literal, Var
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import Gathered
from jgraph.graph.rows.rows import Layout, merge_rows, split_rows
from jgraph.graph.sharding import Sharding
from jgraph.plan.analysis.axes import Axes, operand_axes, part_params
from jgraph.plan.program.types import value_type

_ANYWHERE = DeviceSpec()


@final
@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """How a value lies in shards.

    Attributes:
      sharding: the axis, and what of it each shard has.
      rows: if set, the value has not all rows of the table but those of one
        ``unique_rows``, by its number; each shard then has as many, padded.
    """

    sharding: Sharding
    rows: int | None = None

    @property
    def axis(self) -> int:
        """The axis of the value that is cut."""
        return self.sharding.axis

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.sharding.shards

    def at(self, axis: int) -> "ShardedLayout":
        """Returns the same cut along another axis."""
        return replace(self, sharding=self.sharding.at(axis))

    def size(self, shard: int, whole: int) -> int:
        """Returns the length of a shard along the axis, given that of the value."""
        return whole if self.rows is not None else self.sharding.layout.sizes[shard]


@final
@dataclass(eq=False, slots=True)
class Value:
    """A value in the forms in which it exists so far.

    Attributes:
      whole: the value as it was made, if it was made whole.
      parts: its shards by how it is cut.
      gathered: the value put together from its shards, by device scope.
      origin: the sharded variable that it follows from.
    """

    whole: Any = None
    parts: dict[ShardedLayout, tuple[Any, ...]] = field(default_factory=dict)
    gathered: dict[DeviceSpec, Any] = field(default_factory=dict)
    origin: str = ""

    @property
    def cut(self) -> ShardedLayout | None:
        """How it was cut first, None if it is only whole."""
        return next(iter(self.parts), None)


@final
@dataclass(frozen=True, slots=True)
class Route:
    """The rows that a step takes from a table of one layout.

    Attributes:
      layout: how the table's rows lie in shards.
      local: rows of each shard, see ``route_rows``.
      order: place in the merged rows of each unique row, where these differ.
      inverse: place among the unique rows of each merged row, where these differ.
    """

    layout: Layout
    local: tuple[Any, ...]
    order: Any = None
    inverse: Any = None

    def merge(self, parts: Sequence[Any], axis: int) -> Any:
        """Returns the rows of all shards, in the order of the unique ids."""
        moved = [jnp.moveaxis(part, axis, 0) for part in parts]
        merged = merge_rows(self.local, moved, layout=self.layout)
        return jnp.moveaxis(_reordered(merged, self.order), 0, axis)

    def split(self, value: Any, axis: int) -> tuple[Any, ...]:
        """Returns the rows of each shard; the reverse of merging."""
        rows = _reordered(jnp.moveaxis(value, axis, 0), self.inverse)
        parts = split_rows(rows, self.local, layout=self.layout)
        return tuple(jnp.moveaxis(part, 0, axis) for part in parts)


def _reordered(rows: Any, places: Any) -> Any:
    if places is None:
        return rows
    return rows.at[places].get(mode="fill", fill_value=0)


@final
@dataclass(slots=True)
class Values:
    """The values of a graph that is evaluated by shards, in all their forms.

    Attributes:
      entries: by variable of the jaxpr.
      routes: by number of the ``unique_rows`` and layout of the table.
      gathered: sharded values that were needed whole by what nobody placed.
      makers: what made a whole value and can make its shards as well.
      by_ids: what made the shards of a value that follows from ids of rows; whole, it
        follows from the whole ids. Put together from its shards, it would have the
        padding of rows, where that of the ids made something else.
    """

    entries: dict[Var, Value] = field(default_factory=dict)
    makers: dict[Atom, Equation] = field(default_factory=dict)
    by_ids: dict[Atom, Equation] = field(default_factory=dict)
    routes: dict[tuple[int, Layout], Route] = field(default_factory=dict)
    gathered: dict[Gathered, None] = field(default_factory=dict)

    def of(self, atom: Atom) -> Value:
        """Returns a value in the forms that it has."""
        return Value(atom.val) if isinstance(atom, Literal) else self.entries[atom]

    def whole(self, atom: Atom, stamp: DeviceSpec = _ANYWHERE) -> Any:
        """Returns the whole value, put together once per device scope."""
        value = self.of(atom)
        maker = self._made_by_ids(atom)
        if value.whole is None and maker is not None:
            operands = [self.whole(v) for v in maker.invars]
            with _compat.under(maker):
                (value.whole,) = _compat.run_equation(maker, operands)
        if value.cut is None or value.whole is not None:
            return value.whole
        if stamp not in value.gathered:
            value.gathered[stamp] = self._join(value.cut, value.parts[value.cut])
        return value.gathered[stamp]

    def parts(self, atom: Atom, cut: ShardedLayout) -> tuple[Any, ...]:
        """Returns the shards of a value, cut once."""
        value = self.of(atom)
        if cut not in value.parts:
            maker = self.makers.get(atom)
            axes = None if maker is None else operand_axes(maker, cut.axis)
            if maker is None or axes is None:
                value.parts[cut] = self._split(self.whole(atom), cut)
            else:
                ((value.parts[cut],)) = self.by_shards(maker, axes, cut, cut)
        return value.parts[cut]

    def by_shards(
        self,
        equation: Equation,
        axes: Axes,
        cut: ShardedLayout,
        result: ShardedLayout | None,
    ) -> list[tuple[Any, ...]]:
        """Runs an equation once per shard.

        Args:
          equation: what to run.
          axes: per operand, the axis to cut, None for one that all shards take whole.
          cut: how to cut them, but for the axis.
          result: how the results are cut, None if each shard's are of full shape.

        Returns:
          For each result of the equation, what the shards gave.
        """
        with _compat.under(equation):
            columns = [
                (self.whole(v),) * cut.shards
                if axis is None
                else self.parts(v, cut.at(axis))
                for v, axis in zip(equation.invars, axes, strict=True)
            ]
        params = [dict(equation.params)] * cut.shards
        if result is not None:
            size = equation.outvars[0].aval.shape[result.axis]
            params = [
                part_params(equation, result.axis, result.size(n, size))
                for n in range(cut.shards)
            ]
        rows = [
            _compat.run_equation(equation, [c[n] for c in columns], params[n])
            for n in range(cut.shards)
        ]
        return list(zip(*rows, strict=True))

    def results(self, equation: Equation, results: Sequence[Any]) -> None:
        """Notes the results of an equation that was run whole."""
        for var, result in zip(equation.outvars, results, strict=True):
            self.entries[var] = Value(result)

    def needs_gather(self, atom: Atom, cut: ShardedLayout | None) -> bool:
        """Whether a value must be put together to be whole (None), or so cut."""
        value = self.of(atom)
        if cut is None and self._made_by_ids(atom) is not None:
            return False
        return value.cut is not None and value.whole is None and cut not in value.parts

    def follows_from_ids(self, equation: Equation, result: ShardedLayout) -> bool:
        """Whether the results, some of each shard's rows, can be had without merging.

        Args:
          equation: an operation that is done by shards.
          result: how its results are cut.
        """
        return (
            result.rows is not None
            and len(equation.outvars) == 1
            and any(self.of(v).cut is not None for v in equation.invars)
            and not any(self.needs_gather(v, None) for v in equation.invars)
        )

    def note(self, equation: Equation, variable: str, aval: Any) -> None:
        """Notes that an equation takes a sharded value whole."""
        line, nbytes = _compat.user_line(equation), value_type(aval).nbytes
        self.gathered[Gathered(equation.primitive.name, line, variable, nbytes)] = None

    def note_gather(
        self, equation: Equation, atom: Atom, cut: ShardedLayout | None
    ) -> None:
        """Notes it if an operand must be put together to be whole, or so cut."""
        if self.needs_gather(atom, cut):
            self.note(equation, self.of(atom).origin, atom.aval)

    def route(self, cut: ShardedLayout) -> Route:
        """Returns how the rows of a cut go to their shards."""
        assert cut.rows is not None
        return self.routes[cut.rows, cut.sharding.layout]

    def _made_by_ids(self, atom: Atom) -> Equation | None:
        return None if isinstance(atom, Literal) else self.by_ids.get(atom)

    def _split(self, value: Any, cut: ShardedLayout) -> tuple[Any, ...]:
        if cut.rows is None:
            return cut.sharding.split(value)
        return self.route(cut).split(value, cut.axis)

    def _join(self, cut: ShardedLayout, parts: Sequence[Any]) -> Any:
        if cut.rows is None:
            return cut.sharding.join(parts)
        return self.route(cut).merge(parts, cut.axis)
