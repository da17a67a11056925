"""Undo of an update: values before it, kept until all parameter servers have it.

Whoever keeps it holds their locks; what puts it back takes them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jgraph._compat import wide_types
from jgraph.runtime.store.entry import Entry, HashEntry, RowsOf, held

PutBack: TypeAlias = Callable[[], None]
Undo: TypeAlias = Callable[[PutBack], None]
"""Takes what puts one change back; to be called in the reverse order, or not at all."""


def keep_values(
    undo: Undo, entries: Sequence[Entry], arguments: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """Keeps values that will be replaced.

    Args:
      undo: takes what puts them back.
      entries: of the variables.
      arguments: the values as a function takes them, who will own what it is given.

    Returns:
      Copies of the arguments.
    """
    for entry in entries:
        in_slab = entry.slab is not None
        value = np.array(entry.view()) if in_slab else entry.value
        undo(partial(_put_back, entry, value, entry.layout))
    with wide_types():
        return [jnp.array(value, copy=True) for value in arguments]


def keep_rows(
    undo: Undo,
    tables: Sequence[Entry | HashEntry],
    updates: Sequence[RowsOf],
    taken: Sequence[np.ndarray[Any, Any]],
) -> None:
    """Keeps rows that will be replaced; which keys a hash table has stays as it is.

    Args:
      undo: takes what puts them back.
      tables: that have the rows.
      updates: of these.
      taken: the rows, of each update the first ones.
    """
    for table, rows, there in zip(tables, updates, taken, strict=False):
        before = there[: len(rows.ids)].copy()
        undo(partial(_put_rows_back, table, rows.ids, before))


def _put_back(entry: Entry, value: Any, layout: Sharding | None) -> None:
    with held([entry]):
        if isinstance(value, jax.Array) or entry.slab is not None:
            entry.put(value, layout)
        else:  # it has left its slab since
            entry.put_alone(jnp.asarray(value), layout)


def _put_rows_back(
    table: Entry | HashEntry, ids: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]
) -> None:
    with held([table]):
        table.rows(write=True).update(ids, rows)
