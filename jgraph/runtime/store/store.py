"""The variables of one task: values, versions, and locks that make updates atomic.

A variable is found by (container, name). Its value is an immutable ``jax.Array``; an
update runs a compiled function over donated values and puts the results back, holding
the locks of the variables it touches: updates of different variables run side by side.

A reader gets views of one version of all it asked for, without a copy, and never half
an update. While a view lives, an update of that variable is computed into other memory
and the view keeps its values; when nobody holds one, the update is made in place.

Rows are looked up and updated in the memory of that same array, at the cost of these
rows, so that a variable may be used by rows here and whole there.
"""

import itertools
import threading
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, final
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jgraph._compat import is_wide, wide_types
from jgraph.errors import (
    UninitializedError,
    VariableMismatchError,
)
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.replay import RowsAre
from jgraph.plan.program.row_values import aligned_empty, nearly, unpacked
from jgraph.runtime.compute_errors import as_error
from jgraph.runtime.store.entry import Entry, HashEntry, RowsOf, held, padded_rows
from jgraph.runtime.store.groups import GroupEntries, PackedRun, VariableGroup
from jgraph.runtime.store.hash_shard import HashShard
from jgraph.runtime.store.lent import LEAST_BYTES, LentArray
from jgraph.runtime.store.slab import Slab
from jgraph.runtime.store.undo import Undo, keep_rows, keep_values

Key: TypeAlias = tuple[str, str]
"""(container, name)."""

_SMALL_BYTES = 1 << 14
PART_BYTES: Final = 16 << 20
"""As much of a variable is in a record of all that there is."""
_same = jax.jit(lambda value: value)

Update: TypeAlias = Callable[..., Sequence[jax.Array]]
RecordChange: TypeAlias = Callable[[], object]
Arrays: TypeAlias = Sequence[np.ndarray[Any, Any]]
T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class VariableInfo:
    """One row of a store's table."""

    container: str
    name: str
    type: ValueType
    version: int


class VariableStore:
    """Variables of one task; safe to use from several threads.

    Example:
      >>> import jax.numpy as jnp
      >>> store = VariableStore(TaskName("/job:ps/task:0"))
      >>> w = StoredVariable("w", ValueType((2,), "float32"))
      >>> store.write([w], [jnp.ones(2)])
      >>> store.update([w], [], lambda w: [w * 3])
      []
      >>> store.read([w])[0].tolist()
      [3.0, 3.0]
    """

    def __init__(self, task: TaskName) -> None:
        self.task = task
        self._entries: dict[Key, Entry] = {}
        self._tables = HashTables(task)
        self._lock = threading.Lock()
        # Of groups in use; forgotten whenever an entry goes, or moves.
        self._groups: WeakKeyDictionary[VariableGroup, GroupEntries] = (
            WeakKeyDictionary()
        )

    def read(self, variables: Sequence[StoredVariable]) -> list[np.ndarray[Any, Any]]:
        """Returns read-only views of whole variables, all of one moment.

        Waits for updates under way. Let go of the views soon: an update in the
        meantime costs a copy. Of a group with packs, each packed run is one flat array.

        Raises:
          UninitializedError: one of them has no value yet.
        """
        entries = self._found(variables)
        with held(entries):
            runs, alone = _packed(entries)
            views = [run.view() for run in runs]
            return [*views, *(entry.view() for entry in alone)]

    def lookup(
        self,
        wanted: Sequence[RowsOf],
        record: RecordChange | None = None,
        *,
        peeks: bool = False,
    ) -> list[np.ndarray[Any, Any]]:
        """Returns copies of rows of variables, all of one moment.

        Where nearly all rows are there that there can be, they are padded with zeros.

        Args:
          wanted: rows of variables.
          record: called before anybody else can look at these variables.
          peeks: no key comes into a hash table for it, and none becomes younger.

        Raises:
          UninitializedError: a variable has no value yet.
          MalformedMessageError: a variable has no such row.
        """
        entries = self._with_rows([rows.variable for rows in wanted])
        found = []
        with held(entries):
            for entry, rows in zip(entries, wanted, strict=True):
                count, (most, *width) = len(rows.ids), rows.type.shape
                size = most if nearly(count, most) else count
                out = aligned_empty(ValueType((size, *width), rows.type.dtype))
                if peeks:
                    entry.peek(rows.ids, out[:count])
                else:
                    entry.seen(rows.ids)
                    entry.rows(write=False).lookup(rows.ids, out[:count])
                out[count:] = 0
                found.append(out)
            if record is not None:
                record()
        return found

    def write(
        self,
        variables: Sequence[StoredVariable],
        values: Sequence[Any],
        owned: Container[int] = (),
        record: RecordChange | None = None,
        undo: Undo | None = None,
        *,
        absent: bool = False,
    ) -> None:
        """Replaces whole variables at one moment; creates those that are absent.

        Args:
          variables: what to write, one per value. Of a group with packs each packed run
            has one flat array.
          values: arrays of the variables' types; they are copied.
          owned: positions of values that nobody else has: these are taken as they are.
          record: called before anybody else can look at these variables.
          undo: is given what puts back the values of those that were there before.
          absent: leave those that are there as they are.

        Raises:
          VariableMismatchError: a stored variable has another shape or dtype.
        """
        if isinstance(variables, VariableGroup) and variables.packs:
            found = self._known(variables)
            if found is not None:
                with held(found):
                    if undo is not None:
                        keep_values(undo, found)
                    _write_packed(found, variables, values, owned)
                    if record is not None:
                        record()
                return
            values, owned = _apart(variables, values), ()
        keys = [_key(variable) for variable in variables]
        with self._lock:
            for variable in variables:
                self._check_type(variable)
            known = {k: self._entries[k] for k in keys if k in self._entries}
            known = {} if absent else known
        new = {n: values[n] for n, key in enumerate(keys) if key not in known}
        lent = self._lent(new)
        # What lies in a slab is copied there; what does not, before anybody waits.
        arrays = {
            n: _as_jax(variable, value, owned=n in owned)
            for n, (variable, value) in enumerate(zip(variables, values, strict=True))
            if n not in lent and (n in new or known[keys[n]].slab is None)
        }
        with held(list(known.values())):
            if undo is not None:
                keep_values(undo, list(known.values()))
            written = [
                (known[key], variable, value, arrays.get(n))
                for n, (key, variable, value) in enumerate(
                    zip(keys, variables, values, strict=True)
                )
                if key in known
            ]
            _replace(written)
            with self._lock:
                for n, key in enumerate(keys):
                    if key not in known:
                        self._entries.setdefault(key, Entry(lent.get(n) or arrays[n]))
                if record is not None:
                    record()

    def _lent(self, values: Mapping[int, Any]) -> dict[int, LentArray]:
        """Returns those of new values that variables here have, by their numbers.

        They are not copied before they, or the variable that has them, change.
        """
        found: dict[int, LentArray] = {}
        large = {
            n: value
            for n, value in values.items()
            if isinstance(value, np.ndarray) and value.nbytes >= LEAST_BYTES
        }
        if not large:
            return found
        with self._lock:
            entries = [*self._entries.values()]
        for n, view in large.items():
            owner = next((entry for entry in entries if entry.shows(view)), None)
            if owner is not None:
                with held([owner]):
                    lent = owner.lend(view)
                if lent is not None:
                    found[n] = lent
        return found

    def reader(self, variable: StoredVariable) -> Callable[[int, int], Any]:
        """Returns what gives rows of a variable, from one to before another.

        They are of the moment of this call. Let go of it soon, see ``read``.

        Raises:
          UninitializedError: it has no value yet.
        """
        (entry,) = self._found([variable])
        with held([entry]):
            if entry.borrowed is not None:
                return entry.borrowed.rows
            view = entry.view()
        return lambda start, stop: view[start:stop] if view.ndim else view

    def fill(
        self, variables: Sequence[StoredVariable], read: Callable[[Arrays], T]
    ) -> T:
        """Replaces whole variables by what is put into their own memory.

        Those whose memory cannot be changed, as somebody looks at it or no CPU has it,
        and those that are absent, get other memory. Nobody sees a variable meanwhile.

        Args:
          variables: each once.
          read: takes an array of the type of each variable, and gives it its elements.
            When it raises, the values of these variables are undefined.

        Returns:
          What ``read`` returns.

        Raises:
          VariableMismatchError: a stored variable has another shape or dtype.
        """
        with self._lock:
            for variable in variables:
                self._check_type(variable)
            entries = [self._entries.get(_key(variable)) for variable in variables]
        with held([entry for entry in entries if entry is not None]):
            own = [entry and entry.memory() for entry in entries]
            arrays = [
                aligned_empty(variable.type) if place is None else place
                for variable, place in zip(variables, own, strict=True)
            ]
            result = read(arrays)
            for n, (variable, entry) in enumerate(zip(variables, entries, strict=True)):
                if entry is None or own[n] is None:
                    value = _as_jax(variable, arrays[n], owned=True)
                    if entry is not None:
                        entry.put(value)
                    else:
                        with self._lock:
                            self._entries[_key(variable)] = Entry(value)
                if entry is not None:
                    entry.version += 1
        return result

    def update(
        self,
        updates: Sequence[StoredVariable],
        reads: Sequence[StoredVariable],
        run: Update,
        row_updates: Sequence[RowsOf] = (),
        row_reads: Sequence[RowsOf] = (),
        layouts: Sequence[Sharding] = (),
        record: RecordChange | None = None,
        undo: Undo | None = None,
    ) -> list[jax.Array]:
        """Runs ``run`` atomically and stores the new ``updates`` and ``row_updates``.

        Updates of other variables, and work on none, go on at the same time.

        Args:
          updates: variables whose buffers are donated to ``run``; each packed run of a
            group is one flat array.
          reads: variables that ``run`` only reads; likewise.
          run: takes the values of ``updates`` and ``reads``, then the padded rows of
            ``row_updates`` and ``row_reads``; returns the new values of ``updates``,
            the new rows of ``row_updates``, then other results.
          row_updates: rows that are replaced by those that ``run`` returns.
          row_reads: rows that ``run`` only reads.
          layouts: how the arguments of ``run`` lie on several devices, if they do; the
            variables then stay as they lie there.
          record: called when it is done, before anybody else can look at them.
          undo: is given what puts back the values of before; these are kept for that,
            but for which keys a hash table has.

        Returns:
          The other results. Nothing is changed when ``run`` raises before it starts.
        """
        entries, others = self._found(updates), self._found(reads)
        changed = self._with_rows([rows.variable for rows in row_updates])
        looked_at = self._with_rows([rows.variable for rows in row_reads])
        rest = *others, *changed, *looked_at
        with held([*entries, *rest] if rest else entries):
            lie = iter(layouts) if layouts else itertools.repeat(None)
            old = _arguments(entries, lie, lent=True)
            first = len(old)
            old += _arguments(others, lie)
            both = zip([*changed, *looked_at], [*row_updates, *row_reads], strict=True)
            taken = [padded_rows(entry, rows) for entry, rows in both]
            if undo is not None:
                old[:first] = keep_values(undo, entries, old[:first])
                keep_rows(undo, changed, row_updates, taken)
            try:
                # Done when this returns: what is acknowledged has been applied.
                results = list(run(*old, *taken))
                for result in results:  # JAX's function for all takes twice as long
                    result.block_until_ready()
            except BaseException as error:
                self._drop_donated(updates, error)
                raise
            changes = bool(entries or changed)
            if changes:
                failpoint("update.computed")
            _put(entries, results[:first], laid=bool(layouts))
            new = [np.asarray(r) for r in results[first : first + len(changed)]]
            _put_rows(changed, row_updates, new)
            if changes:
                failpoint("update.applied")
            if record is not None:
                record()
        if changes:
            failpoint("update.recorded")
        return results[first + len(changed) :]

    def drop(self, containers: Iterable[str] = ()) -> int:
        """Forgets the variables of these containers (none named: all).

        Returns:
          How many variables were forgotten.
        """
        chosen = set(containers)
        with self._lock:
            self._groups.clear()
            keys = [k for k in self._entries if not chosen or k[0] in chosen]
            for key in keys:
                del self._entries[key]
            forgotten = self._tables.drop(chosen)
        return len(keys) + forgotten

    def forget(self, container: str, names: Iterable[str]) -> int:
        """Forgets some variables of a container; returns how many it had."""
        with self._lock:
            self._groups.clear()
            chosen = set(names)
            found = [(container, n) for n in chosen if (container, n) in self._entries]
            for key in found:
                del self._entries[key]
            tables = self._tables.forget(container, chosen)
        return len(found) + tables

    def move(self, source: str, target: str, *, beside: bool = False) -> None:
        """Makes all variables of a container those of another, in place of its own.

        Args:
          source: has them.
          target: is to have them.
          beside: it keeps its own, but those of the same names.
        """
        with self._lock:
            self._groups.clear()
            for key in [key for key in self._entries if key[0] == target]:
                if not beside:
                    del self._entries[key]
            for key in [key for key in self._entries if key[0] == source]:
                self._entries[target, key[1]] = self._entries.pop(key)
            self._tables.move(source, target, beside=beside)

    def table(self) -> list[VariableInfo]:
        """Returns what is stored, sorted by container and name; waits for no update."""
        with self._lock:
            rows = [
                VariableInfo(container, name, entry.stored_type, entry.version)
                for (container, name), entry in self._entries.items()
            ]
            rows += [
                VariableInfo(container, column.name, type_, shard.version - 1)
                for container, shard in self._tables
                for column, type_ in shard.types()
            ]
        return sorted(rows, key=lambda row: (row.container, row.name))

    def hash_table(self, container: str, spec: HashSpec) -> HashEntry:
        """Returns a shard of a hash table, made if it is not there.

        Raises:
          VariableMismatchError: the table is another one here.
          ConfigError: this host cannot have such a table.
        """
        with self._lock:
            return self._tables.entry(container, spec.columns[0].name, spec)

    def hash_tables(self) -> list[tuple[str, HashShard]]:
        """Returns (container, shard) of each hash table, to ask how it stands."""
        with self._lock:
            return list(self._tables)

    def put_rows(
        self,
        variable: StoredVariable,
        ids: np.ndarray[Any, Any],
        rows: np.ndarray[Any, Any],
    ) -> None:
        """Replaces rows of a variable; one that is absent is made, with any others.

        Args:
          variable: which.
          ids: int32[m], the rows, each once.
          rows: their values.

        Raises:
          VariableMismatchError: the stored variable has another shape or dtype.
          MalformedMessageError: the variable has no such row.
        """
        with self._lock:
            self._check_type(variable)
            entry = self._entries.get(_key(variable))
            if entry is None:
                value = _as_jax(variable, aligned_empty(variable.type), owned=True)
                entry = self._entries[_key(variable)] = Entry(value)
        with held([entry]):
            entry.rows(write=True).update(ids, rows)
            entry.changed(ids)

    def entries(self, container: str, names: Collection[str]) -> dict[str, Entry]:
        """Returns those of these variables that there are, by name; no columns."""
        with self._lock:
            keys = ((container, name) for name in names)
            return {k[1]: self._entries[k] for k in keys if k in self._entries}

    def tables_of(self, container: str, names: Collection[str]) -> list[HashEntry]:
        """Returns the hash tables among these variables: the parameter of each."""
        with self._lock:
            return [
                self._tables.entry(container, shard.spec.columns[0].name, shard.spec)
                for owner, shard in self._tables
                if owner == container and shard.spec.name in names
            ]

    def whole(
        self,
        container: str,
        tell: Callable[[str | RowsAre | HashSpec, Arrays], object],
        without: Collection[str] = (),
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Tells of all that a container holds, at one moment.

        Nothing of it changes meanwhile. Rows of hash tables are put in order, and what
        was counted for admission is forgotten: a table made of them is the same.

        Args:
          container: of the variables.
          tell: called with the name and the value of a variable, with some rows of a
            large one after the other, or with a hash table and its rows; see
            ``HashShard.state``.
          without: names of variables, and of hash tables, that it does not tell of.
          unless: asked at that moment whether this is none to tell of anything.
        """
        with self._lock:
            found = {
                name: entry
                for (owner, name), entry in self._entries.items()
                if owner == container and name not in without
            }
            tables = [
                self._tables.entry(container, shard.spec.columns[0].name, shard.spec)
                for owner, shard in self._tables
                if owner == container and shard.spec.name not in without
            ]
        with held([*found.values(), *tables]):
            if unless():
                return
            for name, entry in found.items():
                for what, arrays in _told(name, entry.view()):
                    tell(what, arrays)
            for table in tables:
                state = table.shard.state()
                table.shard.restore(state)
                tell(table.shard.spec, list(state.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(row.type.nbytes for row in self.table())

    def _found(self, variables: Sequence[StoredVariable]) -> list[Entry]:
        with self._lock:
            if not isinstance(variables, VariableGroup):
                return [self._entry(variable) for variable in variables]
            found = self._groups.get(variables)
            if found is None:
                entries = [self._entry(v) for v in variables]
                found = GroupEntries(entries, variables.packs)
                self._groups[variables] = found
            return found

    def _known(self, group: VariableGroup) -> GroupEntries | None:
        """Returns the entries of a group; None if some are absent."""
        with self._lock:
            found = self._groups.get(group)
            if found is None and all(_key(v) in self._entries for v in group):
                for variable in group:
                    self._check_type(variable)
                entries = [self._entry(variable) for variable in group]
                found = self._groups[group] = GroupEntries(entries, group.packs)
            return found

    def _with_rows(
        self, variables: Sequence[StoredVariable]
    ) -> list[Entry | HashEntry]:
        with self._lock:
            return [
                self._entry(variable)
                if variable.table is None
                else self._tables.entry(
                    variable.container, variable.name, variable.table
                )
                for variable in variables
            ]

    def _entry(self, variable: StoredVariable) -> Entry:
        entry = self._entries.get(_key(variable))
        if entry is None:
            raise UninitializedError(
                f"variable '{variable.name}' on {self.task} has no value yet; give it "
                "one with session.initialize([variable]), session.write({variable: "
                "array}) or from a checkpoint",
                variable=variable.name,
                task=self.task,
            )
        # Asked for each variable at each step: looking at an array takes too long.
        if entry.type is not variable.type and entry.type != variable.type:
            self._check_type(variable)
            entry.type = variable.type
        return entry

    def _check_type(self, variable: StoredVariable) -> None:
        entry = self._entries.get(_key(variable))
        if entry is None:
            return
        stored, type_ = entry.stored_type, variable.type
        if stored.shape != type_.shape or stored.dtype != type_.dtype:
            raise VariableMismatchError(
                f"variable '{variable.name}' on {self.task} is {stored}, and this "
                f"program says {variable.type}; choose another name, or drop the old "
                "one with cluster.reset()",
                variable=variable.name,
                task=self.task,
            )

    def _drop_donated(
        self, updates: Sequence[StoredVariable], cause: BaseException
    ) -> None:
        # A failure after the start has consumed the old buffers: there is no value
        # left to go on with, and saying so beats a later "array was deleted".
        with self._lock:
            lost = [
                v
                for v in updates
                if _key(v) in self._entries and self._entries[_key(v)].is_lost
            ]
            for variable in lost:
                del self._entries[_key(variable)]
            self._groups.clear()
        if lost:
            names = ", ".join(v.name for v in lost)
            raise as_error(cause, self.task, names) from cause


def _arguments(
    entries: Sequence[Entry], lie: Iterator[Sharding | None], *, lent: bool = False
) -> list[Any]:
    """Returns values as a function takes them: packed runs of a group as one."""
    runs, alone = _packed(entries)
    values = [run.slab().value for run in runs]
    # Layouts are of those that lie alone: what lies over several devices is not packed.
    pairs = zip(alone, lie, strict=False)
    return [*values, *(entry.argument(layout, lent=lent) for entry, layout in pairs)]


def _put(entries: Sequence[Entry], values: Sequence[jax.Array], *, laid: bool) -> None:
    """Replaces values by those that a function gives for ``_arguments``."""
    runs, alone = _packed(entries)
    for run, value in zip(runs, values, strict=False):
        run.slab().put(value)
    for entry, value in zip(alone, values[len(runs) :], strict=False):
        entry.put(value, entry.layout if laid else None)
    for entry in entries:
        entry.version += 1


def _write_packed(
    entries: GroupEntries,
    group: VariableGroup,
    values: Sequence[Any],
    owned: Container[int],
) -> None:
    """Replaces the values of a group: the packed runs whole, and the others."""
    first = len(entries.runs)
    for n, (run, value) in enumerate(zip(entries.runs, values, strict=False)):
        run.slab().put(_on_device(value) if n in owned else jnp.array(value, copy=True))
        for entry in run.entries:
            entry.version += 1
    alone = group[len(group) - len(entries.alone) :]
    pairs = zip(entries.alone, alone, values[first:], strict=True)
    _replace(
        (entry, variable, value, _as_jax(variable, value, owned=n in owned))
        for n, (entry, variable, value) in enumerate(pairs, first)
    )


def _apart(group: VariableGroup, values: Sequence[Any]) -> list[Any]:
    """Returns a value for each variable of a group."""
    layouts = group.layouts()
    cut = [
        part
        for (_, cuts), flat in zip(layouts, values, strict=False)
        for part in unpacked(flat, cuts)
    ]
    return [*cut, *values[len(layouts) :]]


def _replace(
    written: Iterable[tuple[Entry, StoredVariable, Any, jax.Array | None]],
) -> None:
    """Replaces values, by arrays made of them if they are; those of a slab together."""
    in_slabs: dict[Slab, dict[int, Any]] = {}
    for entry, variable, value, array in written:
        if entry.slab is not None:
            in_slabs.setdefault(entry.slab, {})[entry.place] = value
        elif array is not None:
            entry.put(array)
        else:  # it has left a slab since
            entry.put(_as_jax(variable, value, owned=False))
        entry.version += 1
    for slab, parts in in_slabs.items():
        slab.write(parts)


def _packed(entries: Sequence[Entry]) -> tuple[Sequence[PackedRun], Sequence[Entry]]:
    """Returns the packed runs of a group, and its other entries."""
    if isinstance(entries, GroupEntries):
        return entries.runs, entries.alone
    return (), entries


def _put_rows(
    tables: Sequence[Entry | HashEntry],
    updates: Sequence[RowsOf],
    new: Sequence[np.ndarray[Any, Any]],
) -> None:
    for table, rows, values in zip(tables, updates, new, strict=True):
        table.rows(write=True).update(rows.ids, values[: len(rows.ids)])
    for table, rows in zip(tables, updates, strict=True):
        table.changed(rows.ids)


def _told(
    name: str, value: np.ndarray[Any, Any]
) -> Iterator[tuple[str | RowsAre, Arrays]]:
    """Yields a value as records of it are: a large one by rows."""
    if value.nbytes <= PART_BYTES or value.ndim == 0:
        yield name, [value]
        return
    at_once = max(1, PART_BYTES * len(value) // value.nbytes)
    for first in range(0, len(value), at_once):
        rows = value[first : first + at_once]
        ids = np.arange(first, first + len(rows), dtype=np.int32)
        yield RowsAre(name, len(value)), [ids, rows]


def _key(variable: StoredVariable) -> Key:
    return variable.container, variable.name


def _as_jax(variable: StoredVariable, value: Any, *, owned: bool) -> jax.Array:
    # Asked for each write: entering the context takes longer than a small write.
    if not is_wide(variable.type.dtype):
        return _on_device(value) if owned else jnp.array(value, copy=True)
    with wide_types():
        return _on_device(value) if owned else jnp.array(value, copy=True)


def _on_device(value: Any) -> jax.Array:
    """Returns a value that nobody else has as one of JAX, without a copy if large."""
    # A call of a compiled function takes a small array in a fifth of the time.
    small = isinstance(value, np.ndarray) and value.nbytes <= _SMALL_BYTES
    taken: jax.Array = _same(value) if small else jax.device_put(value)
    return taken


@final
class HashTables:
    """Shards by (container, name of the table); its user keeps threads apart."""

    def __init__(self, task: TaskName) -> None:
        self._task = task
        self._shards: dict[tuple[str, str], tuple[HashShard, threading.Lock]] = {}

    def __iter__(self) -> Iterator[tuple[str, HashShard]]:
        """Yields (container, shard) of each table."""
        for (container, _), (shard, _) in self._shards.items():
            yield container, shard

    def entry(self, container: str, column: str, spec: HashSpec) -> HashEntry:
        """Returns a column of a table.

        Raises:
          VariableMismatchError: the table is another one here.
          ConfigError: this host cannot have such a table.
        """
        key = container, spec.name
        if key not in self._shards:
            self._shards[key] = HashShard(spec), threading.Lock()
        shard, lock = self._shards[key]
        if shard.spec != spec:
            raise VariableMismatchError(
                f"hash table '{spec.name}' on {self._task} has another budget, policy "
                "or columns than this program says; choose another name, or drop the "
                "old one with cluster.reset()",
                variable=spec.name,
                task=self._task,
            )
        return HashEntry(shard, lock, column)

    def move(self, source: str, target: str, *, beside: bool) -> None:
        """Makes the tables of a container those of another.

        Args:
          source: has them.
          target: is to have them.
          beside: it keeps its own, but those of the same names.
        """
        if not beside:
            self.drop([target])
        for key in [key for key in self._shards if key[0] == source]:
            self._shards[target, key[1]] = self._shards.pop(key)

    def forget(self, container: str, names: Collection[str]) -> int:
        """Forgets some tables of a container, by name; returns how many it had."""
        keys = [k for k in self._shards if k[0] == container and k[1] in names]
        for key in keys:
            del self._shards[key]
        return len(keys)

    def drop(self, containers: Collection[str]) -> int:
        """Forgets the tables of these containers (none named: all)."""
        keys = [key for key in self._shards if not containers or key[0] in containers]
        for key in keys:
            del self._shards[key]
        return len(keys)
