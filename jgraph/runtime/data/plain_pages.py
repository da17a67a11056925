"""Plain pages of Parquet files: where values of one size lie, read without decoding.

A page that is neither compressed nor encoded has its values one behind the other; of
bytes each comes after its length, in four bytes. Examples of such pages are read from
the file where they lie, and nothing beside them. Whatever is different is left to
Arrow: other encodings and compressions, missing values, lists with levels, and values
whose lengths are not those that were expected.

Source: the format of Apache Parquet, ``parquet.thrift`` and ``Encodings.md``, and the
compact protocol of Apache Thrift.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, final

import numpy as np

from jgraph.runtime.data.batches import Array

_HEADER_BYTES: Final = 512
_LENGTH_BYTES: Final = 4
_DATA_PAGE = _PLAIN = _UNCOMPRESSED = 0
_DAMAGES: Final = (IndexError, KeyError, RecursionError, TypeError, ValueError)
_DTYPES: Final = {"INT32": "<i4", "INT64": "<i8", "FLOAT": "<f4", "DOUBLE": "<f8"}


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """What a value of a column is.

    Attributes:
      dtype: of its numbers, as the file has them.
      length: numbers of a packed list; None: the value is a number.
    """

    dtype: "np.dtype[Any]"
    length: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize * (1 if self.length is None else self.length)

    @property
    def stride(self) -> int:
        """Bytes from a value to the next."""
        return self.nbytes + (0 if self.length is None else _LENGTH_BYTES)


@final
@dataclass(frozen=True, slots=True)
class Page:
    """Values one behind the other.

    Attributes:
      first: number of the first row in its row group.
      end: of the row after the last.
      offset: of the first value in the file, of its length where it has one.
    """

    first: int
    end: int
    offset: int


@final
class PlainPages:
    """Reads rows from the plain pages of one file.

    Args:
      file: of Arrow, opened.
      metadata: of the file, by Arrow.
      layouts: of the columns that are read.
    """

    def __init__(self, file: Any, metadata: Any, layouts: Mapping[str, Layout]) -> None:
        self._file = file
        self._metadata = metadata
        self._layouts = layouts
        places = {
            metadata.schema.column(n).path: n for n in range(metadata.num_columns)
        }
        self._places = {name: places.get(name) for name in layouts}
        self._codecs: dict[tuple[int, int], int] | None = None
        self._pages: dict[int, dict[str, list[Page]] | None] = {}

    def read(
        self, group: int, first: int, end: int
    ) -> list[tuple[int, dict[str, Array]]] | None:
        """Returns rows of a row group, in pieces that follow each other.

        Args:
          group: number of the row group.
          first: row in it.
          end: the row after the last.

        Returns:
          The number of the first row of each piece, and its columns as the file has
          them, not to be written to; None where that is for Arrow to read.
        """
        if group not in self._pages:
            self._pages[group] = self._pages_of(group)
        pages = self._pages[group]
        if pages is None:
            return None
        cuts = {page.first for column in pages.values() for page in column}
        bounds = [first, *sorted(cut for cut in cuts if first < cut < end), end]
        pieces = []
        for low, high in pairwise(bounds):
            arrays = {}
            for name, column in pages.items():
                array = self._values(column, self._layouts[name], low, high)
                if array is None:
                    self._pages[group] = None
                    return None
                arrays[name] = array
            pieces.append((low, arrays))
        return pieces

    def _values(
        self, pages: Sequence[Page], layout: Layout, first: int, end: int
    ) -> Array | None:
        page = next(page for page in pages if page.first <= first < page.end)
        count, stride = end - first, layout.stride
        offset = page.offset + (first - page.first) * stride
        data = self._file.read_at(count * stride, offset)
        if len(data) != count * stride:
            return None
        if layout.length is None:
            return np.frombuffer(data, layout.dtype)
        lengths = np.ndarray(count, "<i4", data, 0, (stride,))
        if (lengths != layout.nbytes).any():
            return None
        shape, strides = (count, layout.length), (stride, layout.dtype.itemsize)
        return np.ndarray(shape, layout.dtype, data, _LENGTH_BYTES, strides)

    def _pages_of(self, group: int) -> dict[str, list[Page]] | None:
        pages = {}
        for name, layout in self._layouts.items():
            place = self._places[name]
            column = (
                None if place is None else self._pages_of_column(group, place, layout)
            )
            if column is None:
                return None
            pages[name] = column
        return pages

    def _pages_of_column(
        self, group: int, place: int, layout: Layout
    ) -> list[Page] | None:
        """Returns the pages of a column in a row group; None if not all are plain."""
        if self._codecs is None:
            self._codecs = _codecs(self._file)
        row_group = self._metadata.row_group(group)
        chunk, schema = row_group.column(place), self._metadata.schema.column(place)
        is_raw = self._codecs.get((group, place)) == _UNCOMPRESSED
        if not (is_raw and _may_be_plain(chunk, schema, layout)):
            return None
        pages, rows, start = [], 0, int(chunk.data_page_offset)
        end = start + chunk.total_compressed_size
        if start < 0 or end > self._file.size():
            return None
        while rows < row_group.num_rows and start < end:
            head = self._file.read_at(_HEADER_BYTES, start)
            page = _page(head, start, rows, layout, schema.max_definition_level > 0)
            if page is None:
                return None
            pages.append(page)
            start, rows = page.offset + (page.end - rows) * layout.stride, page.end
        # What follows is another column, or another row group.
        return pages if start == end and rows == row_group.num_rows else None


def layout_of(
    arrow_type: Any, packed: "np.dtype[Any] | None", length: int
) -> Layout | None:
    """Returns what a value of a column is; None: nothing that is read here.

    Args:
      arrow_type: of the column.
      packed: type of the numbers of its packed lists.
      length: of these.

    Example:
      >>> import pyarrow as pa
      >>> layout_of(pa.float32(), None, 0).stride
      4
      >>> layout_of(pa.binary(), np.dtype("<f8"), 3).stride
      28
      >>> layout_of(pa.string(), None, 0)
    """
    if packed is not None:
        return Layout(packed, length)
    if str(arrow_type) in {"int32", "int64", "float", "double"}:
        dtype = np.dtype(arrow_type.to_pandas_dtype()).newbyteorder("<")
        return Layout(dtype, None)
    return None


def _may_be_plain(chunk: Any, schema: Any, layout: Layout) -> bool:
    kind = chunk.physical_type
    of_kind = (
        _DTYPES.get(kind) == layout.dtype.str
        if layout.length is None
        else kind == "BYTE_ARRAY"
    )
    return bool(
        of_kind
        and not chunk.has_dictionary_page
        and set(chunk.encodings) <= {"PLAIN", "RLE", "BIT_PACKED"}
        and schema.max_repetition_level == 0
        and schema.max_definition_level <= 1
    )


def _codecs(file: Any) -> dict[tuple[int, int], int]:
    """Returns how each column of each row group is compressed, by the footer.

    Arrow knows it, too, but ends the process if it is asked for a codec that there is
    not; to read such a file it refuses in words.
    """
    tail = file.size() - 8
    try:
        nbytes = int.from_bytes(file.read_at(4, tail), "little")
        footer = _Compact(file.read_at(nbytes, tail - nbytes)).struct()
        return {
            (group, place): column[3][4]
            for group, row_group in enumerate(footer[4])
            for place, column in enumerate(row_group[1])
        }
    except _DAMAGES:
        return {}


def _page(
    head: bytes, start: int, first: int, layout: Layout, has_levels: bool
) -> Page | None:
    """Returns the page whose header is at ``start``; None: it is not plain."""
    try:
        reader = _Compact(head)
        header = reader.struct()
        page = header[5]
        if (header[1], page[2]) != (_DATA_PAGE, _PLAIN) or header[2] != header[3]:
            return None
        count, end = page[1], reader.at + header[3]
        if has_levels:
            levels_end = reader.at + _LENGTH_BYTES
            levels_end += int.from_bytes(head[reader.at : levels_end], "little")
            reader.at += _LENGTH_BYTES
            # One run of ones: no value is missing.
            if reader.varint() != count << 1 or reader.byte() != 1:
                return None
            if reader.at != levels_end:
                return None
        if count < 1 or end - reader.at != count * layout.stride:
            return None
    except _DAMAGES:
        return None  # longer than expected, or of a kind that is not known here
    return Page(first, first + count, start + reader.at)


@final
class _Compact:
    """Reader of Thrift's compact protocol: of headers of pages, and of a footer."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def number(self) -> int:
        coded = self.varint()
        return (coded >> 1) ^ -(coded & 1)

    def struct(self) -> dict[int, Any]:
        """Returns numbers, lists and structs by the number of their field."""
        fields: dict[int, Any] = {}
        field = 0
        while head := self.byte():
            field = field + (head >> 4) if head >> 4 else self.number()
            kind = head & 15
            # A truth value is its kind.
            fields[field] = kind == 1 if kind in {1, 2} else self.value(kind)
        return fields

    def value(self, kind: int) -> Any:
        """Returns a number, a list or a struct; None for what is not looked at."""
        match kind:
            case 1 | 2 | 3:
                return self.byte()
            case 4 | 5 | 6:
                return self.number()
            case 7:
                self.skip(8)
            case 8:
                self.skip(self.varint())
            case 9:
                head = self.byte()
                count = head >> 4 if head >> 4 < 15 else self.varint()
                return [self.value(head & 15) for _ in range(count)]
            case 12:
                return self.struct()
            case _:  # neither a footer nor a header of a page has a set or a map
                raise ValueError(f"a field of kind {kind}")
        return None

    def skip(self, nbytes: int) -> None:
        self.at += nbytes
        if self.at > len(self._data):
            raise IndexError(self.at)
