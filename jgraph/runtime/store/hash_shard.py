"""One shard of a hash table: rows by key, within a budget of bytes.

A key that is looked up and has no row gets one if the table's policy admits it; the row
starts with values that are a function of its key. When the budget is spent, the policy
chooses rows to give up. The parameter and the optimizer's slots are columns over the
same rows, so they come and go together.

Time is the version of the shard, which every update raises by one. A lookup makes the
rows of its keys young before it gives rows to new keys, and a row that was looked up at
this version stays. So no row goes between a lookup and the next update. An update of
another worker may come first: then the row may go, and the gradient of the key is
dropped, or taken by its new row if the key came back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.errors import ConfigError, MalformedMessageError
from jgraph.graph.rows.hash_keys import Keys, shard_of
from jgraph.graph.rows.hash_spec import Column, Eviction, HashSpec
from jgraph.plan.program.nodes import ValueType
from jgraph.runtime.store.hash_index import ABSENT, HashIndex, Rows
from jgraph.runtime.store.hash_policy import (
    Gate,
    nbytes_for,
    rows_within,
    sketch_width,
    victims,
)
from jgraph.runtime.store.hash_rows import initial_rows, np_dtype, shape_of
from jgraph.runtime.store.tables import put_rows

Array: TypeAlias = np.ndarray[Any, Any]
State: TypeAlias = dict[str, Array]
"""``keys``, ``age`` (versions since the last lookup), ``uses`` (lookups, where they are
counted), and each column; all of one length."""

_NO_ROW = 0  # zeros take no memory until a row is used
_NO_COUNTS: Array = np.zeros((0, 0), np.uint8)


@final
@dataclass(slots=True)
class HashCounts:
    """What happened to keys since the shard was made.

    Attributes:
      found: looked up and there.
      admitted: got a row.
      declined: not admitted by the policy.
      refused: admitted, but there was no room and nothing to evict.
      evicted: rows given up for others.
      expired: rows given up because of their age.
      dropped: updates of keys that had no row.
    """

    found: int = 0
    admitted: int = 0
    declined: int = 0
    refused: int = 0
    evicted: int = 0
    expired: int = 0
    dropped: int = 0


@final
class HashShard:
    """Rows of keys; not safe to use from several threads at once.

    Args:
      spec: the columns, the budget and the policies.

    Raises:
      ConfigError: the budget is smaller than one row, or more than this host has.

    Example:
      >>> from jgraph.graph.rows.hash_spec import Column
      >>> shard = HashShard(HashSpec("ads", (Column("rows", 2),), 1 << 16))
      >>> keys = np.array([12345678901234, -5])
      >>> shard.lookup(keys).tolist()
      [[0.0, 0.0], [0.0, 0.0]]
      >>> _ = shard.update(keys, lambda rows: [rows + 1])
      >>> shard.lookup(keys[:1]).tolist(), len(shard)
      ([[1.0, 1.0]], 2)
    """

    def __init__(self, spec: HashSpec) -> None:
        self.spec = spec
        self.capacity = rows_within(spec)
        self.version = self._swept = 1
        self.counts = HashCounts()
        self._gate = Gate(spec.admission, sketch_width(self.capacity))
        self._last_lookup: tuple[Keys, Rows] | None = None
        self.marks: np.ndarray[Any, np.dtype[np.bool_]] | None = None
        """Which rows have changed, while the shard is copied; see ``copied``."""
        # Address space for all rows; the system gives memory when a row is first used.
        try:
            self._index = HashIndex(self.capacity)
            self._used = np.zeros(self.capacity, np.int64)
            lfu = self.capacity if spec.eviction == "lfu" else 0
            self._uses = np.zeros(lfu, np.uint32)
            self._columns = [
                np.empty(shape_of(column, self.capacity), np_dtype(column))
                for column in spec.columns
            ]
        except MemoryError:
            raise ConfigError(
                f"hash table '{spec.name}' may take {spec.capacity_bytes} bytes here, "
                "more than this host can give; lower capacity_bytes or use more ps"
            ) from None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows that were ever used, and what finds them."""
        return nbytes_for(self.spec, self._index.high)

    def lookup(self, keys: Keys) -> Array:
        """Returns the parameter's rows of these keys, as a step of training does.

        Args:
          keys: int64[n]; equal keys count once for admission. Unknown ones may get
            rows, and known ones become younger.

        Returns:
          ``[n, width]``, a copy.
        """
        self.see(keys)
        return self.take(0, keys)

    def peek(self, column: int, keys: Keys, out: Array) -> None:
        """Copies the rows of one column to ``out``; nothing changes, and none counts.

        Args:
          column: number of the column.
          keys: int64[n]; those without a row have the mean of what new rows are, as in
            a model that was exported or is evaluated.
          out: ``[n, width]``.
        """
        rows = self._index.find(keys)
        self._columns[column].take(rows, axis=0, out=out, mode="clip")
        out[rows < 0] = self.spec.columns[column].initial.mean

    def update(self, keys: Keys, run: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        """Replaces all columns of these keys' rows by ``run(*columns)``.

        A key without a row (evicted since it was looked up, or never admitted) takes
        part with initial values, and its results are dropped and counted.

        Args:
          keys: int64[n], each once.
          run: takes an array ``[n, …]`` per column and returns the new ones, and
            perhaps more.

        Returns:
          What ``run`` returned beyond the columns. Nothing changes when it raises.
        """
        count = len(self._columns)
        results = run(*(self.take(column, keys) for column in range(count)))
        for column, new in enumerate(results[:count]):
            self.put(column, keys, np.asarray(new))
        self.updated(keys)
        return results[count:]

    def see(self, keys: Keys) -> None:
        """Takes a lookup of these keys into account: unknown ones may get rows."""
        self._expire()
        rows = self._rows_of(keys)
        self._touch(rows[rows >= 0])
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            rows[absent] = self._admit(keys[absent])
            self._last_lookup = keys, rows

    def take(self, column: int, keys: Keys, out: Array | None = None) -> Array:
        """Returns the rows of one column, initial values for keys without one.

        Args:
          column: number of the column.
          keys: int64[n].
          out: where to put them.
        """
        rows = self._rows_of(keys)
        # The default mode would fill a buffer first; a key without a row reads any.
        values: Array = self._columns[column].take(rows, axis=0, out=out, mode="clip")
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            values[absent] = initial_rows(keys[absent], self.spec.columns[column])
        return values

    def put(self, column: int, keys: Keys, values: Array) -> None:
        """Replaces the rows of one column, of those keys that have one."""
        rows = self._rows_of(keys)
        there = rows >= 0
        if not there.all():
            rows, values = rows[there], values[there]
        put_rows(self._columns[column], rows, values)
        self._changed(rows)

    def updated(self, keys: Keys) -> None:
        """Ends an update of the columns of these keys: the next version begins."""
        self.counts.dropped += int(np.sum(self._rows_of(keys) < 0))
        self.version += 1

    def types(self) -> list[tuple[Column, ValueType]]:
        """Returns the columns and what they take up now."""
        return [
            (column, ValueType(shape_of(column, len(self)), column.dtype))
            for column in self.spec.columns
        ]

    def state(self) -> State:
        """Returns a copy of all rows, ordered by key."""
        rows = np.flatnonzero(self._used > _NO_ROW).astype(np.int32)
        keys = self._index.keys_of(rows)
        order = np.argsort(keys)
        rows = rows[order]
        state: State = {"keys": keys[order], "age": self.version - self._used[rows]}
        uses = self._uses if len(self._uses) else np.ones(self._index.high, np.uint32)
        state["uses"] = uses[rows]
        for column, values in zip(self.spec.columns, self._columns, strict=True):
            state[column.name] = values[rows]
        return state

    def restore(self, state: State) -> None:
        """Replaces all rows by those of ``state``; of too many the best are kept.

        What was counted of keys without a row, for admission, is forgotten.
        """
        high = self._index.high
        self._gate = Gate(self.spec.admission, sketch_width(self.capacity))
        self._index, self._last_lookup = HashIndex(self.capacity), None
        self._used = np.zeros(self.capacity, np.int64)
        count = len(state["keys"])
        age = state["age"]
        self.version = self._swept = 1 + int(age.max(initial=0))
        used = self.version - age
        survivors = np.arange(count)
        if count > self.capacity:
            policy: Eviction = "lfu" if len(self._uses) else "lru"
            evicted = victims(
                used, state["uses"], self.version + 1, count - self.capacity, policy
            )
            survivors = np.delete(survivors, evicted)
            self.counts.evicted += len(evicted)
        rows = self._index.insert(state["keys"][survivors])
        self._used[rows] = used[survivors]
        if len(self._uses):
            self._uses[rows] = state["uses"][survivors]
        for column, values in zip(self.spec.columns, self._columns, strict=True):
            values[rows] = state[column.name][survivors]
        self._changed(slice(max(high, self._index.high)))

    # ------------------------------------------------------------ copies

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row in a copy."""
        values = sum(column[:1].nbytes for column in self._columns)
        return values + 20 + self._uses.itemsize * bool(len(self._uses))

    def mark(self, rows: int = 0) -> None:
        """Notes from now on which rows change; those that were ever used have.

        Args:
          rows: so many of them at least.
        """
        self.marks = np.zeros(self.capacity, np.bool_)
        self.marks[: max(rows, self._index.high)] = True

    @property
    def marked(self) -> Rows:
        """The rows that have changed since they were copied, ascending."""
        assert self.marks is not None  # since the copy began
        return np.flatnonzero(self.marks).astype(np.int32)

    def copied(self, rows: Rows) -> list[Array]:
        """Returns what rows are, for ``put_copied`` of a shard of the same spec.

        A copy that gets each row that was marked, and then what ``ends`` returns, does
        for ever what this shard does.

        Args:
          rows: int32[n], ascending; they are not marked any more.

        Returns:
          The rows, their keys, last lookups (0: it has no key), numbers of lookups if
          these are counted, and each column.
        """
        if self.marks is not None:
            self.marks[rows] = False
        keys, columns = self._index.keys_of(rows), [c[rows] for c in self._columns]
        uses = self._uses[rows] if len(self._uses) else self._uses
        return [rows, keys, self._used[rows], uses, *columns]

    def ends(self) -> list[Array]:
        """Returns all that is not of one row, for ``put_ends``."""
        cells, added = _NO_COUNTS, 0
        if self._gate.sketch is not None:
            cells, added = self._gate.sketch.state
        index, counts = self._index, astuple(self.counts)
        numbers = [self.version, self._swept, index.high, added, *counts]
        return [np.array(numbers, np.int64), index.returned, cells.copy()]

    def put_copied(self, arrays: Sequence[Array]) -> None:
        """Makes rows what they are in another shard; nobody looks keys up meanwhile.

        Args:
          arrays: see ``copied``.

        Raises:
          MalformedMessageError: they are not of such a shard.
        """
        none = np.zeros(0, np.int32)
        self._check(arrays, self.copied(none))
        rows, keys, used, uses, *columns = arrays
        ascend = bool((rows[1:] > rows[:-1]).all())
        if len(rows) and not (ascend and rows[0] >= 0 and rows[-1] < self.capacity):
            raise self._other()
        if len({len(a) for a in (rows, keys, used, *columns)}) != 1:
            raise self._other()
        self._last_lookup = None
        self._index.follow(rows, keys, used > _NO_ROW, self._used[rows] > _NO_ROW)
        self._used[rows] = used
        if len(self._uses):
            self._uses[rows] = uses
        for column, values in zip(self._columns, columns, strict=True):
            column[rows] = values

    def put_ends(self, arrays: Sequence[Array]) -> None:
        """Ends a copy: from now on it is a shard like the other.

        Args:
          arrays: see ``ends``.

        Raises:
          MalformedMessageError: they are not of such a shard.
        """
        self._check(arrays, self.ends())
        numbers, returned, cells = arrays
        if len(numbers) != len(self.ends()[0]) or cells.shape != self.ends()[2].shape:
            raise self._other()
        self.version, self._swept, high, added, *counts = map(int, numbers)
        self.counts = HashCounts(*counts)
        self._index.end(high, returned)
        if self._gate.sketch is not None:
            self._gate.sketch.restore(cells, added)

    def _check(self, arrays: Sequence[Array], own: Sequence[Array]) -> None:
        """Refuses arrays that are not as these, but for how many rows they are of."""
        if [(a.dtype, a.shape[1:]) for a in arrays] != [
            (a.dtype, a.shape[1:]) for a in own
        ]:
            raise self._other()

    def _other(self) -> MalformedMessageError:
        return MalformedMessageError(
            f"rows came that are not those of hash table '{self.spec.name}'; the "
            "sender's table is another one"
        )

    def _changed(self, rows: Rows | slice) -> None:
        if self.marks is not None:
            self.marks[rows] = True

    def _rows_of(self, keys: Keys) -> Rows:
        # A lookup and an update ask for the same keys several times.
        if self._last_lookup is None or self._last_lookup[0] is not keys:
            if keys.dtype != np.int64:
                raise MalformedMessageError(
                    f"keys of hash table '{self.spec.name}' came as {keys.dtype}, not "
                    "int64; the sender's program is another one"
                )
            self._last_lookup = keys, self._index.find(keys)
        return self._last_lookup[1]

    def _touch(self, rows: Rows) -> None:
        self._used[rows] = self.version
        if len(self._uses):
            self._uses[rows] += 1
        self.counts.found += len(rows)
        self._changed(rows)

    def _admit(self, keys: Keys) -> Rows:
        """Returns the rows of absent keys, or ``ABSENT``."""
        unique, places = np.unique(keys, return_inverse=True)
        rows = np.full(len(unique), ABSENT, np.int32)
        chosen = np.flatnonzero(self._gate.admits(unique, self.version))
        self.counts.declined += len(unique) - len(chosen)
        self._make_room(len(chosen))
        room = min(self._index.room, len(chosen))
        self.counts.refused += len(chosen) - room
        self.counts.admitted += room
        if room:
            chosen = chosen[:room]
            new = rows[chosen] = self._index.insert(unique[chosen])
            self._used[new] = self.version
            if len(self._uses):
                self._uses[new] = 1
            for column, values in zip(self.spec.columns, self._columns, strict=True):
                values[new] = initial_rows(unique[chosen], column)
            self._changed(new)
        return rows[places]

    def _make_room(self, count: int) -> None:
        missing = count - self._index.room
        if missing <= 0 or self.spec.eviction == "ttl":
            return
        # Choosing looks at every row: some more go at a time, so that it is rare.
        wanted = max(missing, self.capacity // 32)
        used = self._used[: self._index.high]
        evicted = victims(used, self._uses, self.version, wanted, self.spec.eviction)
        self.counts.evicted += len(evicted)
        self._give_up(evicted)

    def _expire(self) -> None:
        """Gives up rows over their time to live; looks four times in that time."""
        ttl = self.spec.ttl
        if not ttl or self.version - self._swept < max(1, ttl // 4):
            return
        self._swept = self.version
        used = self._used[: self._index.high]
        expired = np.flatnonzero((used > _NO_ROW) & (used < self.version - ttl))
        self.counts.expired += len(expired)
        self._give_up(expired.astype(np.int32))

    def _give_up(self, rows: Rows) -> None:
        self._last_lookup = None
        self._index.remove(rows)
        self._used[rows] = _NO_ROW
        self._changed(rows)


@final
class HashColumn:
    """One column of a shard as a table of rows by their ids, which are the keys.

    Args:
      shard: whose.
      column: the column's name.

    Example:
      >>> from jgraph.graph.rows.hash_spec import Column
      >>> shard = HashShard(HashSpec("ads", (Column("rows", 2),), 1 << 16))
      >>> keys, out = np.array([2**40]), np.empty((1, 2), np.float32)
      >>> shard.see(keys)
      >>> HashColumn(shard, "rows").update(keys, np.ones((1, 2)))
      >>> HashColumn(shard, "rows").lookup(keys, out)
      >>> out.tolist()
      [[1.0, 1.0]]
    """

    def __init__(self, shard: HashShard, column: str) -> None:
        self._shard = shard
        self._number = [c.name for c in shard.spec.columns].index(column)

    def lookup(self, ids: Keys, out: Array) -> None:
        """Copies the rows of ``ids`` to ``out``; initial values for those without."""
        self._shard.take(self._number, ids, out)

    def peek(self, ids: Keys, out: Array) -> None:
        """Copies the rows of ``ids`` to ``out``, as ``HashShard.peek`` does."""
        self._shard.peek(self._number, ids, out)

    def update(self, ids: Keys, rows: Array) -> None:
        """Replaces the rows of ``ids`` that are there."""
        self._shard.put(self._number, ids, rows)


def reshard(states: Sequence[Mapping[str, Array]], shards: int) -> list[State]:
    """Returns the states of ``shards`` shards with the rows of all ``states``.

    Args:
      states: one per shard, as ``HashShard.state`` gives.
      shards: how many there will be.

    Example:
      >>> from jgraph.graph.rows.hash_spec import Column
      >>> one = HashShard(HashSpec("ads", (Column("rows", 2),), 1 << 16))
      >>> _ = one.lookup(np.arange(5))
      >>> [state["keys"].tolist() for state in reshard([one.state()], 2)]
      [[0, 1, 3, 4], [2]]
    """
    whole = {name: np.concatenate([s[name] for s in states]) for name in states[0]}
    order = np.argsort(whole["keys"])
    homes = shard_of(whole["keys"][order], shards)
    rows = [order[homes == number] for number in range(shards)]
    return [{name: values[r] for name, values in whole.items()} for r in rows]
