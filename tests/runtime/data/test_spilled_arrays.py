"""Arrays in a file without a name: as they were, within a bound, and soon gone."""

import errno
import gc
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from jgraph.runtime.data.spilled_arrays import SpilledArrays

pytestmark = pytest.mark.usefixtures("little_garbage")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_arrays_are_as_they_were_whatever_their_type_and_order() -> None:
    spill = SpilledArrays()
    groups = [
        {
            "a": np.arange(7, dtype=np.int8),
            "b": np.arange(6.0).reshape(3, 2).T,
            "c": np.array([[[True, False]]]),
            "d": np.empty((0, 4), np.float32),
        },
        {"a": np.full(5000, 3, np.int64)},
    ]
    kept = [spill.keep(group) for group in groups]
    for group, found in zip(groups, kept, strict=True):
        assert found is not None
        assert list(found) == list(group)
        for name, array in group.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype
            assert not found[name].flags.writeable


def test_no_name_is_left_in_the_directory_and_no_file_after_the_arrays(
    directory: Path,
) -> None:
    spill = SpilledArrays()
    assert spill.keep({"a": np.arange(3)}) is not None
    assert not list(directory.iterdir())
    file = spill._file
    assert file is not None
    os.fstat(file)
    del spill
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_arrays_outlive_what_has_spilled_them() -> None:
    found = SpilledArrays().keep({"a": np.arange(3)})
    gc.collect()
    assert found is not None
    assert found["a"].tolist() == [0, 1, 2]


def test_what_there_is_no_room_for_is_not_kept() -> None:
    spill = SpilledArrays(room=1000)
    assert spill.keep({"a": np.zeros(1001, np.int8)}) is None
    assert spill.keep({"a": np.zeros(960, np.int8)}) is not None
    assert spill.keep({"a": np.zeros(64, np.int8)}) is None
    assert spill.keep({"a": np.zeros(0, np.int8)}) is None


def test_a_full_disk_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def full(file: int, data: bytes, offset: int) -> int:
        asked.append(file)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "pwrite", full)
    spill = SpilledArrays()
    assert spill.keep({"a": np.arange(3)}) is None
    assert spill.keep({"a": np.arange(3)}) is None
    assert len(asked) == 1
