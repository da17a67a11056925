"""Sparse-lookup analysis: parameters that a loss only looks up rows of.

A parameter is a *row table* when every use of it is a lookup of whole rows, by ids that
follow from the batch (and the random seeds of the step) alone. A step then needs just
these rows: ``RowTables`` gives the ids, and the loss on rows in place of tables.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from jgraph import _compat
from jgraph._compat import Atom, Equation
from jgraph.graph.rows.rows import NO_ID, Part, checked_ids
from jgraph.graph.sharding import array_nbytes
from jgraph.graph.tracing.inline import inline_calls
from jgraph.plan.lowering.lanes import SMALL_BYTES
from jgraph.train.tables.ids import OF_BAGS, Ids, usable_ids
from jgraph.train.tables.jaxpr_walk import Table, is_lookup, walk
from jgraph.view.units import bytes_text

# A small table of which a step looks up more ids than it has rows travels whole.
_SMALL_BYTES = 1 << 20
_LOOPS = {"scan", "while", "cond"}

Loss: TypeAlias = Callable[..., Any]
"""As ``Adapter.loss``: of (params, state, batch, seeds)."""


@final
@dataclass(frozen=True, slots=True)
class Lookup:
    """One lookup of a table.

    Attributes:
      feature: the feeds that its ids come from, ``batch['user']``.
      shape: of the ids.
      mode: what becomes of ids out of range: ``"error"``, ``"drop"`` (no row), or
        ``"clip"`` (the nearest row).
      of_bags: ``NO_ID`` among the ids is none.
      feed: of which leaf of (batch, seeds) the ids are elements, as they come; None:
        they are computed.
      part: which part of that leaf is ids; None: none that begins and ends somewhere.
      source: a leaf of (batch, seeds) that they are made from.
    """

    feature: str
    shape: tuple[int, ...]
    mode: str
    of_bags: bool = False
    feed: int | None = None
    part: Part | None = None
    source: int = 0

    @property
    def count(self) -> int:
        """Number of ids."""
        return math.prod(self.shape)


@final
@dataclass(frozen=True, slots=True)
class RowTable:
    """A parameter of which a step uses rows only.

    Attributes:
      name: of the parameter's variable, ``params/user/embedding``.
      number: its place among the leaves of the parameters.
      rows: of the whole table.
      lookups: in the order in which the loss makes them.
      hashed: whether it is a hash table: ids are then keys, uint32[…, 2].
    """

    name: str
    number: int
    rows: int
    lookups: tuple[Lookup, ...]
    hashed: bool = False

    @property
    def count(self) -> int:
        """Ids of one step, all lookups together."""
        return sum(lookup.count for lookup in self.lookups)

    @property
    def feature(self) -> str:
        """Where the ids come from, for messages."""
        features = dict.fromkeys(lookup.feature for lookup in self.lookups)
        return f"{', '.join(features)} ({self.name})"

    @property
    def drop(self) -> bool:
        """Whether no lookup minds ids out of range."""
        return all(lookup.mode != "error" for lookup in self.lookups)


@final
@dataclass(frozen=True, slots=True)
class RowTables:
    """The row tables of a loss on batches of one type.

    Attributes:
      tables: those of which rows travel.
      dense: why others that are looked up travel whole, by name.
      looked_at: those of them whose ids are looked at all the same.
      small: names of those of which a step looks up fewer ids than there are rows, and
        that travel whole as they are small.
    """

    tables: tuple[RowTable, ...]
    dense: Mapping[str, str]
    looked_at: tuple[RowTable, ...]
    small: frozenset[str]
    _loss: "_Traced"
    _ids: Any
    _ids_consts: tuple[Any, ...]
    _ids_inputs: tuple[int, ...]

    def ids(self, batch: Any, seeds: tuple[Any, ...]) -> list[list[jax.Array]]:
        """Returns the ids of each lookup of each table, as the user gave them."""
        return self._all_ids(batch, seeds)[: len(self.tables)]

    def ids_looked_at(self, batch: Any, seeds: tuple[Any, ...]) -> list[list[Any]]:
        """Returns those of ``looked_at``, likewise."""
        return self._all_ids(batch, seeds)[len(self.tables) :]

    def _all_ids(self, batch: Any, seeds: tuple[Any, ...]) -> list[list[jax.Array]]:
        leaves = jax.tree.leaves((batch, seeds))
        inputs = [leaves[i] for i in self._ids_inputs]
        flat = iter(jax.core.eval_jaxpr(self._ids, self._ids_consts, *inputs))
        tables = (*self.tables, *self.looked_at)
        return [[next(flat) for _ in table.lookups] for table in tables]

    def loss(self, positions: Sequence[jax.Array]) -> Loss:
        """Returns the loss on parameters in which row tables are rows.

        Args:
          positions: per table int32[count]: which row each id is.
        """

        def loss(params: Any, state: Any, batch: Any, seeds: Any) -> Any:
            leaves = jax.tree.leaves((params, state, batch, seeds))
            for table in self.tables:
                leaves[table.number] = Table(table.number, leaves[table.number])
            visitor = _Rows(self.tables, positions)
            results = walk(self._loss.jaxpr, self._loss.consts, leaves, visitor)
            return jax.tree.unflatten(self._loss.out_tree, results)

        return loss

    def checked(self, batch: Any, ids: list[list[Any]]) -> Any:
        """Returns a batch; an id without a row of ``looked_at`` is an error.

        Args:
          batch: of one step; those of a round have one more axis at the front.
          ids: from ``ids_looked_at``, with that axis if the batch has it.
        """
        leaves, tree = jax.tree.flatten(batch)
        for table, table_ids in zip(self.looked_at, ids, strict=True):
            for lookup, each in zip(table.lookups, table_ids, strict=True):
                if lookup.mode != "error":
                    continue  # an id without a row is no error
                check = partial(checked_ids, rows=table.rows, feature=table.feature)
                if self._loss.has_ids(lookup):
                    assert lookup.feed is not None
                    assert lookup.part is not None
                    leaf = leaves[lookup.feed]
                    front = leaf.shape[: leaf.ndim - len(lookup.part)]
                    part = *((0, n) for n in front), *lookup.part
                    leaves[lookup.feed] = check(leaf, part=part)
                    continue
                known = usable_ids(each, table.rows, "error", of_bags=lookup.of_bags)
                if lookup.of_bags:
                    known = jnp.where(known == NO_ID, 0, known)
                good = check(known, part=((0, known.shape[0]),))
                # What is made of the batch waits for the look at its ids.
                at = lookup.source
                leaves[at], _ = jax.lax.optimization_barrier((leaves[at], good))
        return jax.tree.unflatten(tree, leaves)

    def without(self, reasons: Mapping[str, str]) -> "RowTables":
        """Returns this with some tables left whole, for these reasons by name."""
        return self._loss.tables({**self.dense, **reasons}) if reasons else self


def find_row_tables(
    loss: Loss,
    params: Any,
    state: Any,
    batch: Any,
    seeds: tuple[Any, ...],
    names: Sequence[str],
    small: bool = False,
    looks: Collection[str] = (),
) -> RowTables:
    """Returns the row tables of a loss.

    Args:
      loss: as ``Adapter.loss``.
      params: parameters, or their shapes and dtypes.
      state: likewise.
      batch: likewise.
      seeds: likewise.
      names: a name per leaf of ``params``.
      small: also tables of at most 1 MiB with no more rows than a step has ids; they
        take less work whole, and ``RowTables.checked`` looks at their ids.
      looks: names of tables whose ids the caller looks at by ``RowTables.checked``;
        those as small as what is packed travel whole, if ids are elements of the batch.
    """
    args = (params, state, batch, seeds)
    leaves, tree = jax.tree.flatten(args)
    jaxpr, consts, out = _compat.make_jaxpr(
        lambda *flat: loss(*jax.tree.unflatten(tree, flat)), *leaves
    )
    inputs = len(jax.tree.leaves((params, state)))
    feeds = jax.tree_util.tree_flatten_with_path({"batch": batch, "seeds": seeds})[0]
    tracing = _Traced(
        jaxpr=jaxpr,
        consts=tuple(consts),
        out_tree=jax.tree.structure(out),
        avals=tuple(_aval(leaf) for leaf in leaves),
        names=tuple(names),
        feeds=tuple(_feed_name(path) for path, _ in feeds),
        first_feed=inputs,
        small=small,
        looks=frozenset(looks),
        fields=len(jax.tree.leaves(batch)),
    )
    return tracing.tables({})


def _aval(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _feed_name(path: tuple[Any, ...]) -> str:
    if path[0].key == "seeds":
        return "random numbers"
    return "batch" + jax.tree_util.keystr(path[1:])


@final
@dataclass(frozen=True, slots=True)
class _Traced:
    """The jaxpr of a loss; its operands are parameters, state, batch and seeds."""

    jaxpr: Any
    consts: tuple[Any, ...]
    out_tree: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    feeds: tuple[str, ...]
    first_feed: int
    small: bool
    looks: frozenset[str]
    fields: int

    def tables(self, reasons: Mapping[str, str]) -> RowTables:
        """Returns the row tables, without those refused by name."""
        uses = _Uses()
        shapes = _looked_up(self.jaxpr)

        def find(leaves: list[Any]) -> list[Any]:
            count = len(self.names)
            marks = [
                Table(i, x) if x.shape in shapes else x
                for i, x in enumerate(leaves[:count])
            ]
            walk(self.jaxpr, self.consts, [*marks, *leaves[count:]], uses)
            return [index for _, _, index in uses.lookups]

        jaxpr, consts, _ = _compat.make_jaxpr(find, list(self.avals))
        flat = inline_calls(jaxpr, consts)
        ids = Ids(flat.jaxpr, self.first_feed)
        tables: list[RowTable] = []
        looked_at: list[RowTable] = []
        small: list[str] = []
        outvars: list[Any] = []
        outvars_looked_at: list[Any] = []
        dense: dict[str, str] = {}
        for number, name in enumerate(self.names):
            reads = [
                (equation, ids.raw(flat.jaxpr.outvars[place], _mode(equation)))
                for place, (n, equation, _) in enumerate(uses.lookups)
                if n == number
            ]
            keys = [ids.keys(v) for _, v in reads]
            is_hash = bool(keys) and None not in keys
            if is_hash:
                reads = [(e, k) for (e, _), k in zip(reads, keys, strict=True) if k]
            reason = (
                reasons.get(name)
                or uses.whole_uses.get(number)
                or next(filter(None, (ids.refused(v) for _, v in reads)), None)
            )
            if reason and (reads or number in uses.in_loops):
                dense[name] = reason
                whole = self._table(number, ids, [] if is_hash else reads, False)
                if whole.lookups and self._are_fed(whole):
                    looked_at.append(whole)
                    outvars_looked_at += [v for _, v in reads]
            elif reads:
                table = self._table(number, ids, reads, is_hash)
                if why := None if is_hash else self._why_small(table):
                    looked_at.append(table)
                    dense[name] = why
                    if table.count < table.rows:
                        small.append(name)
                    outvars_looked_at += [v for _, v in reads]
                    continue
                tables.append(table)
                outvars += [v for _, v in reads]
        jaxpr, inputs = ids.sliced([*outvars, *outvars_looked_at], flat.consts)
        return RowTables(
            tuple(tables),
            dense,
            tuple(looked_at),
            frozenset(small),
            self,
            *(jaxpr, flat.consts, tuple(inputs)),
        )

    def _table(
        self, number: int, ids: Ids, reads: list[tuple[Equation, Any]], is_hash: bool
    ) -> RowTable:
        lookups = tuple(
            Lookup(
                ids.feature(v, self.feeds),
                _shape(v)[:-1] if is_hash else _shape(v),
                _mode(equation),
                OF_BAGS in _compat.name_stack_of(equation),
                ids.feed(v),
                (ids.fed_part(v) or (None, None))[1],
                self._source(ids, v),
            )
            for equation, v in reads
        )
        rows = self.avals[number].shape[0]
        return RowTable(self.names[number], number, rows, lookups, is_hash)

    def _nbytes(self, number: int) -> int:
        aval = self.avals[number]
        return array_nbytes(aval.shape, aval.dtype)

    def _source(self, ids: Ids, lookup_ids: Any) -> int:
        inputs = ids.inputs([lookup_ids])[1]
        first = min(inputs, default=self.first_feed) - self.first_feed
        return first if first < self.fields else 0

    def _why_small(self, table: RowTable) -> str | None:
        """Why a table travels whole, and its ids are looked at; None: it does not."""
        nbytes = self._nbytes(table.number)
        if not self.small and table.count >= table.rows and nbytes <= _SMALL_BYTES:
            return (
                f"a step looks up {table.count} ids, and the table is small: "
                f"{table.rows} rows"
            )
        is_packed = table.name in self.looks and nbytes <= SMALL_BYTES
        if not is_packed or not self._are_fed(table):
            return None
        return f"it is small ({bytes_text(nbytes)})"

    def _are_fed(self, table: RowTable) -> bool:
        """Whether ids that must have a row are elements of the batch."""
        return all(
            lookup.mode != "error" or self.has_ids(lookup) for lookup in table.lookups
        )

    def has_ids(self, lookup: Lookup) -> bool:
        """Whether ids are elements of the batch as they come, none of them no id."""
        if lookup.of_bags or lookup.part is None or lookup.feed is None:
            return False
        if lookup.feed >= self.fields:
            return False  # it is a seed of a step
        dtype = np.dtype(self.avals[self.first_feed + lookup.feed].dtype)
        return dtype.kind in "iu"


def _mode(equation: Equation) -> str:
    mode = equation.params["mode"]
    if mode == GatherScatterMode.CLIP:
        return "clip"
    fill = equation.params.get("fill_value")
    # The default of jnp.take is to fill with NaN: nobody asks for that.
    is_fill = mode == GatherScatterMode.FILL_OR_DROP and fill is not None
    return "drop" if is_fill and not np.isnan(fill) else "error"


@final
@dataclass(slots=True)
class _Uses:
    """A visitor that notes every use, and leaves the meaning as it is."""

    lookups: list[tuple[int, Equation, Any]] = field(default_factory=list)
    whole_uses: dict[int, str] = field(default_factory=dict)
    in_loops: set[int] = field(default_factory=set)

    def lookup(self, table: Table, equation: Equation, index: Any) -> Any:
        self.lookups.append((table.number, equation, index))
        return _gather(equation, table.rows(), index)

    def whole(self, table: Table, equation: Equation | None) -> Any:
        self.whole_uses.setdefault(table.number, _whole_use(equation))
        inner = () if equation is None else _compat.inner_jaxprs(equation)
        if any(table.value.shape in _looked_up(body) for _, body in inner):
            self.in_loops.add(table.number)
        return table.rows()

    def checkpoint(
        self, fn: Callable[..., list[Any]], equation: Equation
    ) -> Callable[..., list[Any]]:
        return fn


def _whole_use(equation: Equation | None) -> str:
    if equation is None:
        return "the loss also returns it"
    name, line = equation.primitive.name, _compat.user_line(equation)
    if name in _LOOPS:
        return f"it is used inside a loop or conditional ({name} at {line})"
    if name.startswith("custom_"):
        return f"it goes into a function with its own derivative ({line})"
    return f"it is also used as a whole ({name} at {line})"


def _looked_up(jaxpr: Any) -> set[tuple[int, ...]]:
    """Returns the shapes of all that rows are looked up of, in inner bodies too."""
    shapes = set()
    for equation in _compat.open_jaxpr(jaxpr).eqns:
        if is_lookup(equation):
            shapes.add(_shape(equation.invars[0]))
        for _, body in _compat.inner_jaxprs(equation):
            shapes |= _looked_up(body)
    return shapes


@final
class _Rows:
    """A visitor that looks rows up by their positions."""

    def __init__(
        self, tables: Sequence[RowTable], positions: Sequence[jax.Array]
    ) -> None:
        self._next: dict[int, Any] = {}
        for table, all_positions in zip(tables, positions, strict=True):
            ends = itertools.accumulate(lookup.count for lookup in table.lookups)
            parts = jnp.split(all_positions, list(ends)[:-1])
            self._next[table.number] = iter(zip(table.lookups, parts, strict=True))

    def lookup(self, table: Table, equation: Equation, index: Any) -> Any:
        lookup, positions = next(self._next[table.number])
        fill = equation.params.get("fill_value") if lookup.mode == "drop" else 0
        return jax.lax.gather(
            table.rows(),
            positions.reshape(index.shape),
            dimension_numbers=equation.params["dimension_numbers"],
            slice_sizes=equation.params["slice_sizes"],
            mode=GatherScatterMode.FILL_OR_DROP,
            fill_value=fill,
        )

    def whole(self, table: Table, equation: Equation | None) -> Any:
        raise AssertionError(f"table {table.number} is used whole after all")

    def checkpoint(
        self, fn: Callable[..., list[Any]], equation: Equation
    ) -> Callable[..., list[Any]]:
        run: Callable[..., list[Any]] = jax.checkpoint(
            fn,
            prevent_cse=equation.params.get("prevent_cse", True),
            policy=equation.params.get("policy"),
        )
        return run


def _gather(equation: Equation, rows: Any, index: Any) -> Any:
    params = equation.primitive.get_bind_params(equation.params)
    return equation.primitive.bind(rows, index, **params)


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(_compat.array_type(atom).shape)
