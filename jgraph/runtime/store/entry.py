"""One stored variable: its value, its version, its lock, and its rows."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jgraph.errors import MalformedMessageError
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.row_values import aligned_empty
from jgraph.runtime.store.hash_shard import HashColumn, HashShard
from jgraph.runtime.store.lent import LentArray, LentTable, can_lend
from jgraph.runtime.store.local_mesh import whole
from jgraph.runtime.store.slab import Slab, view_of
from jgraph.runtime.store.tables import (
    ArrayTable,
    PackedTable,
    Table,
    cpu_device,
    elements,
    moved,
    on_cpu,
    rows_elsewhere,
    table_of,
    take_rows,
)

_FEW_VIEWS: Final = 8
"""As many are kept account of, whether or not they live."""


@final
@dataclass(frozen=True, slots=True)
class RowsOf:
    """Rows of a variable for an update.

    Attributes:
      variable: which.
      ids: int32[m], the rows, each once.
      type: of the rows as the update takes them: padded to its first dimension.
    """

    variable: StoredVariable
    ids: np.ndarray[Any, Any]
    type: ValueType


@final
class RowMarks:
    """Which rows of a variable were written since they were copied.

    Args:
      rows: how many the variable has; all are to be copied.
      version: of the variable; it grows by one with each writing of rows.
    """

    __slots__ = ("rows", "version")

    def __init__(self, rows: int, version: int) -> None:
        self.rows = np.ones(rows, bool)
        self.version = version

    def wrote(self, ids: np.ndarray[Any, Any]) -> None:
        """Takes note of rows that are written."""
        self.rows[ids] = True
        self.version += 1


@final
class Entry:
    """The value of one variable; whoever uses it holds its lock.

    Attributes:
      marks: of rows that are written, while the variable is copied; see ``AheadCopy``.
      slab: where the value lies beside those of others; None: it lies alone.
      place: in the slab.
      borrowed: the value, while it lies in the memory of another variable.
    """

    __slots__ = (
        "_lent",
        "_value",
        "borrowed",
        "device",
        "layout",
        "lock",
        "marks",
        "place",
        "slab",
        "table",
        "type",
        "version",
        "views",
    )

    def __init__(self, value: jax.Array | LentArray) -> None:
        self._value: jax.Array | None = None
        self.borrowed: LentArray | None = None
        if isinstance(value, LentArray):
            self.borrowed = value
        else:
            self._value = value
        self.version = 0
        self.lock = threading.Lock()
        # As a program declared it that fits; values change, their type does not.
        self.type: ValueType | None = None
        self.table: ArrayTable | PackedTable | None = None
        # Where functions take the value; set when its rows are used on the CPU.
        self.device: Any = None
        # Over the devices of a mesh; None: one has it.
        self.layout: Sharding | None = None
        self.views: list[weakref.ref[Any]] = []
        self.slab: Slab | None = None
        self.place = 0
        self.marks: RowMarks | None = None
        # Has the value as it was, until nobody needs it or the value is another array.
        self._lent: weakref.ref[LentArray] | None = None

    @property
    def is_marked(self) -> bool:
        """Whether only marked rows were written since the marks were made."""
        return self.marks is not None and self.marks.version == self.version

    @property
    def value(self) -> jax.Array:
        """The value, alone from now on."""
        if self.borrowed is not None:
            rows = self.borrowed.type.shape[0]
            self.put_alone(jax.device_put(self.borrowed.rows(0, rows)))
        elif self._value is None:
            assert self.slab is not None
            self.put_alone(jnp.array(self.slab.part(self.place), copy=True))
        assert self._value is not None
        return self._value

    @property
    def stored_type(self) -> ValueType:
        """Shape and dtype of the value."""
        if self.slab is not None:
            return self.slab.types[self.place]
        if self.borrowed is not None:
            return self.borrowed.type
        return ValueType(tuple(self.value.shape), str(self.value.dtype))

    @property
    def is_lost(self) -> bool:
        """Whether a function took the value and failed."""
        if self.borrowed is not None:
            return False
        return (self.value if self.slab is None else self.slab.value).is_deleted()

    def put(self, value: Any, layout: Sharding | None = None) -> None:
        """Replaces the value; an array of JAX, if it does not lie in a slab."""
        if self.slab is not None and layout is None:
            self.slab.write({self.place: value})
        else:
            self.put_alone(value, layout)

    def put_alone(self, value: jax.Array, layout: Sharding | None = None) -> None:
        """Replaces the value by one that lies in no slab."""
        if self.slab is not None:
            self.slab.is_whole = False
            self.slab = None
        self._value, self.device, self.layout = value, None, layout
        self.borrowed = self._lent = None

    def lie_in(self, slab: Slab, place: int) -> None:
        """Lets the value lie in a slab that has it."""
        if self.slab is not None:
            self.slab.is_whole = False
        self.slab, self.place = slab, place
        self._value = self.device = self.layout = self.table = None
        self.borrowed = self._lent = None

    def view(self) -> np.ndarray[Any, Any]:
        """Returns a view that keeps its values, see ``rows``."""
        if self.slab is not None:
            return self.slab.part(self.place)
        if self.layout is None:
            view = view_of(self.value)
            seen: np.ndarray[Any, Any] | None = self.views[-1]() if self.views else None
            if seen is not None and _is_same(seen, view):
                return seen  # one for all: it is sent to many as one tensor
        else:
            view = np.asarray(whole(self.value))
        if len(self.views) >= _FEW_VIEWS:
            self.views = [ref for ref in self.views if ref() is not None]
        self.views.append(weakref.ref(view))
        return view

    def argument(self, layout: Sharding | None = None, *, lent: bool = False) -> Any:
        """Returns the value for a function.

        Args:
          layout: over the devices of a mesh; it then stays as it lies there.
          lent: whether the function may take it over.
        """
        if layout is self.layout is self.device is None:  # nearly always
            if self._value is not None:
                return self._value
            if self.slab is None:
                return self.value
            part = self.slab.part(self.place)
            return jnp.array(part, copy=True) if lent else part
        if layout != self.layout:
            if layout is None:
                return jax.device_put(self.value, jax.local_devices()[0])
            self.put_alone(jax.device_put(self.value, layout), layout)
        if self.device is None:
            return self.value
        return moved(self.value, self.device)

    def memory(self) -> np.ndarray[Any, Any] | None:
        """Returns the elements, to be replaced where they are; None: they must not be.

        Somebody else looks at them, several devices or none that is a CPU have them, a
        byte has several of them, or they lie in a slab.
        """
        if self.slab is not None:
            return None
        if self.layout is not None or not on_cpu(self.value) or self._is_viewed():
            return None
        return elements(self.value) if self._lent_array() is None else None

    def lend(self, view: np.ndarray[Any, Any]) -> LentArray | None:
        """Returns the value, to be kept as it is now; None: it must be copied.

        Args:
          view: of a value of this variable; of another than now is nothing lent.
        """
        if self.slab is not None or self.layout is not None or self.device is not None:
            return None
        if not can_lend(self.value) or self._lent_array() is not None:
            return None
        lent = LentArray(self.value)
        if not lent.shares(view):
            return None
        self._lent = weakref.ref(lent)
        return lent

    def shows(self, view: np.ndarray[Any, Any]) -> bool:
        """Whether this is a view of the variable that somebody was given."""
        return any(ref() is view for ref in self.views)

    def _lent_array(self) -> LentArray | None:
        return None if self._lent is None else self._lent()

    def _is_viewed(self) -> bool:
        return any(ref() is not None for ref in self.views)

    def peek(self, ids: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Copies rows to ``out``; the value stays where it lies."""
        if self.slab is not None:
            take_rows(self.slab.part(self.place), ids, out)
        elif self.layout is None and on_cpu(self.value):
            self.rows(write=False).lookup(ids, out)
        else:
            out[...] = rows_elsewhere(self.value, ids)

    def seen(self, ids: np.ndarray[Any, Any]) -> None:
        """Is told which rows are looked up; nothing follows for an array."""

    def changed(self, ids: np.ndarray[Any, Any]) -> None:
        """Ends an update of these rows."""
        self.version += 1
        if self.marks is not None:
            self.marks.wrote(ids)

    def rows(self, *, write: bool) -> Table:
        """Returns the table of the rows; to write, nobody else sees them change."""
        if self.layout is not None:
            self.put_alone(self.argument())
        if write and self._is_viewed():
            self._value, self.views = jnp.array(self.value, copy=True), []
            self._lent = None  # has the array of before for itself
        if not on_cpu(self.value):
            (self.device,) = self.value.devices()
            self._value = moved(self.value, cpu_device())
        if self.table is None or self.table.value is not self.value:
            self.table = table_of(self.value)
        lent = self._lent_array() if write else None
        return self.table if lent is None else LentTable(self.table, lent)


@final
class HashEntry:
    """One column of a hash table; whoever uses it holds the lock of the table.

    Args:
      shard: the table's shard of this task.
      lock: of the shard.
      column: name of the column.
    """

    __slots__ = ("_column", "_is_parameter", "lock", "shard")

    def __init__(self, shard: HashShard, lock: threading.Lock, column: str) -> None:
        self.shard = shard
        self.lock = lock
        self._column = HashColumn(shard, column)
        self._is_parameter = shard.spec.columns[0].name == column

    @property
    def version(self) -> int:
        """Updates of the table."""
        return self.shard.version - 1

    def rows(self, *, write: bool) -> Table:
        """Returns the table of the rows."""
        del write  # lookups copy
        return self._column

    def peek(self, ids: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Copies rows to ``out``; no id comes in, and none goes."""
        self._column.peek(ids, out)

    def seen(self, ids: np.ndarray[Any, Any]) -> None:
        """Lets ids that are looked up come in, and others go for them."""
        if self._is_parameter:
            self.shard.see(ids)

    def changed(self, ids: np.ndarray[Any, Any]) -> None:
        """Ends an update of these rows."""
        if self._is_parameter:
            self.shard.updated(ids)


def _is_same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two views that live are of the same memory, which nobody changes."""
    mine, theirs = one.__array_interface__["data"], other.__array_interface__["data"]
    return bool(mine == theirs) and one.dtype == other.dtype


def locks_in_order(entries: Sequence[Entry | HashEntry]) -> list[threading.Lock]:
    """Returns the locks of entries, each once."""
    # In one order for all, so that two updates never wait for each other.
    # The columns of a hash table share one.
    locks = {id(entry.lock): entry.lock for entry in entries}
    return [locks[number] for number in sorted(locks)]


@contextmanager
def held(entries: Sequence[Entry | HashEntry]) -> Iterator[None]:
    """Holds the locks of these entries."""
    found: Sequence[threading.Lock] | None = getattr(entries, "locks", None)
    locks = locks_in_order(entries) if found is None else found
    for lock in locks:
        lock.acquire()
    try:
        yield
    finally:
        for lock in locks:
            lock.release()


def padded_rows(entry: Entry | HashEntry, rows: RowsOf) -> np.ndarray[Any, Any]:
    """Returns the rows as an executable takes them.

    Raises:
      MalformedMessageError: an id without a row, or more than are due.
    """
    padded, count = aligned_empty(rows.type), len(rows.ids)
    if count > len(padded):
        raise MalformedMessageError(
            f"{count:,} rows of '{rows.variable.name}' are asked for where at most "
            f"{len(padded):,} are due; the sender's program is another one"
        )
    entry.rows(write=False).lookup(rows.ids, padded[:count])
    padded[count:] = 0
    return padded
