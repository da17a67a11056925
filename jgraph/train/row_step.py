"""What of a training step goes by rows, and why: decided once per type of batch."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import jax
import jax.numpy as jnp

from jgraph.graph.rows import unique_rows
from jgraph.train.ids import first_bad_id, usable_ids
from jgraph.train.optimizer import CalledOptimizer, LossOf
from jgraph.train.row_update import RowUpdate, other_shapes, probe
from jgraph.train.sparse import RowTable, RowTables
from jgraph.train.trees import Tree

Sparse: TypeAlias = Literal["auto", "lazy", "exact", "off"]
SPARSE = ("auto", "lazy", "exact", "off")


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of one table a step uses.

    Attributes:
      unique: their ids, int32[n], ascending, padded.
      positions: which of them each id is, int32[n].
      count: how many there are.
      bad: per lookup the first id that has no row, else ``NO_ID``; of a hash table
        nothing.
    """

    unique: jax.Array
    positions: jax.Array
    count: jax.Array
    bad: tuple[jax.Array, ...]

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
    """

    loss: Any
    metrics: Mapping[str, Any]
    state: Tree
    grads: Tree
    rows: Mapping[str, Rows]
    loss_of: LossOf


@final
@dataclass(frozen=True, slots=True)
class RowStep:
    """The row tables of a step, and how they are updated.

    Attributes:
      tables: their lookups.
      update: what their optimizer does by rows.
      whole: numbers of the tables that are updated as a whole all the same.
      notes: a line per decision, for people.
    """

    tables: RowTables
    update: RowUpdate
    whole: frozenset[int]
    notes: tuple[str, ...]

    def rows(self, batch: Any, seeds: tuple[Any, ...]) -> list[Rows]:
        """Returns the rows of each table that a step on ``batch`` uses."""
        given = self.tables.ids(batch, seeds)
        return [
            _rows(table, ids)
            for table, ids in zip(self.tables.tables, given, strict=True)
        ]


def _rows(table: RowTable, given: Sequence[jax.Array]) -> Rows:
    parts = [
        keys_or_ids.reshape(-1, 2)
        if table.hashed
        else usable_ids(keys_or_ids, table.rows, lookup.mode)
        for keys_or_ids, lookup in zip(given, table.lookups, strict=True)
    ]
    ids = jnp.concatenate(parts)
    unique, positions = unique_rows(
        ids, rows=table.rows, feature=table.feature, drop=table.drop
    )
    there = jnp.where(positions < ids.shape[0], positions, -1)
    # Every key may have a row.
    bad = () if table.hashed else tuple(first_bad_id(p, table.rows) for p in parts)
    return Rows(unique, positions, there.max(initial=-1) + 1, bad)


def decide(
    tables: RowTables,
    tx: CalledOptimizer,
    params: Any,
    slots: dict[str, tuple[str, tuple[int, ...]]],
    owners: Sequence[int | None],
    sparse: Sparse,
) -> RowStep:
    """Decides how the row tables of a loss are updated.

    Args:
      tables: from ``find_row_tables``.
      tx: the optimizer.
      params: the parameters, or their shapes and dtypes.
      slots: (parameter, shape) of each variable of the optimizer's state.
      owners: as for ``probe``.
      sparse: as for ``Trainer``.
    """
    leaves = jax.tree.leaves(params)
    shapes = {t.name: tuple(leaves[t.number].shape) for t in tables.tables}
    tables = tables.without(other_shapes(slots, shapes))
    update = RowUpdate(frozenset(), reads_padding=False)
    numbers = frozenset(t.number for t in tables.tables)
    if numbers:
        try:
            update = probe(tx, params, numbers, owners)
        except Exception as error:  # noqa: BLE001  # of the user's optimizer
            why = f"the optimizer fails on rows of it: {error!s:.80}"
            tables = tables.without({t.name: why for t in tables.tables})
            numbers = frozenset()
    hashed = frozenset(t.number for t in tables.tables if t.hashed)
    lazy = numbers - update.exact - hashed  # of a hash table nobody expects all rows
    whole = lazy if sparse == "exact" else frozenset[int]()
    if lazy and sparse == "auto":
        _warn_lazy([t.name for t in tables.tables if t.number in lazy])
    notes = [
        _note(t, lazy=t.number in lazy, whole=t.number in whole) for t in tables.tables
    ]
    notes += [f"{name} travels whole: {why}" for name, why in tables.dense.items()]
    return RowStep(tables, update, whole, tuple(notes))


def _warn_lazy(names: Sequence[str]) -> None:
    warnings.warn(
        f"{', '.join(names)}: only rows that a step looks up are updated, and this "
        "optimizer would change others too (momentum, weight decay, trust ratios); "
        "say sparse='lazy' for that, or sparse='exact' for the update of all rows",
        UserWarning,
        stacklevel=2,
    )


def _note(table: RowTable, *, lazy: bool, whole: bool) -> str:
    lookups = ", ".join(f"{lk.count} by {lk.feature}" for lk in table.lookups)
    if table.hashed:
        return (
            f"{table.name} is a hash table in {table.rows} shards: at most "
            f"{table.count} rows travel ({lookups}); only these are updated"
        )
    how = "as the whole update would be"
    if whole:
        how = "of the whole table, as sparse='exact' says"
    elif lazy:
        how = "lazy: rows that a step does not look up stay as they are"
    return (
        f"{table.name} travels by rows: at most {min(table.count, table.rows)} of "
        f"{table.rows} ({lookups}); the update is {how}"
    )
