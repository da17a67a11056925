"""Row groups of Parquet files: decoded once while they are kept, within a bound."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.errors import SourceError
from jgraph.runtime.data import parquet_files
from jgraph.runtime.data.parquet_files import ParquetReader
from tests.support.data_files import write_parquet

pa = pytest.importorskip("pyarrow", reason="needs jgraph[data]")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs jgraph[data]")

GROUP_BYTES = 4 * (4 + 8)  # four rows of an int32 and two float32


class CountedFile:
    """A Parquet file that remembers which row groups were decoded."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.decoded: list[int] = []
        self.calls = 0

    def iter_batches(self, *, row_groups: list[int], **options: Any) -> Any:
        self.decoded += row_groups
        self.calls += 1
        return self._file.iter_batches(row_groups=row_groups, **options)


def opened(
    directory: Path, kept_bytes: int, spilled_bytes: int = 0
) -> tuple[ParquetReader, CountedFile]:
    """Returns a reader of 20 rows in five groups, and what counts its decoding."""
    file = write_parquet(directory / "a.parquet", 0, 20)
    reader = ParquetReader([file], None, False, kept_bytes, spilled_bytes)
    counted = CountedFile(reader._opened[0])
    reader._opened = [counted]
    reader._cache.clear()  # opening reads the first one
    reader._decoded.clear()
    reader._room = kept_bytes
    return reader, counted


def test_a_row_group_that_is_kept_is_not_decoded_again(tmp_path: Path) -> None:
    reader, file = opened(tmp_path, 2 * GROUP_BYTES)
    for rows in ([0, 1], [3, 2], [5], [1, 6], [4]):
        reader.read(0, np.array(rows))
    assert file.decoded == [0, 1]
    reader.read(0, np.array([8]))  # in place of the one that was read longest ago
    reader.read(0, np.array([7]))
    assert file.decoded == [0, 1, 2]
    reader.read(0, np.array([0]))
    assert file.decoded == [0, 1, 2, 0]


def test_what_is_kept_of_row_groups_has_a_bound(tmp_path: Path) -> None:
    reader, file = opened(tmp_path, GROUP_BYTES - 1)
    for _ in range(3):
        assert reader.read(0, np.array([2]))["y"].tolist() == [2]
    assert file.decoded == [0, 0, 0]
    assert not reader._cache
    assert reader._room == GROUP_BYTES - 1


def test_a_row_group_that_memory_has_no_room_for_is_decoded_thrice_at_most(
    tmp_path: Path,
) -> None:
    reader, file = opened(tmp_path, 0, 1 << 20)
    for _ in range(5):
        assert reader.read(0, np.array([2, 5]))["y"].tolist() == [2, 5]
    assert file.decoded == [0, 1] * 3


def test_a_row_group_larger_than_all_that_is_kept_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "KEPT_BYTES", GROUP_BYTES - 1)
    reader, file = opened(tmp_path, 0, 1 << 20)
    for row in (5, 4, 7):
        assert reader.read(0, np.array([row]))["y"].tolist() == [row]
    assert file.decoded == [1]


@pytest.mark.parametrize("spilled_bytes", [0, 4096, 1 << 20])
@pytest.mark.parametrize("kept_bytes", [0, GROUP_BYTES, 3 * GROUP_BYTES, 1 << 20])
def test_rows_are_the_same_whatever_is_kept(
    tmp_path: Path, kept_bytes: int, spilled_bytes: int
) -> None:
    reader, _ = opened(tmp_path, kept_bytes, spilled_bytes)
    generator = np.random.default_rng(7)
    for _ in range(50):
        rows = generator.integers(0, 20, generator.integers(1, 12))
        found = reader.read(0, rows)
        assert found["y"].tolist() == rows.tolist()
        assert found["x"].tolist() == [[n, n / 2] for n in rows.tolist()]


def test_only_row_groups_that_have_a_row_of_a_read_are_decoded(tmp_path: Path) -> None:
    reader, file = opened(tmp_path, 0)
    reader.read(0, np.array([19, 1]))
    assert sorted(file.decoded) == [0, 4]


def test_row_groups_that_follow_each_other_are_decoded_by_one_call_and_each_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, file = opened(tmp_path, 1 << 20)
    rows = np.array([9, 2, 5, 3])
    assert reader.read(0, rows)["y"].tolist() == rows.tolist()
    assert (file.decoded, file.calls) == ([0, 1, 2], 1)
    assert reader.read(0, np.array([6, 8]))["y"].tolist() == [6, 8]
    assert reader.read(0, np.array([11, 12]))["y"].tolist() == [11, 12]
    assert (file.decoded, file.calls) == ([0, 1, 2, 3], 2), "one was there"
    (tmp_path / "large").mkdir()
    reader, file = opened(tmp_path / "large", 1 << 20)
    monkeypatch.setattr(parquet_files, "_TOGETHER_BYTES", 2 * GROUP_BYTES)
    reader.read(0, rows)
    assert (file.decoded, file.calls) == ([0, 1, 2], 2), "too many bytes at once"


@pytest.mark.parametrize("kept_bytes", [0, 100, 1 << 20])
def test_row_groups_of_different_sizes_are_read_as_those_of_one_are(
    tmp_path: Path, kept_bytes: int
) -> None:
    y, path = np.arange(30, dtype=np.int32), tmp_path / "a.parquet"
    schema = pa.schema([("y", pa.int32()), ("z", pa.list_(pa.float32()))])
    with parquet.ParquetWriter(path, schema) as writer:
        for first, end in [(0, 7), (7, 7), (7, 17), (17, 18), (18, 30)]:
            rows = y[first:end]
            lists = [np.array([n, n / 2], np.float32) for n in rows]
            writer.write_table(pa.table({"y": rows, "z": lists}, schema))
    reader = ParquetReader([path], None, False, kept_bytes, spilled_bytes=400)
    generator = np.random.default_rng(3)
    for _ in range(40):
        first, end = sorted(generator.choice(31, 2, replace=False))
        rows = generator.permutation(np.arange(first, end))
        found = reader.read(0, rows.astype(np.int64))
        assert found["y"].tolist() == rows.tolist()
        assert found["z"].tolist() == [[n, n / 2] for n in rows.tolist()]


def test_row_groups_beside_one_that_is_kept_are_decoded_by_one_call(
    tmp_path: Path,
) -> None:
    reader, file = opened(tmp_path, 1 << 20)
    reader.read(0, np.array([1]))
    rows = np.arange(20)[::-1]
    assert reader.read(0, rows)["y"].tolist() == rows.tolist()
    assert (file.decoded, file.calls) == ([0, 1, 2, 3, 4], 2)


def test_what_a_caller_does_to_its_examples_does_not_change_what_is_kept(
    tmp_path: Path,
) -> None:
    reader, _ = opened(tmp_path, 1 << 20)
    reader.read(0, np.array([1]))["x"][:] = -1
    assert reader.read(0, np.array([1]))["x"].tolist() == [[1, 0.5]]


def packed_file(path: Path, rows: Any, dtype: str, of: Any = None) -> Path:
    """Writes a column ``x`` of bytes, with what Spark notes of it."""
    column = {"name": "x", "type": "binary", "metadata": {"jgraph.dtype": dtype}}
    noted = {"org.apache.spark.sql.parquet.row.metadata": {"fields": [column]}}
    schema = pa.schema(
        [pa.field("x", of or pa.binary())],
        {key: json.dumps(value) for key, value in noted.items()},
    )
    parquet.write_table(pa.table({"x": rows}, schema), path, row_group_size=2)
    return path


def test_lists_that_are_packed_are_read_as_rows_of_numbers(tmp_path: Path) -> None:
    rows = np.arange(10, dtype=np.int64).reshape(5, 2)
    lists = [row.tobytes() for row in rows]
    file = packed_file(tmp_path / "a.parquet", lists, "int64")
    reader = ParquetReader([file], None, False)
    assert {n: str(f) for n, f in reader.fields.items()} == {"x": "int32[2]"}
    found = reader.read(0, np.array([4, 0, 3]))["x"]
    np.testing.assert_array_equal(found, rows[[4, 0, 3]])


@pytest.mark.parametrize(
    ("lists", "dtype", "complaint"),
    [
        ([b"1234", b"12345678"], "float32", "lists of different lengths"),
        ([b"123", b"123"], "float32", "lists of different lengths"),
        ([b"1234", b"1234", b"12345678"], "float32", r"of shape \(2,\); the first"),
        ([b"1234", None], "float32", "has empty values"),
        ([b"1234"], "object", "has lists packed as 'object', which is none of int16"),
    ],
)
def test_bytes_that_are_no_packed_lists_are_refused(
    tmp_path: Path, lists: Any, dtype: str, complaint: str
) -> None:
    file = packed_file(tmp_path / "a.parquet", lists, dtype)
    with pytest.raises(SourceError, match=complaint):
        ParquetReader([file], None, False).read(0, np.arange(len(lists)))


@pytest.mark.parametrize(
    "noted",
    [
        '{"fields": ["jgraph.dtype"',
        '["jgraph.dtype"' + ", [" * 100_000,
        '["jgraph.dtype"]',
        '{"fields": ["jgraph.dtype"]}',
        '{"fields": [{"name": "x", "jgraph.dtype": "int32"}]}',
        '{"fields": [{"name": "x", "metadata": ["jgraph.dtype"]}]}',
        '{"fields": [{"name": [], "metadata": {"jgraph.dtype": "int32"}}]}',
    ],
)
def test_metadata_that_is_not_of_spark_is_refused(tmp_path: Path, noted: str) -> None:
    key = "org.apache.spark.sql.parquet.row.metadata"
    table = pa.table({"x": [b"1234"]}).replace_schema_metadata({key: noted})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet has metadata of Spark"):
        ParquetReader([tmp_path / "a.parquet"], None, False)


def test_columns_that_were_left_out_of_a_file_are_not_missed(tmp_path: Path) -> None:
    whole = parquet.read_table(packed_file(tmp_path / "a.parquet", [b"1234"], "int32"))
    left = whole.append_column("y", pa.array([7], pa.int32())).select(["y"])
    parquet.write_table(left, tmp_path / "b.parquet")
    reader = ParquetReader([tmp_path / "b.parquet"], None, False)
    assert reader.read(0, np.array([0]))["y"].tolist() == [7]


def test_files_whose_lists_are_packed_of_other_numbers_are_refused(
    tmp_path: Path,
) -> None:
    files = [
        packed_file(tmp_path / f"{dtype}.parquet", [b"1234"], dtype)
        for dtype in ("int32", "float32")
    ]
    with pytest.raises(SourceError, match="has another schema than"):
        ParquetReader(files, None, False)
