"""Mean of sparse gradients: rows of a table that several workers contribute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp

from jgraph.graph.device import device
from jgraph.graph.rows.padded_rows import cut_rows, join_rows
from jgraph.graph.rows.rows import Layout
from jgraph.graph.variable import Variable
from jgraph.plan.program.accumulate import IDS, ROWS
from jgraph.train.tables.row_step import Rows


def row_layout(table: Variable) -> Layout:
    """Returns how the rows of a parameter lie in shards.

    Where rows are cut themselves, one shard stands for all.
    """
    cut = table.spec.sharding
    return Layout(table.shape[:1]) if cut is None or cut.axis else cut.layout


@final
@dataclass(frozen=True, slots=True)
class JoinedRows:
    """The rows of one table that any worker touched; see ``Rows``.

    Attributes:
      unique: their ids, int32[n], padded.
      table_rows: rows of the whole table.
    """

    unique: jax.Array
    table_rows: int

    def padded_with_zeros(self, values: jax.Array) -> jax.Array:
        """Returns rows of which those that are not there are zeros."""
        there = self.unique < self.table_rows
        return jnp.where(there.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


Touched: TypeAlias = Rows | JoinedRows
"""The rows of a table that a step touches."""


@final
@dataclass(frozen=True, slots=True)
class RowMean:
    """What workers contribute to the gradient of a table, and what becomes of it.

    Each shard of the table has an array of ids and one of rows beside it. A worker
    contributes those it looked up; the mean has all that any looked up.

    Attributes:
      table: the parameter.
      count: rows that a worker has at most.
      contributions: that a mean is of, at most.
    """

    table: Variable
    count: int
    contributions: int

    @property
    def contributed(self) -> tuple[Variable, Variable]:
        """Ids and rows of one worker."""
        return self._variables(self.count, pairs=False)

    @property
    def averaged(self) -> tuple[Variable, Variable]:
        """Ids and rows of the mean."""
        is_hash = self._layout.kind == "hash"
        return self._variables(self.count * self.contributions, pairs=is_hash)

    def cut(
        self,
        unique: jax.Array,
        rows: jax.Array,
        unpacked: Callable[[jax.Array], jax.Array] = lambda rows: rows,
    ) -> dict[str, jax.Array]:
        """Returns what to contribute, by name of the variable.

        Args:
          unique: ids of the rows.
          rows: as they travel.
          unpacked: makes of them, where they arrive, rows of the table's dtype.
        """
        ids, cut = cut_rows(unique, rows, layout=self._layout)
        with device(None):
            both = ids, unpacked(cut)
        return {v.name: x for v, x in zip(self.contributed, both, strict=True)}

    def read(self) -> tuple[JoinedRows, jax.Array]:
        """Returns (which rows, their mean gradient); called inside a graph."""
        ids, rows = (v[...] for v in self.averaged)
        unique, mean = join_rows(ids, rows, layout=self._layout)
        return JoinedRows(unique, self._layout.rows), mean

    @property
    def _layout(self) -> Layout:
        return row_layout(self.table)

    def _variables(self, count: int, *, pairs: bool) -> tuple[Variable, Variable]:
        shards = self._layout.shards
        devices = [shard.device for shard in self.table.shards[:shards]]
        width = self.table.shape[1:]

        def make(prefix: str, shape: tuple[int, ...], dtype: Any) -> Variable:
            counts = [shards, *[1] * (len(shape) - 1)]
            return Variable(
                prefix + self.table.name,
                (shape, dtype, None),
                device=devices[0] if shards == 1 else "",
                container=self.table.spec.container,
                partitioner=None if shards == 1 else lambda *_: counts,
                shard_devices=() if shards == 1 else devices,
            )

        length = count * shards
        # While keys travel they are int64, for which int32 stands in a graph.
        ids: Any = ((length, 2), jnp.uint32) if pairs else ((length,), jnp.int32)
        return (
            make(IDS, *ids),
            make(ROWS, (length, *width), self.table.dtype),
        )
