"""Rows of arrays in files: what Zarr reads, and what a server refuses to touch."""

import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, strategies as st

from jgraph.errors import CheckpointPathError
from jgraph.plan.program.nodes import ValueType
from jgraph.runtime.files.blocks import Blocks, as_rows
from jgraph.runtime.files.manifest import PROOF
from jgraph.runtime.files.shard_files import (
    Slice,
    check_slice,
    fill_slice,
    make_array,
    make_proof,
    proven,
    read_slice,
    write_slice,
)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 5),
    block_rows=st.integers(1, 45),
    cuts=st.sets(st.integers(1, 39), max_size=3),
    seed=st.integers(0, 9),
)
def test_sums_of_shards_make_up_those_of_the_array(
    rows: int, size: int, block_rows: int, cuts: set[int], seed: int
) -> None:
    array = np.random.default_rng(seed).integers(0, 256, (rows, size), np.uint8)
    blocks = Blocks(rows, size, block_rows)
    wanted = tuple(
        zlib.crc32(array[at : at + block_rows].tobytes())
        for at in range(0, rows, block_rows)
    )
    edges = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    one_after_the_other = [
        blocks.sums(start, 1, array[start:end])
        for start, end in itertools.pairwise(edges)
    ]
    in_turns = [
        blocks.sums(n, len(edges), as_rows(array[n :: len(edges)]))
        for n in range(min(len(edges), rows))
    ]
    assert blocks.joined(one_after_the_other) == wanted
    assert blocks.joined(in_turns) == wanted


@pytest.mark.parametrize(
    "dtype", ["float32", "bool", "complex64", "bfloat16", "float8_e4m3fn", "int4"]
)
def test_rows_that_several_write_are_one_array_for_zarr(
    tmp_path: Path, opened: int, dtype: str
) -> None:
    type_ = ValueType((7, 3), dtype)
    array = np.random.default_rng(0).integers(0, 2, (7, 3)).astype(type_.np_dtype)
    whole = Slice.whole("w", type_, block_rows=2)
    make_array(tmp_path, whole)
    for start, step, count in [(0, 1, 3), (3, 2, 2), (4, 2, 2)]:
        part = Slice("w", ValueType((count, 3), dtype), whole.blocks, start, step)
        write_slice(opened, part, array[start::step][:count])
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/w"}}
    assert (ts.open(spec, open=True).result().read().result() == array).all()
    part = Slice("w", ValueType((2, 3), dtype), whole.blocks, 1, 4)
    assert (read_slice(opened, part)[0] == array[1::4]).all()


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("piece", [1, 8, 1 << 20])
def test_rows_are_looked_at_in_pieces(
    tmp_path: Path,
    opened: int,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    piece: int,
) -> None:
    array = np.random.default_rng(0).integers(0, 99, (23, 2), np.int16)
    whole = Slice.whole("w", ValueType((23, 2), "int16"), block_rows=9)
    make_array(tmp_path, whole)
    write_slice(opened, whole, array)
    rows = array[1::step]
    part = Slice("w", ValueType(rows.shape, "int16"), whole.blocks, 1, step)
    monkeypatch.setattr("jgraph.runtime.files.shard_files._PIECE_BYTES", piece)
    wanted = whole.blocks.sums(1, step, as_rows(rows))
    assert check_slice(opened, part) == wanted
    place = np.zeros(rows.shape, np.int16)
    assert fill_slice(opened, part, place) == wanted
    assert (place == rows).all()


def test_a_scalar_is_one_file(tmp_path: Path, opened: int) -> None:
    whole = Slice.whole("n", ValueType((), "int32"))
    make_array(tmp_path, whole)
    sums = write_slice(opened, whole, np.int32(7))
    value, again = read_slice(opened, whole)
    assert value == 7
    assert again == sums
    assert sorted(path.name for path in (tmp_path / "n").iterdir()) == [".zarray", "0"]


def _other_proof(path: Path) -> str:
    (path / PROOF).write_bytes(bytes(32))
    return str(path)


def _linked_proof(path: Path) -> str:
    (path / PROOF).rename(path / "elsewhere")
    (path / PROOF).symlink_to(path / "elsewhere")
    return str(path)


def _no_proof(path: Path) -> str:
    (path / PROOF).unlink()
    return str(path)


@pytest.mark.bad_input_row(21)
@pytest.mark.parametrize(
    "name",
    [
        lambda path: f"{path}/../{path.name}",
        lambda path: f"{path}/.",
        lambda path: f"{path}\0",
        os.path.relpath,
        lambda path: "gs://bucket/run",
        lambda path: "",
        lambda path: str(path / PROOF),
        lambda path: str(path / "missing"),
        _other_proof,
        _linked_proof,
        _no_proof,
    ],
)
def test_a_directory_without_the_proof_is_not_opened(
    tmp_path: Path, name: Callable[[Path], str]
) -> None:
    proof = make_proof(tmp_path)
    path = name(tmp_path)
    with pytest.raises(CheckpointPathError, match=r"JG-305.*not a directory that"):
        proven(path, proof).__enter__()


@pytest.mark.bad_input_row(21)
def test_no_other_user_may_read_a_proof(tmp_path: Path) -> None:
    (tmp_path / PROOF).write_bytes(bytes(32))
    (tmp_path / PROOF).chmod(0o644)
    before = os.umask(0)
    try:
        proof = make_proof(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / PROOF).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / PROOF).read_bytes() == proof


@pytest.mark.bad_input_row(21)
def test_no_proof_is_none(tmp_path: Path) -> None:
    (tmp_path / PROOF).touch()
    with pytest.raises(CheckpointPathError):
        proven(str(tmp_path), b"").__enter__()


def _symlink(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def _hard_link(file: Path) -> None:
    file.with_name("elsewhere").hardlink_to(file)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _longer(file: Path) -> None:
    file.write_bytes(bytes(100))


def _gone(file: Path) -> None:
    file.unlink()


@pytest.mark.bad_input_row(21)
@pytest.mark.parametrize("change", [_symlink, _hard_link, _pipe, _longer, _gone])
def test_only_the_files_of_a_checkpoint_are_touched(
    tmp_path: Path, opened: int, change: Callable[[Path], None]
) -> None:
    whole = Slice.whole("w", ValueType((3,), "float32"))
    make_array(tmp_path, whole)
    change(tmp_path / "w" / "0")
    with pytest.raises(OSError):  # noqa: PT011  # of many kinds
        write_slice(opened, whole, np.ones(3, np.float32))
    with pytest.raises(OSError):  # noqa: PT011
        read_slice(opened, whole)


@pytest.mark.bad_input_row(21)
@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../w", "w\0"])
def test_a_name_that_leads_elsewhere_is_refused(
    tmp_path: Path, opened: int, name: str
) -> None:
    inside: Any = tmp_path / "w"
    inside.mkdir()
    with pytest.raises(OSError, match="no name of a file"):
        read_slice(opened, Slice.whole(name, ValueType((3,), "float32")))
