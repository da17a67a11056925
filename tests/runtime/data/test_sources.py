"""Files and functions as data: what they give, and what is said when they cannot."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.errors import ForbiddenSourceError, SourceError
from jgraph.runtime.data.batches import Reader
from jgraph.runtime.data.record_files import example_type, masked_crc
from jgraph.runtime.data.sources import open_source
from tests.support.data_files import FUNCTIONS, write_parquet

pa = pytest.importorskip("pyarrow", reason="needs jgraph[data]")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs jgraph[data]")

FEATURES = {"x": ["float32", [2]], "y": ["int32", []], "raw": ["uint8", [3]]}


def records(first: int, count: int) -> list[bytes]:
    found = []
    for number in range(first, first + count):
        example = example_type()()
        feature = example.features.feature
        feature["x"].float_list.value.extend([number, number / 2])
        feature["y"].int64_list.value.append(number)
        feature["raw"].bytes_list.value.append(bytes([number, 0, 1]))
        found.append(example.SerializeToString())
    return found


def write_tfrecord(path: Path, rows: list[bytes]) -> Path:
    with path.open("wb") as file:
        for row in rows:
            length = len(row).to_bytes(8, "little")
            file.write(length + masked_crc(length).to_bytes(4, "little"))
            file.write(row + masked_crc(row).to_bytes(4, "little"))
    return path


def write_array_record(path: Path, rows: list[bytes]) -> Path:
    module = pytest.importorskip(
        "array_record.python.array_record_module", reason="needs jgraph[data]"
    )
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(row)
    writer.close()
    return path


def rows_of(reader: Reader, part: int, *rows: int) -> dict[str, Any]:
    found = reader.read(part, np.array(rows))
    return {name: array.tolist() for name, array in found.items()}


def open_records(kind: str, path: str) -> Reader:
    return open_source({"kind": kind, "path": path, "features": FEATURES}, ())


@pytest.mark.parametrize(
    ("kind", "write"),
    [("tfrecord", write_tfrecord), ("array_record", write_array_record)],
)
def test_records_are_read_by_row_from_every_file(
    tmp_path: Path, kind: str, write: Any
) -> None:
    for name, first, count in (("b", 10, 3), ("a", 0, 10)):
        write(tmp_path / name, records(first, count))
    reader = open_records(kind, str(tmp_path / "*"))
    assert [part.examples for part in reader.parts] == [10, 3]
    assert reader.shuffle == "slots"
    assert rows_of(reader, 0, 7, 2) == {
        "x": [[7, 3.5], [2, 1]],
        "y": [7, 2],
        "raw": [[7, 0, 1], [2, 0, 1]],
    }
    assert rows_of(reader, 1, 0)["y"] == [10]


def test_damaged_record_is_named(tmp_path: Path) -> None:
    path = write_tfrecord(tmp_path / "a", records(0, 3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:])
    reader = open_records("tfrecord", str(path))
    assert rows_of(reader, 0, 1)["y"] == [1]
    with pytest.raises(SourceError, match=r"record 2 of .*a is damaged: its bytes"):
        reader.read(0, np.array([2]))
    path.write_bytes(whole[:-3])
    with pytest.raises(SourceError, match=r"record 2 .* the file ends within it"):
        open_records("tfrecord", str(path))


def test_records_without_a_feature_or_of_another_size_are_refused(
    tmp_path: Path,
) -> None:
    path = str(write_tfrecord(tmp_path / "a", records(0, 1)))
    for features, message in (
        ({"z": ["float32", []]}, "has no feature 'z'; it has raw, x, y"),
        ({"x": ["float32", [3]]}, r"'x' of record 0 .* has 2 values; float32\[3\] has"),
    ):
        spec = {"kind": "tfrecord", "path": path, "features": features}
        with pytest.raises(SourceError, match=message):
            open_source(spec, ())


def test_parquet_rows_come_across_row_groups(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 0, 10)
    write_parquet(tmp_path / "b.parquet", 10, 3)
    spec = {"kind": "parquet", "path": str(tmp_path / "*.parquet"), "columns": None}
    reader = open_source(spec, ())
    assert {n: str(f) for n, f in reader.fields.items()} == {
        "y": "int32[]",
        "x": "float32[2]",
    }
    assert rows_of(reader, 0, 9, 0, 5) == {
        "y": [9, 0, 5],
        "x": [[9, 4.5], [0, 0], [5, 2.5]],
    }
    one = open_source({**spec, "columns": ["y"]}, ())
    assert rows_of(one, 1, 2) == {"y": [12]}


def read_all(spec: dict[str, Any]) -> None:
    reader = open_source(spec, ())
    reader.read(0, np.arange(reader.parts[0].examples))


def test_parquet_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 0, 4)
    write_parquet(tmp_path / "b.parquet", 0, 4, z=[1, None, 2, 3])
    write_parquet(tmp_path / "c.parquet", 0, 2, z=["a", "b"])
    write_parquet(tmp_path / "d.parquet", 0, 2, z=[[1], [1, 2]])

    def refused(name: str, columns: Any, message: str) -> None:
        path = str(tmp_path / name)
        spec = {"kind": "parquet", "path": path, "columns": columns}
        with pytest.raises(SourceError, match=message):
            read_all(spec)

    refused("*.parquet", None, r"b.parquet has another schema than .*a.parquet")
    refused("a.parquet", ["q"], "has no column 'q'; it has y, x")
    refused("b.parquet", ["z"], "column 'z' of .*b.parquet has empty values")
    refused("c.parquet", ["z"], "is object, not numbers")
    refused("d.parquet", ["z"], "lists of different lengths|shape")
    refused("none", None, "there is no file .*none")
    (tmp_path / "e.parquet").write_text("no")
    refused("e.parquet", None, "a Parquet file cannot be read")


def test_npz_gives_its_arrays_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, y=np.arange(4), x=np.zeros((4, 2)))
    reader = open_source({"kind": "npz", "path": str(path)}, ())
    assert {n: str(f) for n, f in reader.fields.items()} == {
        "x": "float32[2]",
        "y": "int32[]",
    }
    path.write_text("no")
    with pytest.raises(SourceError, match=r"a.npz is no .npz file"):
        open_source({"kind": "npz", "path": str(path)}, ())


def open_function(name: str, *allowed: str, **arguments: Any) -> Reader:
    function = f"{FUNCTIONS}:{name}"
    spec = {"kind": "grain", "function": function, "arguments": arguments}
    return open_source(spec, allowed)


def test_grain_source_is_called_by_its_import_path() -> None:
    pytest.importorskip("grain", reason="needs jgraph[data]")
    reader = open_function("squares", f"{FUNCTIONS}:*", count=5)
    assert reader.parts[0].examples == 5
    assert rows_of(reader, 0, 4, 1) == {"x": [[4, 16], [1, 1]], "y": [4, 1]}


def test_import_path_that_is_not_allowed_is_not_imported() -> None:
    for allowed in ((), ("tests.runtime.*:other",)):
        with pytest.raises(ForbiddenSourceError, match=r"may not call .*ragged") as e:
            open_function("ragged", *allowed)
        assert "--allow-source" in e.value.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "returned a int; return something with a length"),
        ("broken", "cannot be called for data: ZeroDivisionError: no data today"),
        ("missing", "cannot be called for data: AttributeError"),
    ],
)
def test_function_that_gives_no_source_says_why(name: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_function(name, "*")


def test_example_unlike_the_first_is_named() -> None:
    reader = open_function("ragged", "*")
    with pytest.raises(SourceError, match=r"example 2 .* has array float32\[3\]"):
        reader.read(0, np.array([0, 2]))
