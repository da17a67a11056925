"""Row tables of a training step: chosen once per type of batch, with reasons."""

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, Literal, TypeAlias, final

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError
from jgraph.graph.rows.rows import unique_rows
from jgraph.train.model.optimizer import CalledOptimizer, LossOf
from jgraph.train.model.trees import Tree
from jgraph.train.tables.ids import first_bad_id, usable_ids
from jgraph.train.tables.row_tables import RowTable, RowTables
from jgraph.train.tables.row_update import RowUpdate, other_shapes, probe
from jgraph.view.units import bytes_text

Sparse: TypeAlias = Literal["auto", "lazy", "exact", "off"]
SPARSE = ("auto", "lazy", "exact", "off")

# What a ps changes at each step in some ten milliseconds.
_LARGE_UPDATE_BYTES = 64 << 20


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of one table a step uses.

    Attributes:
      unique: their ids, int32[n], ascending, padded.
      positions: which of them each id is, int32[n].
      count: how many there are.
    """

    unique: jax.Array
    positions: jax.Array
    count: jax.Array

    def padded_with_zeros(self, values: jax.Array) -> jax.Array:
        """Returns rows of which those that are not there are zeros."""
        there = jnp.arange(values.shape[0], dtype=jnp.int32) < self.count
        return jnp.where(there.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


@final
@dataclass(frozen=True, slots=True)
class Computed:
    """What a worker makes of its batch.

    Attributes:
      loss: of the batch.
      metrics: by name.
      state: the model's new state.
      grads: of the parameters; of the tables in ``rows``, of these rows.
      rows: by name of the table.
      loss_of: the loss of the batch, of other parameters.
      weight: how much it counts among those of others, float32; None: as much.
      inner: the state of the worker's own optimizer, if that is averaged.
      ok: whether it may count, as it is finite, bool; None: that is not looked at.
    """

    loss: Any
    metrics: Mapping[str, Any]
    state: Tree
    grads: Tree
    rows: Mapping[str, Rows]
    loss_of: LossOf
    weight: Any = None
    inner: Tree = None
    ok: Any = None


@final
@dataclass(frozen=True, slots=True)
class RowStep:
    """The row tables of a step, and how they are updated.

    Attributes:
      tables: their lookups.
      update: what their optimizer does by rows.
      whole: numbers of the tables that are updated as a whole all the same.
      notes: a line per decision, for people.
      count: steps of one worker whose rows travel together.
      budget: how many rows of a table these may need; 0: any number.
      checked: the tables whose ids ``bad_ids`` looks at; None: ``tables``.
    """

    tables: RowTables
    update: RowUpdate
    whole: frozenset[int]
    notes: tuple[str, ...]
    count: int = 1
    budget: int = 0
    checked: RowTables | None = None

    def in_one_place(self) -> "RowStep":
        """Returns this where parameters, loss and update are in one place.

        A table whose update is of all rows is then an array like others: to take rows
        out of it and put them back would only take time. ``bad_ids`` stays as it is.
        """
        names = [table.name for table in self.tables.tables]
        chosen = {t.name for t in self.tables.tables if t.number in self.whole}
        rest = self.tables.without(dict.fromkeys(chosen, "all of it is here"))
        notes = [
            f"{name} is read and updated whole, where it lies"
            if name in chosen
            else note
            for name, note in zip(names, self.notes, strict=False)
        ]
        notes += self.notes[len(names) :]
        return replace(self, tables=rest, notes=tuple(notes), checked=self.tables)

    def lookups(self) -> list[tuple[str, str, int]]:
        """Returns (feature, table, rows) of each lookup that ``bad_ids`` looks at."""
        return [
            (lookup.feature, table.name, table.rows)
            for table in self._checked
            for lookup in table.lookups
        ]

    @property
    def _checked(self) -> list[RowTable]:
        """The tables whose ids are looked at, without hash tables."""
        checked = self.checked or self.tables
        tables = *checked.tables, *checked.looked_at
        return [table for table in tables if not table.hashed]

    def bad_ids(self, batch: Any, seeds: tuple[Any, ...]) -> list[jax.Array]:
        """Returns of each lookup an id that has no row, else ``NO_ID``.

        Those of hash tables are left out: every key may have a row.
        """
        checked = self.checked or self.tables
        tables = *checked.tables, *checked.looked_at
        table_ids = *checked.ids(batch, seeds), *checked.ids_looked_at(batch, seeds)
        return [
            first_bad_id(part, table.rows)
            for table, ids in zip(tables, table_ids, strict=True)
            if not table.hashed
            for part in _usable(table, ids)
        ]

    def fed_ids(self) -> dict[int, int] | None:
        """Returns below what the integers of which leaves of a batch have rows.

        Where all are, ``bad_ids`` finds nothing. None: ids are computed, and only they
        can tell.
        """
        bounds: dict[int, int] = {}
        for table in self._checked:
            for lookup in table.lookups:
                if lookup.mode != "error":
                    continue  # an id without a row is no error
                if lookup.feed is None:
                    return None
                bounds[lookup.feed] = min(
                    table.rows, bounds.get(lookup.feed, table.rows)
                )
        return bounds

    def most(self, table: RowTable) -> int:
        """Returns how many ids of a table a worker has at most."""
        return table.count * self.count

    def all_checked(self, batches: Any, replica: Any, seeds: Any) -> Any:
        """Returns the batches of some steps; a bad id is as in ``RowTables.checked``.

        Args:
          batches: of the steps, ``[count, …]``.
          replica: number of the worker, int32.
          seeds: of the steps, int32[count].
        """

        def ids_of(batch: Any, seed: Any) -> list[list[Any]]:
            return self.tables.ids_looked_at(batch, (replica, seed))

        return self.tables.checked(batches, jax.vmap(ids_of)(batches, seeds))

    def rows(self, batch: Any, seeds: tuple[Any, ...]) -> list[Rows]:
        """Returns the rows of each table that a step on ``batch`` uses."""
        table_ids = self.tables.ids(batch, seeds)
        return [
            _rows(table, ids)
            for table, ids in zip(self.tables.tables, table_ids, strict=True)
        ]

    def rows_of_all(
        self, batches: Any, replica: Any, seeds: Any
    ) -> tuple[list[Rows], list[jax.Array]]:
        """Returns the rows of each table that some steps use, one after the other.

        Args:
          batches: of the steps, ``[count, …]``.
          replica: number of the worker, int32.
          seeds: of the steps, int32[count].

        Returns:
          Of each table the rows that any of the steps uses, and int32[count, n]: which
          of them each id of a step is.
        """

        def ids_of(batch: Any, seed: Any) -> list[list[jax.Array]]:
            return self.tables.ids(batch, (replica, seed))

        table_ids = jax.vmap(ids_of)(batches, seeds)
        rows = [
            _rows(table, ids, self.budget)
            for table, ids in zip(self.tables.tables, table_ids, strict=True)
        ]
        positions = [
            _by_step(table, each.positions, self.count)
            for table, each in zip(self.tables.tables, rows, strict=True)
        ]
        return rows, positions


def _by_step(table: RowTable, positions: jax.Array, steps: int) -> jax.Array:
    """Returns the positions of each step's ids, given those of each lookup's."""
    ends = itertools.accumulate(steps * lookup.count for lookup in table.lookups)
    parts = jnp.split(positions, list(ends)[:-1])
    return jnp.concatenate([part.reshape(steps, -1) for part in parts], axis=1)


def _usable(table: RowTable, lookup_ids: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the keys, or the ids as int32[n], of each lookup."""
    return [
        keys_or_ids.reshape(-1, 2)
        if table.hashed
        else usable_ids(keys_or_ids, table.rows, lookup.mode, of_bags=lookup.of_bags)
        for keys_or_ids, lookup in zip(lookup_ids, table.lookups, strict=True)
    ]


def _rows(table: RowTable, lookup_ids: Sequence[jax.Array], budget: int = 0) -> Rows:
    parts = _usable(table, lookup_ids)
    ids = jnp.concatenate(parts)
    unique, positions = unique_rows(
        ids,
        rows=table.rows,
        feature=table.feature,
        drop=table.drop,
        most=budget,
    )
    there = jnp.where(positions < ids.shape[0], positions, -1)
    return Rows(unique, positions, there.max(initial=-1) + 1)


def decide(
    tables: RowTables,
    tx: CalledOptimizer,
    params: Any,
    slots: dict[str, tuple[str, tuple[int, ...]]],
    owners: Sequence[int | None],
    sparse: Sparse,
    count: int = 1,
) -> RowStep:
    """Decides how the row tables of a loss are updated.

    Args:
      tables: from ``find_row_tables``.
      tx: the optimizer.
      params: the parameters, or their shapes and dtypes.
      slots: (parameter, shape) of each variable of the optimizer's state.
      owners: as for ``probe``.
      sparse: as for ``Trainer``.
      count: steps of one worker whose rows travel together.
    """
    leaves = jax.tree.leaves(params)
    shapes = {t.name: tuple(leaves[t.number].shape) for t in tables.tables}
    all_tables, tables = tables, tables.without(other_shapes(slots, shapes))
    update = RowUpdate()
    numbers = frozenset(t.number for t in tables.tables)
    hash_numbers = frozenset(t.number for t in tables.tables if t.hashed)
    if numbers:
        try:
            update = probe(tx, params, numbers, owners, hash_numbers)
        except Exception as error:  # noqa: BLE001  # of the user's optimizer
            reason = shorten(str(error), 100, placeholder=" …")
            why = f"the optimizer fails on rows of it: {reason}"
            tables = tables.without({t.name: why for t in tables.tables})
            numbers = hash_numbers = frozenset()
    for table in all_tables.tables:
        if table.hashed and table.name in tables.dense:
            raise _not_by_rows(table.name, tables.dense[table.name])
        if table.hashed and table.number in update.held_back:
            raise _loses_gradients(table.name)
    others = numbers - update.exact - hash_numbers  # a hash table has no rows but these
    never_lazy = update.held_back | update.by_size
    whole = others & never_lazy if sparse == "lazy" else others
    costs = {t.name: _cost(t, leaves[t.number], slots, count) for t in tables.tables}
    if sparse == "auto":
        large = [
            cost.text(name)
            for name, cost in costs.items()
            if cost.whole >= _LARGE_UPDATE_BYTES and cost.number in whole - never_lazy
        ]
        _warn_large(large)
    notes = [
        _note(
            t,
            costs[t.name],
            steps=count,
            lazy=t.number in others - whole,
            whole=t.number in whole,
            held_back=t.number in update.held_back,
            by_size=t.number in update.by_size,
        )
        for t in tables.tables
    ]
    notes += [f"{name} travels whole: {why}" for name, why in tables.dense.items()]
    return RowStep(tables, update, whole, tuple(notes), count)


def _not_by_rows(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} is a hash table, and this optimizer cannot update some of its rows "
        f"alone: {why.rstrip('.')}; use one that can, such as optax.adagrad or "
        "optax.adam, for the table with optax.multi_transform"
    )


def _loses_gradients(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is a hash table, of which a step updates only the rows that it looks "
        "up, and the optimizer keeps gradients for later steps (as optax.MultiSteps "
        "and apply_every do): those of other rows would be lost; train with larger "
        "batches, or with SyncPS, whose update is the mean of all workers"
    )


@final
@dataclass(frozen=True, slots=True)
class _Cost:
    """What the update of a table changes in one step.

    Attributes:
      number: of the table.
      rows: that it looks up at most, and that it has.
      lazy: bytes of those rows, of the parameter and its optimizer's state.
      whole: bytes of all rows.
    """

    number: int
    rows: tuple[int, int]
    lazy: int
    whole: int

    def text(self, name: str) -> str:
        """Returns what lazy updates would save."""
        most, rows = (f"{n:,}" for n in self.rows)
        return (
            f"{name}: each step updates all {rows} rows ({bytes_text(self.whole)}), "
            f"not only the {most} or fewer that it looks up ({bytes_text(self.lazy)})"
        )


def _cost(
    table: RowTable,
    aval: Any,
    slots: Mapping[str, tuple[str, tuple[int, ...]]],
    steps: int,
) -> _Cost:
    shape = tuple(aval.shape)
    count = 1 + sum(slot == (table.name, shape) for slot in slots.values())
    most = min(table.count * steps, table.rows)
    of_row = count * math.prod(shape[1:]) * aval.dtype.itemsize
    return _Cost(table.number, (most, table.rows), of_row * most, of_row * table.rows)


def _warn_large(tables: Sequence[str]) -> None:
    if tables:
        warnings.warn(
            f"{'; '.join(tables)}, because this optimizer changes rows without a "
            "gradient too (momentum, weight decay); sparse='lazy' updates looked-up "
            "rows only, which is faster and gives other numbers; sparse='exact' does "
            "as now, without this warning",
            UserWarning,
            stacklevel=2,
        )


def _note(
    table: RowTable,
    cost: _Cost,
    *,
    steps: int,
    lazy: bool,
    whole: bool,
    held_back: bool,
    by_size: bool,
) -> str:
    lookups = ", ".join(f"{lk.count} by {lk.feature}" for lk in table.lookups)
    if steps > 1:
        lookups += f", in each of {steps} steps"
    if table.hashed:
        return (
            f"{table.name} is a hash table in {table.rows} shards: at most "
            f"{table.count * steps} rows travel ({lookups}); only these are updated"
        )
    how = "as the whole update would be"
    if whole:
        how = (
            f"of all rows ({bytes_text(cost.whole)}), because the optimizer changes "
            "rows without a gradient too; sparse='lazy' would update "
            f"{bytes_text(cost.lazy)}"
        )
        if by_size:
            how = (
                f"of all rows ({bytes_text(cost.whole)}), because the optimizer does "
                "something else to arrays of other sizes, as with a mask or labels by "
                "shape; by name, the update may be of these rows alone"
            )
        if held_back:
            how = "of all rows, because the optimizer keeps gradients for later steps"
    elif lazy:
        how = "lazy: rows that a step does not look up stay as they are"
    return (
        f"{table.name} travels by rows: at most {cost.rows[0]} of {table.rows} "
        f"({lookups}); the update is {how}"
    )
