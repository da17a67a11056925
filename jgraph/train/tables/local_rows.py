"""Rows of tables in local steps: those that any step of a round looks up.

The ids of all steps of a round follow from its batches, so its rows are known when it
begins. A worker reads them once, takes its steps on them alone, and contributes how far
they came. Rows that no step of a round looks up take no part in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError
from jgraph.graph.variable import Variable
from jgraph.train.model.optimizer import CalledOptimizer
from jgraph.train.model.trees import Tree
from jgraph.train.tables.row_step import Rows, RowStep, Sparse
from jgraph.train.tables.row_tables import Loss, RowTable, RowTables
from jgraph.train.tables.row_update import other_shapes, probe, rows_are_alone


@final
@dataclass(frozen=True, slots=True)
class RoundRows:
    """The rows that the steps of a round use.

    Attributes:
      by_name: of each table, all of them.
      positions: of each table int32[steps, n]: which of them each id of a step is.
      tables: the lookups of a step.
    """

    by_name: Mapping[str, Rows]
    positions: Sequence[jax.Array]
    tables: RowTables

    def loss(self, positions: Sequence[jax.Array]) -> Loss:
        """Returns the loss of a step on these rows.

        Args:
          positions: of each table those of the step, int32[n].
        """
        return self.tables.loss(positions)


def round_rows(
    by_rows: RowStep, batches: Any, replica: Any, seeds: Any
) -> RoundRows | None:
    """Returns the rows that the steps of a round use; None: of no table.

    Args:
      by_rows: the tables.
      batches: of the steps, ``[steps, …]``.
      replica: number of the worker, int32.
      seeds: of the steps, int32[steps].
    """
    if not by_rows.tables.tables:
        return None
    rows, positions = by_rows.rows_of_all(batches, replica, seeds)
    names = [table.name for table in by_rows.tables.tables]
    return RoundRows(dict(zip(names, rows, strict=True)), positions, by_rows.tables)


@final
@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of what a worker keeps for a table, and which of them it has by now.

    Attributes:
      known: int32 for each row of the table: more than 0 once it has some.
      rows: those that are asked for.
    """

    known: Variable
    rows: Rows

    def read(self, variable: Variable, fresh: jax.Array) -> jax.Array:
        """Returns rows; those that it does not have are fresh."""
        ids = self.rows.unique
        is_known = (self.known[ids] > 0).reshape(-1, *[1] * (fresh.ndim - 1))
        return self.rows.padded_with_zeros(jnp.where(is_known, variable[ids], fresh))

    def write(self, variable: Variable, values: jax.Array) -> None:
        """Keeps these rows."""
        variable[self.rows.unique] = values

    def take_note(self) -> None:
        """It has these rows from now on."""
        self.known[self.rows.unique] = jnp.ones_like(self.rows.unique)


def why_whole(
    tables: Sequence[RowTable],
    tx: CalledOptimizer,
    params: Tree,
    slots: Mapping[str, tuple[str, tuple[int, ...]]],
    owners: Sequence[int | None],
    sparse: Sparse,
) -> dict[str, str]:
    """Returns why tables travel whole in a round, by name: those that have to.

    Args:
      tables: that are looked up by rows.
      tx: the optimizer of the steps.
      params: the parameters, or their shapes and dtypes.
      slots: (parameter, shape) of each leaf of the optimizer's state.
      owners: as for ``probe``.
      sparse: as for ``Trainer``; unless ``"exact"``, rows that no step of a round looks
        up need not change as they would alone.

    Raises:
      Exception: whatever the optimizer raises on rows.
    """
    leaves = jax.tree.leaves(params)
    shapes = {t.name: tuple(leaves[t.number].shape) for t in tables}
    reasons = other_shapes(slots, shapes)
    numbers = {t.number: t.name for t in tables if t.name not in reasons}
    if not numbers:
        return reasons
    hashed = [t.number for t in tables if t.hashed and t.number in numbers]
    update = probe(tx, params, frozenset(numbers), owners, hashed)
    alone = update.exact
    if alone | update.by_size != frozenset(numbers):
        alone |= rows_are_alone(tx, params, frozenset(numbers), owners)
    for number, name in numbers.items():
        if number in update.by_size:
            reasons[name] = (
                "the workers' optimizer does something else to arrays of other sizes, "
                "as with a mask or labels by shape"
            )
        elif number in update.held_back:
            reasons[name] = "the workers' optimizer keeps gradients for later steps"
        elif number not in alone:
            reasons[name] = "the workers' optimizer makes of each row what hangs on all"
        elif sparse == "exact" and number not in update.exact:
            reasons[name] = (
                "the workers' optimizer changes rows without a gradient too, and "
                "sparse='exact'"
            )
    return reasons


def check_kept(
    tables: Sequence[RowTable], slots: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Refuses hash tables of which workers would keep an optimizer's state by rows.

    Args:
      tables: of which rows travel.
      slots: (parameter, shape) of each leaf of the optimizer's state.

    Raises:
      ConfigError: a key has no place in an array of a worker.
    """
    names = {group: name for name, (group, _) in slots.items()}
    for table in tables:
        if table.hashed and table.name in names:
            raise ConfigError(
                f"{table.name} is a hash table, and the workers' optimizer would keep "
                f"{names[table.name]} for its rows from round to round, which a worker "
                "has no table for; write LocalSGD(inner_state='reset'), or give the "
                "table an optimizer without state, such as optax.sgd, with "
                "optax.multi_transform"
            )
