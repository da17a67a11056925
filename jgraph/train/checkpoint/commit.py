"""Writing and reading one checkpoint with Orbax, its manifest inside the commit.

Orbax writes to a temporary directory and renames it when everything is on disk; what
has no such name was never finished. The manifest is put there before the rename, so
that there is no checkpoint without one. Imports Orbax, which takes a second.
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import jax
import orbax.checkpoint as ocp

from jgraph.errors import CheckpointError, CheckpointSpaceError, JGError
from jgraph.failpoints import failpoint
from jgraph.runtime.files.manifest import FILE, Leaf, Manifest, directory_of, unreadable
from jgraph.runtime.files.step_files import (
    ITEM,
    TEMPORARY,
    make_item,
    put_in_place,
    sync_tree,
    unfinished,
)
from jgraph.train.checkpoint.array_files import write_arrays
from jgraph.train.model.trees import Tree

_ROOM: Final = 1 << 20
"""For what a checkpoint has beside its arrays."""
_ONLY_WRITES: Final = (
    "arrays of a checkpoint are written by this handler; restore them with Orbax's "
    "own, which their description names"
)
_DESCRIPTION: Final = "_CHECKPOINT_METADATA"
_READS: Final = (
    "orbax.checkpoint._src.handlers.standard_checkpoint_handler"
    ".StandardCheckpointHandler"
)
"""The handler that Orbax is told to read the tree with."""
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@final
@dataclass(frozen=True, slots=True)
class _Array:
    """A leaf of the tree that is saved: an array, and its path."""

    name: str
    array: Any


@final
class _Arrays(ocp.type_handlers.TypeHandler):  # type: ignore[misc]  # Orbax is untyped
    """Writes all arrays of a tree at once; Orbax describes the tree."""

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}

    def typestr(self) -> str:
        """Returns what Orbax restores them as."""
        return "np.ndarray"

    async def serialize(
        self, values: Sequence[_Array], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        """Writes them."""
        arrays = {value.name: value.array for value in values}
        assert [directory_of(name) for name in arrays] == [info.name for info in infos]
        self.leaves = write_arrays(Path(infos[0].parent_dir), arrays)
        return []

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Orbax's interface has it; never called, see ``typestr``."""
        raise CheckpointError(_ONLY_WRITES)

    async def metadata(self, infos: Any) -> Any:
        """Orbax's interface has it; never called, see ``typestr``."""
        raise CheckpointError(_ONLY_WRITES)


@final
class _Handler(ocp.CheckpointHandler):  # type: ignore[misc]
    """Orbax's handler of trees, and the manifest beside its files."""

    def __init__(self) -> None:
        self._trees = ocp.StandardCheckpointHandler()
        self._before_commit: Callable[[], None] = lambda: None

    def save(self, directory: Any, args: "_Save") -> None:
        """Writes the arrays."""
        failpoint("checkpoint.begun")
        arrays = _Arrays()
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (_Array, arrays),
                # None is there; without its handler Orbax warns of that.
                (jax.Array, ocp.type_handlers.ArrayHandler()),
            ),
        )
        handler.save(directory, args=ocp.args.PyTreeSave(_named(args.layout)))
        failpoint("checkpoint.arrays_written")
        manifest = replace(args.manifest, leaves=arrays.leaves)
        with open(Path(directory) / FILE, "w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        failpoint("checkpoint.manifest_written")
        self._before_commit = args.before_commit

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Orbax's interface has it; never called: see ``array_files``."""
        raise CheckpointError(_ONLY_WRITES)

    def metadata(self, directory: Any) -> Any:
        """Returns the types of the arrays."""
        return self._trees.metadata(directory)

    def finalize(self, directory: Any) -> None:
        """Is called when everything is on disk; the rename follows."""
        failpoint("checkpoint.on_disk")
        self._before_commit()

    def close(self) -> None:
        """Gives back what it holds."""
        self._trees.close()


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
@dataclass
class _Save(ocp.args.CheckpointArgs):  # type: ignore[misc]
    layout: Any
    manifest: Manifest
    before_commit: Callable[[], None]


def write(
    target: Path,
    layout: Tree,
    manifest: Manifest,
    *,
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Writes a checkpoint; it is there as a whole, or not at all.

    Args:
      target: its directory; what is there is replaced once the new one is complete.
      layout: nested dicts, lists and tuples of arrays, NumPy's or on tasks.
      manifest: of the checkpoint, without its leaves.
      before_commit: called when everything is on disk; what it raises stops the save.

    Raises:
      CheckpointSpaceError: there is no room.
      CheckpointError: it cannot be written.
    """
    path = unfinished(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with ocp.Checkpointer(_Handler()) as checkpointer:
            checkpointer.save(path, args=_Save(layout, manifest, before_commit))
        failpoint("checkpoint.committed")
        _let_managers_read(path)
        sync_tree(path)
        put_in_place(path, target)
    except BaseException as error:
        for leftover in [path, *target.parent.glob(f"{path.name}{TEMPORARY}*")]:
            shutil.rmtree(leftover, ignore_errors=True)
        if isinstance(error, CheckpointSpaceError):  # of a task
            raise _no_room(target, nbytes_of(layout), error.message) from error
        if isinstance(error, JGError) or not isinstance(error, Exception):
            raise
        raise _why_not(error, target, nbytes_of(layout)) from error


def _let_managers_read(path: Path) -> None:
    """Says in Orbax's words that a ``CheckpointManager`` may read a checkpoint, too."""
    description = json.loads((path / _DESCRIPTION).read_text(encoding="utf-8"))
    description["item_handlers"] = {ITEM: _READS}
    (path / _DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
    make_item(path)


def check_room(target: Path, nbytes: int) -> None:
    """Refuses a save that the disk has no room for.

    Raises:
      CheckpointSpaceError: says how much is needed, and how much is free.
    """
    there = next(path for path in target.parents if path.exists())
    free = shutil.disk_usage(there).free
    if free < nbytes + _ROOM:
        raise _no_room(target, nbytes, f"{free:,} bytes are free there")


def _no_room(target: Path, nbytes: int, why: str) -> CheckpointSpaceError:
    return CheckpointSpaceError(
        f"the checkpoint {target} needs {nbytes + _ROOM:,} bytes, and {why}; make "
        "room, or keep fewer (`jgraph ckpt prune`). Nothing that was there is lost",
        path=str(target),
        needed=nbytes + _ROOM,
    )


def _why_not(error: Exception, target: Path, nbytes: int) -> CheckpointError:
    # TensorStore tells of the disk by text alone.
    texts = ("No space left", "File too large", "Disk quota", "ENOSPC")
    if getattr(error, "errno", None) in _FULL or any(t in str(error) for t in texts):
        return _no_room(target, nbytes, "the disk took only a part of it")
    return CheckpointError(
        f"the checkpoint could not be written to {target}: {error}", path=str(target)
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a library or the disk raises over files is an error of checkpoints."""
    expect_late_reads()
    try:
        yield
    except JGError:
        raise
    except Exception as error:
        raise unreadable(path, error) from error


def read_types(path: Path) -> Tree:
    """Returns the types that Orbax knows of a checkpoint's arrays.

    Raises:
      CheckpointCorruptError: Orbax cannot read it.
    """
    with reading(path), ocp.Checkpointer(_Handler()) as checkpointer:
        return checkpointer.metadata(path).item_metadata.tree


def names_of(tree: Tree) -> Mapping[str, Any]:
    """Returns the leaves of a tree by path, ``params/Dense_0/kernel``.

    Orbax describes named tuples as dicts and lists; the names are what is compared.
    """
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if getattr(leaf, "shape", None) is not None
    }


def nbytes_of(layout: Tree) -> int:
    """Returns the bytes of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(layout))


def _named(layout: Tree) -> Tree:
    """Returns the tree with arrays that know their paths."""

    def name(path: tuple[Any, ...], leaf: Any) -> _Array:
        return _Array(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)

    return jax.tree_util.tree_map_with_path(name, layout)


_CLOSED: Final = "Event loop is closed"
_TELLS: Final = "call_soon_threadsafe"


def expect_late_reads() -> None:
    """Lets what ends too late pass in silence from now on, in this process."""
    if not getattr(sys.unraisablehook, "is_of_late_reads", False):
        sys.unraisablehook = _hook(sys.unraisablehook)


def _hook(others: Callable[[Any], object]) -> Callable[[Any], None]:
    def hook(unraisable: Any) -> None:
        if not _is_late(unraisable):
            others(unraisable)

    hook.is_of_late_reads = True  # type: ignore[attr-defined]
    return hook


def _is_late(unraisable: Any) -> bool:
    """Whether native code told a closed event loop of something."""
    trace = unraisable.exc_traceback
    return (
        isinstance(unraisable.exc_value, RuntimeError)
        and str(unraisable.exc_value) == _CLOSED
        and unraisable.object is None
        and (trace is None or trace.tb_frame.f_code.co_name == _TELLS)
    )
