"""Plain pages: examples read where they lie, equal to what Arrow decodes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow.parquet", reason="needs jgraph[data]")

import pyarrow as pa
from pyarrow import parquet

from jgraph.errors import SourceError
from jgraph.runtime.data.parquet_files import ParquetReader

ROWS = 100
X = np.arange(3 * ROWS, dtype=np.float64).reshape(ROWS, 3) / 7
COLUMNS: dict[str, Any] = {
    "i": np.arange(ROWS, dtype=np.int32) - 50,
    "l": np.arange(ROWS, dtype=np.int64) * 3,
    "f": np.arange(ROWS, dtype=np.float32) / 3,
    "d": np.arange(ROWS, dtype=np.float64) / 5,
}
PLAIN = {"compression": "none", "use_dictionary": False}


def written(path: Path, table: Any, **options: Any) -> Path:
    """Writes a table as its column ``x`` of bytes would be noted by Spark."""
    column = {"name": "x", "type": "binary", "metadata": {"jgraph.dtype": "float64"}}
    noted = json.dumps({"fields": [column] if "x" in table.column_names else []})
    key = "org.apache.spark.sql.parquet.row.metadata"
    table = table.replace_schema_metadata({key: noted})
    parquet.write_table(table, path, **{"row_group_size": 30, **PLAIN, **options})
    return path


def table(lists: list[bytes] | None = None, *, is_nullable: bool = True) -> Any:
    rows = [row.tobytes() for row in X] if lists is None else lists
    columns = {"x": pa.array(rows, pa.binary()), **COLUMNS}
    made = pa.table(columns)
    schema = pa.schema([field.with_nullable(is_nullable) for field in made.schema])
    return made.cast(schema)


class Counted:
    """A Parquet file of which it is counted how often Arrow decodes something."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.calls = 0

    def iter_batches(self, **options: Any) -> Any:
        self.calls += 1
        return self._file.iter_batches(**options)


def opened(path: Path, columns: list[str] | None = None) -> tuple[Any, Counted]:
    """Returns a reader that keeps nothing, and what counts decoding by Arrow."""
    reader = ParquetReader([path], columns, wide=True, kept_bytes=0, spilled_bytes=0)
    counted = Counted(reader._opened[0])
    reader._opened = [counted]
    return reader, counted


def check(reader: Any, names: list[str]) -> None:
    expected = {"x": X, **COLUMNS}
    generator = np.random.default_rng(5)
    for _ in range(40):
        if generator.random() < 0.5:
            first, end = sorted(generator.choice(ROWS + 1, 2, replace=False))
            rows = generator.permutation(np.arange(first, end))
        else:
            rows = generator.integers(0, ROWS, generator.integers(1, 30))
        found = reader.read(0, rows.astype(np.int64))
        assert sorted(found) == sorted(names)
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name][rows])
            assert array.dtype == expected[name].dtype
            assert array.flags.writeable


@pytest.mark.parametrize("page", [64, 1 << 20])
@pytest.mark.parametrize("is_nullable", [True, False])
@pytest.mark.parametrize("has_statistics", [True, False])
def test_plain_pages_are_read_without_arrow(
    tmp_path: Path, page: int, is_nullable: bool, has_statistics: bool
) -> None:
    options = {"data_page_size": page, "write_batch_size": 8}
    file = written(
        tmp_path / "a.parquet",
        table(is_nullable=is_nullable),
        write_statistics=has_statistics,
        **options,
    )
    reader, counted = opened(file)
    check(reader, ["x", *COLUMNS])
    assert counted.calls == 0


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy"},
        {"use_dictionary": True},
        {"data_page_version": "2.0"},
        {"column_encoding": {"f": "BYTE_STREAM_SPLIT"}},
        {"column_encoding": {"x": "DELTA_LENGTH_BYTE_ARRAY"}},
    ],
)
def test_other_pages_are_left_to_arrow(tmp_path: Path, options: Any) -> None:
    reader, counted = opened(written(tmp_path / "a.parquet", table(), **options))
    check(reader, ["x", *COLUMNS])
    assert counted.calls > 0


@pytest.mark.parametrize(
    "column",
    [
        pa.array(np.arange(ROWS, dtype=np.int8)),
        pa.array(np.arange(ROWS) % 2 == 0),
        pa.array([[1.0, 2.0]] * ROWS, pa.list_(pa.float32())),
    ],
)
def test_columns_of_other_types_are_left_to_arrow(tmp_path: Path, column: Any) -> None:
    other = pa.table({"i": COLUMNS["i"], "o": column})
    reader, counted = opened(written(tmp_path / "a.parquet", other))
    rows = np.array([31, 2, 99, 30])
    found = reader.read(0, rows)
    assert found["i"].tolist() == COLUMNS["i"][rows].tolist()
    assert found["o"].tolist() == [column[n].as_py() for n in rows.tolist()]
    assert counted.calls > 0


def test_only_columns_that_were_named_are_read(tmp_path: Path) -> None:
    reader, counted = opened(written(tmp_path / "a.parquet", table()), ["l", "x"])
    check(reader, ["l", "x"])
    assert counted.calls == 0


@pytest.mark.parametrize(
    ("lists", "complaint"),
    [
        ([b"8bytes!!" * 3] * 99 + [b"8bytes!!"], "different lengths"),
        ([b"8bytes!!" * 3] * 90 + [b"8bytes!!" * 2] * 10, "shape"),
        # As many bytes as all of the expected length have.
        ([b"8bytes!!" * 3] * 98 + [b"8bytes!!" * n for n in (2, 4)], "lengths"),
        ([b"8bytes!!" * 3] * 99 + [None], "empty values"),
    ],
)
def test_what_is_not_as_expected_is_refused_in_words(
    tmp_path: Path, lists: Any, complaint: str
) -> None:
    reader, _ = opened(written(tmp_path / "a.parquet", table(lists)))
    assert reader.read(0, np.array([1]))["x"].shape == (1, 3)
    with pytest.raises(SourceError, match=complaint):
        reader.read(0, np.arange(90, ROWS))


def test_a_number_that_is_missing_is_refused(tmp_path: Path) -> None:
    numbers = pa.array([*range(99), None], pa.int32())
    reader, _ = opened(written(tmp_path / "a.parquet", pa.table({"i": numbers})))
    assert reader.read(0, np.array([89, 1]))["i"].tolist() == [89, 1]
    with pytest.raises(SourceError, match="empty values"):
        reader.read(0, np.array([99]))


def test_whole_numbers_too_large_are_refused(tmp_path: Path) -> None:
    numbers = pa.table({"l": np.array([1, 2**40], np.int64)})
    path = written(tmp_path / "a.parquet", numbers, row_group_size=1)
    reader = ParquetReader([path], None, wide=False, kept_bytes=0, spilled_bytes=0)
    assert reader.read(0, np.array([0]))["l"].dtype == np.int32
    with pytest.raises(SourceError, match="too large for int32"):
        reader.read(0, np.array([1]))


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_refused_or_read_as_arrow_reads_it(
    tmp_path: Path, seed: int
) -> None:
    """Never an error of another kind: headers of pages are bytes of a stranger."""
    path = written(tmp_path / "a.parquet", table().select(["x"]))
    content = bytearray(path.read_bytes())
    chunk = parquet.ParquetFile(path).metadata.row_group(2).column(0)
    generator = np.random.default_rng(seed)
    for place in generator.integers(0, 40, 3):
        content[chunk.data_page_offset + int(place)] = int(generator.integers(256))
    path.write_bytes(content)
    rows = np.arange(60, 90)
    reader, counted = opened(path)
    try:
        found = reader.read(0, rows)["x"]
    except SourceError:
        assert counted.calls > 0
    else:
        if counted.calls == 0:  # then what was damaged says nothing of values
            np.testing.assert_array_equal(found, X[60:90])


NBYTES = b"\x15\xe0\x03"  # 240, which 30 numbers of 8 bytes have
HEADERS = {
    "a number without an end": b"\x15" + b"\xff" * 600,
    "structs in structs": b"\x1c" * 600,
    "a text that ends behind the file": b"\x18" + b"\xff" * 6 + b"\x01",
    "a list that ends behind the file": b"\x19\xf7" + b"\xff" * 6 + b"\x01",
    "a count that is a struct": b"\x15\0" + 2 * NBYTES + b"\x2c\x1c\0\x15\0\0\0",
    "a count that is a text": b"\x15\0" + 2 * NBYTES + b"\x2c\x18\0\x15\0\0\0",
    "no values": b"\x15\0" + 2 * NBYTES + b"\x2c\x15\0\x15\0\0\0",
    "fewer than none": b"\x15\0" + 2 * b"\x15\xdf\x03" + b"\x2c\x15\x3b\x15\0\0\0",
    "more than there are": b"\x15\0" + 2 * b"\x15\xf0\x03" + b"\x2c\x15\x3e\x15\0\0\0",
    "of another size": b"\x15\0" + 2 * NBYTES + b"\x2c\x15\x3e\x15\0\0\0",
}


def patched(tmp_path: Path, old: bytes, new: bytes) -> tuple[Any, Counted]:
    """Returns a reader of a column ``l``, of whose last row group this is changed."""
    columns = table(is_nullable=False).select(["l"])
    path = written(tmp_path / "a.parquet", columns.slice(0, 90))
    content = bytearray(path.read_bytes())
    place = content.rindex(old) if old else offset_of(path)
    content[place : place + len(new)] = new
    path.write_bytes(content)
    return opened(path)


def offset_of(path: Path) -> int:
    chunk = parquet.ParquetFile(path).metadata.row_group(2).column(0)
    return int(chunk.data_page_offset)


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies_leaves_the_page_to_arrow(
    tmp_path: Path, header: bytes
) -> None:
    reader, counted = patched(tmp_path, b"", header[:240])
    assert reader.read(0, np.arange(60))["l"].tolist() == COLUMNS["l"][:60].tolist()
    assert counted.calls == 0
    with pytest.raises(SourceError, match=r"a\.parquet cannot be read"):
        reader.read(0, np.arange(60, 90))
    assert counted.calls == 1


@pytest.mark.parametrize("codec", [b"\x7f", b"\x12"])
def test_a_codec_that_there_is_not_is_refused_and_ends_no_process(
    tmp_path: Path, codec: bytes
) -> None:
    # The path of the column, a list of one text, and its codec, which is 0.
    path = b"\x19\x18\x01l\x15"
    reader, counted = patched(tmp_path, path + b"\0", path + codec)
    with pytest.raises(SourceError, match=r"a\.parquet cannot be read"):
        reader.read(0, np.arange(60, 90))
    assert counted.calls == 1


def test_a_page_before_the_file_is_left_to_arrow(tmp_path: Path) -> None:
    columns = table(is_nullable=False).select(["l"])
    path = written(tmp_path / "a.parquet", columns.slice(0, 90))
    number = 2 * offset_of(path)  # as the footer has it, after the number of its field
    field = bytes([0x26, number & 127 | 128, number >> 7])
    content = path.read_bytes()
    assert field in content
    path.write_bytes(content.replace(field, bytes([field[0], field[1] | 1, field[2]])))
    reader, counted = opened(path)
    with pytest.raises(SourceError, match="corrupt"):
        reader.read(0, np.arange(60, 90))
    assert counted.calls == 1
