"""A damaged checkpoint is found and named; never are other numbers restored."""

import errno
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import example, given, strategies as st

from jgraph.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointPathError,
    CheckpointSpaceError,
)
from jgraph.runtime.files.manifest import FILE, Manifest, read_manifest
from jgraph.runtime.files.step_files import TEMPORARY
from jgraph.train.checkpoint import checkpoint

pytestmark = [
    pytest.mark.usefixtures("little_garbage"),
    pytest.mark.usefixtures("nothing_is_left"),
]
MANIFEST_KEYS = ["format", "crc32", "leaves", "step", "position", "shape", "dtype"]
POSITION = {"epoch": 2, "again": 0}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Lets what Orbax left behind be told of now, where it is expected."""
    yield
    gc.collect()


def tree(step: int = 7, rows: int = 64) -> Any:
    random = np.random.default_rng(step)
    kernel = random.standard_normal((rows, 256)).astype(np.float32)
    return {
        "params": {"dense": {"kernel": kernel, "bias": np.zeros(256, np.float32)}},
        "opt": [np.int32(step), {"mu": random.standard_normal(9)}],
        "state": {},
        "global_step": np.int32(step),
    }


def like(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("saved") / "7", tree(), POSITION)


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


@contextmanager
def changed(file: Path, content: bytes | None) -> Iterator[None]:
    """The file has other content for a while; None: it is gone."""
    before = file.read_bytes()
    try:
        file.unlink() if content is None else file.write_bytes(content)
        yield
    finally:
        file.write_bytes(before)


def found_or_harmless(path: Path) -> bool:
    """Restores; returns whether damage was found, and fails on other numbers."""
    try:
        restored = checkpoint.restore(path, tree())
        position = checkpoint.restore_position(path)
    except CheckpointCorruptError as error:
        return str(path) in error.message
    assert_equal(restored, tree())
    assert position == POSITION
    return False


@pytest.mark.row(27)
@given(data=st.data())
def test_a_flipped_bit_is_found_or_changes_nothing(
    saved: Path, data: st.DataObject
) -> None:
    file = data.draw(st.sampled_from(files_of(saved)))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    if content:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    with changed(file, bytes(content)):
        found_or_harmless(saved)


@pytest.mark.row(27)
def test_a_flipped_bit_of_an_array_names_the_leaf(saved: Path) -> None:
    file = max(files_of(saved), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    with changed(file, bytes(content)):
        with pytest.raises(CheckpointCorruptError, match="params/dense/kernel") as e:
            checkpoint.verify(saved)
        assert e.value.details["leaves"] == ["params/dense/kernel"]
        assert e.value.code == "JG-302"
        # Orbax alone restores other numbers, without a word.
        alone = ocp.StandardCheckpointer().restore(saved)
        kernel = alone["params"]["dense"]["kernel"]
        assert not np.array_equal(kernel, tree()["params"]["dense"]["kernel"])


@pytest.mark.bad_input_row(22)
@pytest.mark.parametrize("size", [None, 0, 0.5])
def test_a_file_that_is_gone_or_cut_off_is_found_or_changes_nothing(
    saved: Path, size: float | None
) -> None:
    found = []
    for file in files_of(saved):
        content = file.read_bytes()
        cut = None if size is None else content[: int(len(content) * size)]
        with changed(file, cut):
            if found_or_harmless(saved):
                found.append(file.name)
    assert FILE in found
    assert "_METADATA" in found


def test_a_manifest_of_another_checkpoint_is_found(saved: Path, tmp_path: Path) -> None:
    other = checkpoint.save(tmp_path / "8", tree(8))
    with (
        changed(saved / FILE, (other / FILE).read_bytes()),
        pytest.raises(CheckpointCorruptError, match="global_step"),
    ):
        checkpoint.restore(saved, tree())


def test_a_manifest_says_what_is_there(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert manifest.step == 7
    assert manifest.position == POSITION
    assert str(manifest.leaves["params/dense/kernel"]) == "float32[64,256]"
    assert manifest.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(tree()))
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.row(26)
def test_no_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    huge = tree()
    huge["params"] = {"w": np.broadcast_to(np.float32(0), (1 << 25, 1 << 25))}
    with pytest.raises(CheckpointSpaceError, match="needs 4,503,") as caught:
        checkpoint.save(tmp_path / "1", huge)
    assert caught.value.code == "JG-304"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.row(26)
def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path) -> None:
    good = checkpoint.save(tmp_path / "1", tree(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointSpaceError, match="only a part"):
            checkpoint.save(tmp_path / "2", tree(2, rows=1024))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    checkpoint.verify(good)


def test_what_stops_a_save_before_its_commit_leaves_nothing(tmp_path: Path) -> None:
    seen: list[str] = []

    def stop() -> None:
        seen.extend(path.name for path in tmp_path.iterdir())
        raise CheckpointError("not now")

    with pytest.raises(CheckpointError, match="not now"):
        checkpoint.save(tmp_path / "1", tree(), before_commit=stop)
    assert [name.startswith("1.new-") and TEMPORARY in name for name in seen] == [True]
    assert list(tmp_path.iterdir()) == []


def test_replacing_a_checkpoint_keeps_the_old_one_until_the_new_is_complete(
    tmp_path: Path,
) -> None:
    path = checkpoint.save(tmp_path / "one", tree(1))

    def stop() -> None:
        raise CheckpointError("not now")

    with suppress(CheckpointError):
        checkpoint.save(path, tree(2), overwrite=True, before_commit=stop)
    assert_equal(checkpoint.restore(path, tree(1)), tree(1))
    checkpoint.save(path, tree(2), overwrite=True)
    assert_equal(checkpoint.restore(path, tree(1)), tree(2))
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_what_the_disk_says_while_it_is_written_to_is_told(tmp_path: Path) -> None:
    def break_down() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(CheckpointError, match=r"could not be written.*output error"):
        checkpoint.save(tmp_path / "1", tree(), before_commit=break_down)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    below = tmp_path / "file"
    below.touch()
    with pytest.raises(CheckpointPathError, match="Not a directory"):
        checkpoint.save(below / "1", tree())


def test_flax_takes_the_parameters_by_orbax_alone(saved: Path) -> None:
    like_params = {"params": like(tree()["params"])}
    args = ocp.args.PyTreeRestore(like_params, partial_restore=True)
    alone = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(saved, args=args)
    assert_equal(alone["params"], tree()["params"])


def test_a_copy_is_as_good(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "copy")
    assert_equal(checkpoint.restore(copy, tree()), tree())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, where this user may mount one."""
    directory = tmp_path / "small"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("this user may not mount a file system of its own")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.row(26)
def test_a_full_disk_keeps_the_steps_that_are_there(small_disk: Path) -> None:
    checkpoint.save(small_disk / "1", tree(1, rows=512))
    (small_disk / "others").write_bytes(bytes(1_000_000))
    with pytest.raises(CheckpointSpaceError, match="bytes") as caught:
        checkpoint.save(small_disk / "2", tree(2, rows=512))
    assert caught.value.details["needed"] > 512 * 256 * 4
    assert sorted(path.name for path in small_disk.iterdir()) == ["1", "others"]
    checkpoint.verify(small_disk / "1")


@pytest.mark.bad_input_row(22)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(MANIFEST_KEYS), inner, max_size=9)
        ),
    )
)
def test_any_json_as_a_manifest_is_one_error(saved: Path, content: Any) -> None:
    with changed(saved / FILE, json.dumps(content).encode()):
        for read in (checkpoint.verify, checkpoint.restore_position):
            with pytest.raises(CheckpointCorruptError, match=FILE):
                read(saved)


@pytest.mark.bad_input_row(22)
@given(st.binary(max_size=200))
@example(b"[" * 4000)
def test_any_bytes_as_a_manifest_are_one_error(saved: Path, content: bytes) -> None:
    with (
        changed(saved / FILE, content),
        pytest.raises(CheckpointCorruptError, match=FILE),
    ):
        read_manifest(saved)


def test_reads_that_end_after_the_one_that_failed_are_not_told_of(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    for file in files_of(saved):
        with changed(file, None), suppress(CheckpointCorruptError, CheckpointError):
            checkpoint.restore(saved, tree())
    gc.collect()
    assert not told

    class Broken:
        def __del__(self) -> None:
            raise RuntimeError("Event loop is closed")

    Broken()  # of somebody else
    assert [str(one.exc_value) for one in told] == ["Event loop is closed"]
