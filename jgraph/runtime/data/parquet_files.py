"""Parquet files as a data source, with a cache of decoded row groups.

A row group is decoded as a whole, and becomes arrays once: its columns stay where Arrow
has put them, and each example is copied once from there, whichever row groups the
examples of a read lie in. Batches of a few examples, and leases that end within a row
group, then cost a copy and no decoding. What memory has no room for is written to a
file the third time that it is decoded, and never decoded again: two leases share a row
group, and to decode a small one twice costs less than to write it.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from jgraph.coordination.data.slots import Part, Rows, Shuffle
from jgraph.errors import SourceError
from jgraph.runtime.cost import FEW_CORES, available_cores
from jgraph.runtime.data.batches import Array, Field
from jgraph.runtime.data.gathering import Piece, gathered, joined, part_of, size_of
from jgraph.runtime.data.jax_types import as_jax_type
from jgraph.runtime.data.packed_lists import packed_dtypes, unpacked
from jgraph.runtime.data.plain_pages import PlainPages, layout_of
from jgraph.runtime.data.record_files import needs
from jgraph.runtime.data.spilled_arrays import SpilledArrays

KEPT_BYTES: Final = 64 << 20
"""Of decoded row groups that a reader keeps in memory, those that were read last."""
_RECENT: Final = 4
"""Row groups that are kept of files that are larger than that: another lease may share
them, and memory that is used again costs less than what is new to the process."""
_TOGETHER_BYTES: Final = 16 << 20
"""Of row groups that are decoded together: as a rule all that a lease is of."""
_DECODED: Final = 2
"""A row group that was decoded so often is written to a file the next time."""


@final
class ParquetReader:
    """Parquet files with one schema; columns of numbers, or of lists of one length.

    Args:
      files: path of each.
      columns: those to read; None: all.
      wide: keep 64-bit types.
      kept_bytes: of decoded row groups, those that were read last.
      spilled_bytes: of those decoded thrice, in a file; see ``SpilledArrays``.

    Raises:
      SourceError: a column that is missing or not of numbers, or another schema.
    """

    shuffle: Shuffle = "slots"

    def __init__(
        self,
        files: Sequence[Path],
        columns: Sequence[str] | None,
        wide: bool,
        kept_bytes: int = KEPT_BYTES,
        spilled_bytes: int | None = None,
    ) -> None:
        parquet = needs("pyarrow.parquet", "Parquet")
        # One column is one read of the file anyway: none to put together ahead.
        ahead = columns is None or len(columns) > 1
        arrow = needs("pyarrow", "Parquet")
        try:
            self._handles = [arrow.OSFile(str(file)) for file in files]
            self._opened = [
                parquet.ParquetFile(file, pre_buffer=ahead) for file in self._handles
            ]
        except (OSError, ValueError) as error:
            raise SourceError(f"a Parquet file cannot be read: {error}") from error
        first = self._opened[0].schema_arrow
        self._packed = packed_dtypes(first, str(files[0]))
        for file, opened in zip(files, self._opened, strict=True):
            schema = opened.schema_arrow
            is_alike = packed_dtypes(schema, str(file)) == self._packed
            if not (schema.equals(first) and is_alike):
                raise SourceError(
                    f"{file} has another schema than {files[0]}; write both alike, or "
                    "name files of one kind",
                    file=str(file),
                )
        self._columns = sorted(columns or first.names)
        if missing := [name for name in self._columns if name not in first.names]:
            raise SourceError(
                f"{files[0]} has no column '{missing[0]}'; it has "
                f"{', '.join(first.names)}",
            )
        self._files = files
        self._wide = wide
        types = needs("pyarrow.types", "Parquet")
        self._is_sized = all(
            types.is_primitive(first.field(name).type) for name in self._columns
        )
        # Threads of Arrow's would take cores from the steps, where there are few.
        self._threads = available_cores() > FEW_CORES
        self.parts = tuple(
            Part(str(file), opened.metadata.num_rows)
            for file, opened in zip(files, self._opened, strict=True)
        )
        # First row of each row group, and the end.
        self._groups = [
            np.cumsum([0, *(m.row_group(g).num_rows for g in range(m.num_row_groups))])
            for m in (opened.metadata for opened in self._opened)
        ]
        self._cache: OrderedDict[tuple[int, int], list[Piece]] = OrderedDict()
        self._room = kept_bytes
        self._spill = SpilledArrays(spilled_bytes)
        self._spilled: dict[tuple[int, int], list[Piece]] = {}
        self._decoded: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()
        self._plain: list[PlainPages] = []
        full = next((i for i, part in enumerate(self.parts) if part.examples), None)
        if full is None:
            raise SourceError(f"{files[0]} has no rows")
        self.fields: Mapping[str, Field] = {}
        arrays = self.read(full, np.zeros(1, np.int64))
        self.fields = {n: Field(a.dtype, a.shape[1:]) for n, a in arrays.items()}
        self._row_bytes = sum(array.nbytes for array in arrays.values())
        if self._row_bytes * sum(part.examples for part in self.parts) > kept_bytes:
            largest = max(int(np.diff(g).max(initial=0)) for g in self._groups)
            self._room = min(kept_bytes, _RECENT * self._row_bytes * largest)
            self._room -= sum(size_of(group) for group in self._cache.values())
            self._plain = self._plain_pages(first)

    def _plain_pages(self, schema: Any) -> list[PlainPages]:
        """Returns what reads pages that need no decoding; none: a column never has."""
        layouts = {
            name: layout_of(
                schema.field(name).type,
                self._packed.get(name),
                field.shape[0] if field.shape else 0,
            )
            for name, field in self.fields.items()
        }
        known = {name: layout for name, layout in layouts.items() if layout is not None}
        if len(known) < len(layouts):
            return []
        pairs = zip(self._handles, self._opened, strict=True)
        return [PlainPages(file, opened.metadata, known) for file, opened in pairs]

    def read(self, part: int, rows: Rows) -> dict[str, Array]:
        """See ``Reader.read``."""
        with self._lock:  # a loop that has ended may still be reading
            return self._read(part, rows)

    def _read(self, part: int, rows: Rows) -> dict[str, Array]:
        starts = self._groups[part]
        low, high = int(rows.min()), int(rows.max())
        first, last = (np.searchsorted(starts, (low, high), "right") - 1).tolist()
        if pieces := self._plain_pieces(part, range(first, last + 1), low, high + 1):
            return gathered(pieces, rows)
        if first == last:
            return gathered(self._group(part, first), rows)
        numbers = [n for n in range(first, last + 1) if starts[n] < starts[n + 1]]
        if high - low >= len(rows):  # else they have a row each, as in most leases
            of_rows = np.searchsorted(starts, rows, "right") - 1
            numbers = (first + np.flatnonzero(np.bincount(of_rows - first))).tolist()
        return gathered(self._groups_of(part, numbers), rows)

    def _plain_pieces(
        self, part: int, numbers: Sequence[int], low: int, end: int
    ) -> list[Piece]:
        """Returns rows of row groups that need no decoding; none: one needs it."""
        if not self._plain or (end - low) * self._row_bytes > _TOGETHER_BYTES:
            return []
        starts, pieces = self._groups[part], []
        for number in numbers:
            start = int(starts[number])
            first, stop = max(low - start, 0), min(end, int(starts[number + 1])) - start
            if first >= stop:
                continue
            rows = self._plain[part].read(number, first, stop)
            if rows is None:
                return []
            for at, columns in rows:
                arrays = {
                    name: self._checked(array, name, part)
                    for name, array in columns.items()
                }
                pieces.append(Piece(start + at, arrays))
        return pieces

    def _groups_of(self, part: int, numbers: Sequence[int]) -> list[Piece]:
        """Returns the arrays of row groups, given in ascending order.

        Those of them that follow each other, and are neither kept nor decoded so often
        that they are to be, are decoded by one call.
        """
        starts = self._groups[part]
        together = _TOGETHER_BYTES // max(self._row_bytes, 1)
        # Before what is decoded takes the place of any.
        at_hand = {number: self._kept(part, number) for number in numbers}
        runs: list[list[int]] = [[]]
        for number in numbers:
            if at_hand[number] or self._decoded[part, number] >= _DECODED:
                continue
            run = runs[-1]
            if (
                run
                and number == run[-1] + 1
                and starts[number + 1] - starts[run[0]] <= together
            ):
                run.append(number)
            else:
                runs.append([number])
        pieces = [
            piece for run in runs if len(run) > 1 for piece in self._decode(part, run)
        ]
        decoded = {number for run in runs if len(run) > 1 for number in run}
        for number in numbers:
            if number not in decoded:
                pieces += at_hand[number] or self._group(part, number)
        return pieces

    def _decode(self, part: int, numbers: Sequence[int]) -> list[Piece]:
        """Returns the arrays of row groups that follow each other, and keeps each."""
        pieces = self._pieces(part, numbers)
        starts = self._groups[part]
        for number in numbers:
            self._decoded[part, number] += 1
            self._keep((part, number), part_of(pieces, *starts[number : number + 2]))
        return pieces

    def _group(self, part: int, number: int) -> list[Piece]:
        """Returns the arrays of a row group; those read last are kept."""
        if pieces := self._kept(part, number):
            return pieces
        key = part, number
        pieces = self._pieces(part, [number])
        # One that memory never has room for is read again as surely as a lease ends.
        self._decoded[key] += 1
        often = self._decoded[key] > _DECODED or size_of(pieces) > KEPT_BYTES
        if often and (spilled := self._spill.keep(joined(pieces))) is not None:
            self._spilled[key] = [Piece(pieces[0].first, spilled)]
            return self._spilled[key]
        self._keep(key, pieces)
        return pieces

    def _kept(self, part: int, number: int) -> list[Piece]:
        """Returns the arrays of a row group if they are kept; none: they are not."""
        key = part, number
        if (pieces := self._cache.get(key)) is None:
            return self._spilled.get(key, [])
        self._cache.move_to_end(key)
        return pieces

    def _keep(self, key: tuple[int, int], pieces: list[Piece]) -> None:
        """Keeps arrays in place of those that were read longest ago; none too large."""
        self._cache[key] = pieces
        self._room -= size_of(pieces)
        while self._room < 0:
            _, oldest = self._cache.popitem(last=False)
            self._room += size_of(oldest)

    def _pieces(self, part: int, numbers: Sequence[int]) -> list[Piece]:
        """Decodes row groups that follow each other.

        Numbers become one piece. With lists and bytes, whose size Arrow does not know
        before, a piece is of one row group as a rule: an array of all would be copied
        whenever it became too small.
        """
        starts = self._groups[part][numbers[0] : numbers[-1] + 2]
        size = starts[-1] - starts[0] if self._is_sized else np.diff(starts).max()
        first, pieces = int(starts[0]), []
        for batch in self._batches(part, numbers, max(int(size), 1)):
            arrays = {
                name: self._array(batch.column(name), name, part)
                for name in self._columns
            }
            pieces.append(Piece(first, arrays))
            first += batch.num_rows
        if first != starts[-1]:
            raise SourceError(
                f"{self._files[part]} is damaged: {first - starts[0]} rows lie where "
                f"it says that there are {starts[-1] - starts[0]}; write it anew",
                file=str(self._files[part]),
            )
        return pieces

    def _batches(self, part: int, numbers: Sequence[int], size: int) -> Iterator[Any]:
        file = str(self._files[part])
        try:
            yield from self._opened[part].iter_batches(
                batch_size=size,
                row_groups=list(numbers),
                columns=self._columns,
                use_threads=self._threads,
            )
        except (OSError, ValueError, NotImplementedError) as error:
            raise SourceError(
                f"{file} cannot be read: {error}; write it anew if it is damaged",
                file=file,
            ) from error

    def _array(self, column: Any, name: str, part: int) -> Array:
        where = f"column '{name}' of {self._files[part]}"
        if column.null_count:
            raise SourceError(f"{where} has empty values; fill them in")
        if (packed := self._packed.get(name)) is not None:
            examples = unpacked(column, packed)
        elif hasattr(column, "flatten") and column.type.num_fields == 1:
            examples = _unflattened(column)
        else:
            examples = column.to_numpy(zero_copy_only=False)
        if examples is None:
            raise SourceError(f"{where} has lists of different lengths; pad them")
        return self._checked(examples, name, part)

    def _checked(self, examples: Array, name: str, part: int) -> Array:
        """Returns examples of the type and the shape that all of a field have."""
        where = f"column '{name}' of {self._files[part]}"
        array = as_jax_type(examples, where, self._wide)
        field = self.fields.get(name)
        if field is not None and array.shape[1:] != field.shape:
            raise SourceError(
                f"{where} has examples of shape {array.shape[1:]}; the first one has "
                f"{field.shape}"
            )
        return array


def _unflattened(lists: Any) -> Array | None:
    """Returns lists of Arrow as rows of an array; None if their lengths differ."""
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    length, rest = divmod(len(flat), len(lists))
    if rest:
        return None
    if hasattr(lists, "offsets"):  # else a type of lists of one length
        lengths = np.diff(lists.offsets.to_numpy())
        if not (lengths == length).all():
            return None
    rows: Array = flat.reshape(len(lists), length)
    return rows
