"""Copy of variables that is made while they are used: pre-copy in rounds, by rows.

Rows are copied a part at a time; which of them are written meanwhile is marked, and
those are copied again. What is left is small once they are copied about as fast as
they are written, and only that is copied while nothing changes. A variable that is
small, or written whole, is left for then altogether. Rows of a hash table are copied by
their places: so the copy has the same keys at the same places, and goes on alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np

from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.replay import KeyedRowsAre, RowsAre
from jgraph.plan.program.row_values import aligned_empty
from jgraph.runtime.store.entry import Entry, HashEntry, RowMarks, held
from jgraph.runtime.store.store import VariableStore
from jgraph.runtime.store.tables import on_cpu

LEAST_BYTES: Final = 1 << 20
"""A smaller variable is copied whole."""
PART_BYTES: Final = 1 << 21
"""As much is copied while nobody uses a variable."""


@final
@dataclass(frozen=True, slots=True)
class Part:
    """What is copied at once.

    Attributes:
      what: rows of a variable or of a hash table, or a variable's name if it is whole.
      arrays: as in a ``Record``.
    """

    what: RowsAre | KeyedRowsAre | str
    arrays: Sequence[np.ndarray[Any, Any]]

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        return sum(array.nbytes for array in self.arrays)


@final
@dataclass(slots=True)
class AheadCopy:
    """Variables of a container, which are copied while they are used.

    Args:
      store: has them.
      container: of the variables.
      names: of the variables.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.ir import TaskName
      >>> from jgraph.plan.program.program import StoredVariable
      >>> store = VariableStore(TaskName("/job:ps/task:0"))
      >>> w = StoredVariable("w", ValueType((1 << 18, 2), "float32"))
      >>> store.write([w], [jnp.ones(w.type.shape)])
      >>> copy = AheadCopy(store, "", ["w"])
      >>> sum(len(part.arrays[0]) for part in copy.parts()), copy.remainder
      (262144, 0)
    """

    store: VariableStore
    container: str
    names: Sequence[str]
    _entries: dict[str, Entry] = field(init=False)
    _tables: dict[str, HashEntry] = field(init=False, default_factory=dict)
    _high: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._entries = self._found()
        for entry in self._entries.values():
            with held([entry]):
                if _goes_ahead(entry):
                    entry.marks = RowMarks(entry.stored_type.shape[0], entry.version)
        self._begin_tables()

    @property
    def remainder(self) -> int:
        """Bytes of the rows that are to be copied again; of no whole variable."""
        shards = [table.shard for table in self._tables.values()]
        keyed = sum(len(shard.marked) * shard.row_nbytes for shard in shards)
        return keyed + sum(
            int(np.count_nonzero(entry.marks.rows)) * _row_bytes(entry)
            for entry in self._entries.values()
            if entry.is_marked and entry.marks is not None
        )

    def parts(self) -> Iterator[Part]:
        """Copies rows that have changed since they were copied, part by part."""
        for table in self._tables.values():
            yield from self._keyed(table)
        for name, entry in self._entries.items():
            if entry.is_marked and entry.marks is not None:
                ids = np.flatnonzero(entry.marks.rows).astype(np.int32)
                most = max(1, PART_BYTES // max(1, _row_bytes(entry)))
                for first in range(0, len(ids), most):
                    part = self._part(name, entry, ids[first : first + most])
                    if part is None:  # it is written whole
                        break
                    yield part

    def rest(self) -> Iterator[Part]:
        """Copies all that differs from what was copied, as nothing changes any more."""
        now = self._found()
        same = {n: e for n, e in self._entries.items() if now.get(n) is e}
        ahead = {name for name, entry in same.items() if entry.is_marked}
        self._entries = {name: same[name] for name in sorted(ahead)}
        self._begin_tables()
        yield from self.parts()
        for table in self._tables.values():
            with held([table]):
                ends = table.shard.ends()
            yield Part(KeyedRowsAre(table.shard.spec, ends=True), ends)
        for name, entry in now.items():
            if name not in ahead:
                with held([entry]):
                    yield Part(name, [entry.view()])

    def close(self) -> None:
        """Marks nothing any more."""
        for entry in self._entries.values():
            entry.marks = None
        for table in self._tables.values():
            table.shard.marks = None

    def _begin_tables(self) -> None:
        """Looks for hash tables; what was copied of one that is not there is wrong."""
        found = self.store.tables_of(self.container, self.names)
        for table in found:
            name = table.shard.spec.name
            known = self._tables.get(name)
            if known is None or known.shard is not table.shard:
                with held([table]):
                    table.shard.mark(self._high.get(name, 0))
        self._tables = {table.shard.spec.name: table for table in found}

    def _keyed(self, table: HashEntry) -> Iterator[Part]:
        shard = table.shard
        ids, most = shard.marked, max(1, PART_BYTES // shard.row_nbytes)
        for first in range(0, len(ids), most):
            with held([table]):
                arrays = shard.copied(ids[first : first + most])
            name = shard.spec.name
            self._high[name] = max(self._high.get(name, 0), 1 + int(arrays[0][-1]))
            yield Part(KeyedRowsAre(shard.spec, ends=False), arrays)

    def _found(self) -> dict[str, Entry]:
        return self.store.entries(self.container, self.names)

    def _part(self, name: str, entry: Entry, ids: np.ndarray[Any, Any]) -> Part | None:
        rows, *width = entry.stored_type.shape
        values = aligned_empty(ValueType((len(ids), *width), entry.stored_type.dtype))
        with held([entry]):
            if not entry.is_marked or entry.marks is None:
                return None
            entry.rows(write=False).lookup(ids, values)
            entry.marks.rows[ids] = False
        return Part(RowsAre(name, rows), [ids, values])


def _goes_ahead(entry: Entry) -> bool:
    """Whether rows of a variable can be read alone, and there are enough of them."""
    if entry.slab is not None or entry.layout is not None or not on_cpu(entry.value):
        return False
    type_ = entry.stored_type
    return type_.nbytes >= LEAST_BYTES and len(type_.shape) > 0


def _row_bytes(entry: Entry) -> int:
    type_ = entry.stored_type
    return type_.nbytes // max(1, type_.shape[0])
