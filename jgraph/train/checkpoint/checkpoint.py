"""Checkpoints that Orbax reads without jgraph.

Layout: ``{"params": …, "opt_state": …, "state": …, "global_step": …}``. ``params`` and
``state`` are nested dicts by name; ``opt_state`` is the optax state over such
``params``, so that ``tx.init(params)`` is a target for ``opt_state``:

    tree = orbax.checkpoint.StandardCheckpointer().restore(path)
    tree["params"]["Dense_0"]["kernel"]

Beside the arrays, ``jgraph_manifest.json`` has the checksum of each, and says where in
the data the training was.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import CheckpointError, CheckpointPathError
from jgraph.graph.ir import TaskName
from jgraph.runtime.files.local_paths import local_path
from jgraph.runtime.files.manifest import (
    Leaf,
    Manifest,
    damaged,
    directory_of,
    read_manifest,
)
from jgraph.runtime.files.shard_files import stored_dtype
from jgraph.runtime.files.step_files import check_replaceable, put_back
from jgraph.train.checkpoint.array_files import load_arrays, read_arrays
from jgraph.train.model.trees import Tree, path_of
from jgraph.train.state.remote_arrays import RemoteArray
from jgraph.train.state.runner import Position

_NOT_IN_FILES: Final = "/\\\0"
_LONGEST: Final = 255
"""Bytes of the name of a directory."""


def save(
    path: str | Path,
    tree: Tree,
    position: Position = None,
    *,
    overwrite: bool = False,
    generation: int = 0,
    before_commit: Callable[[], None] = lambda: None,
    evaluation: Mapping[str, float] | None = None,
) -> Path:
    """Writes a state tree to a new directory, and returns its absolute path.

    Args:
      path: the directory; ``~`` and relative paths are fine.
      tree: ``{"params", "opt", "state", "global_step"}``, of arrays; those that tasks
        have (``RemoteArray``) are written by them.
      position: where in the data the training is.
      overwrite: replace a checkpoint of jgraph, once the new one is complete.
      generation: of the writer's lease; 0 without one.
      before_commit: called when everything is on disk; what it raises stops the save.
      evaluation: metrics of the copy that is saved.

    Raises:
      CheckpointError: the directory exists, or cannot be written.
      CheckpointForeignError: jgraph did not write what is there.
      CheckpointSpaceError: there is no room for it.
      ClusterError: a task that has an array is lost.
    """
    from jgraph.train.checkpoint import commit

    target = absolute(path)
    put_back(target)
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} exists; choose another path, or save(…, overwrite=True)",
            path=str(target),
        )
    check_replaceable(target)
    layout = jax.tree.map(_here, _layout(tree))
    check_names(layout)
    commit.check_room(target, commit.nbytes_of(layout))
    manifest = Manifest(
        step=int(layout["global_step"]),
        leaves={},
        position=position,
        generation=generation,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        evaluation=evaluation,
    )
    commit.write(target, layout, manifest, before_commit=before_commit)
    return target


def restore(
    path: str | Path,
    like: Tree,
    growing: Collection[str] = frozenset(),
    *,
    check_first: bool = True,
) -> Tree:
    """Reads a state tree from a checkpoint, and compares it with its checksums.

    Args:
      path: a directory that ``save`` wrote.
      like: a tree of the same model; every leaf must agree in shape and dtype. Those
        on tasks (``RemoteArray``) are read and stored by them, and stay as they are in
        what is returned.
      growing: names of leaves, ``params/ads/rows``, that have any number of rows.
      check_first: read what tasks take twice, so that a damaged checkpoint changes
        nothing; else what they have after an error is undefined.

    Raises:
      CheckpointError: no checkpoint there, or one of another model; names the first
        leaf that differs.
      CheckpointCorruptError: it is not what was written.
      ClusterError: a task that takes an array is lost.
    """
    from jgraph.train.checkpoint import commit

    target = absolute(path)
    put_back(target)
    manifest = read_manifest(target)
    layout = _layout(like)
    targets = commit.names_of(_resized(layout, manifest.leaves, growing))
    _check(manifest.leaves, targets, str(target))
    _check_types(manifest, target)
    arrays = _read(target, manifest, targets, check_first=check_first)
    leaves = [arrays.get(name, leaf) for name, leaf in targets.items()]
    return _from_layout(jax.tree.unflatten(jax.tree.structure(layout), leaves), like)


def restore_part(path: Path, like: Tree, tasks: Collection[TaskName]) -> Tree:
    """Gives tasks what they are to have of a checkpoint, and changes nothing elsewhere.

    Args:
      path: a directory that ``save`` wrote.
      like: see ``restore``.
      tasks: these; they read it themselves.

    Returns:
      The tree; what is not on tasks is in it.

    Raises:
      CheckpointError: a task has no such directory, or it is none of this model.
      CheckpointCorruptError: it is not what was written.
      ClusterError: a task is lost.
    """
    from jgraph.train.checkpoint.commit import names_of, reading

    manifest, layout = read_manifest(path), _layout(like)
    targets = names_of(layout)
    _check(manifest.leaves, targets, str(path))
    _check_types(manifest, path)
    remote = {n: a for n, a in targets.items() if isinstance(a, RemoteArray)}
    with reading(path):
        found = load_arrays(path, manifest.leaves, remote, check_only=True)
        if found.keys() != remote.keys():
            raise CheckpointError(
                f"not all tasks have the directory {path}, so none reads its part",
                path=str(path),
            )
        manifest.compare(found, found, path)
        rest = {n: manifest.leaves[n] for n in targets if n not in remote}
        arrays, descriptions = read_arrays(path, rest)
        manifest.compare(rest, descriptions, path)
        load_arrays(path, manifest.leaves, remote, tasks=tasks)
    leaves = [arrays.get(name, leaf) for name, leaf in targets.items()]
    return _from_layout(jax.tree.unflatten(jax.tree.structure(layout), leaves), like)


def _read(
    target: Path, manifest: Manifest, leaves: Mapping[str, Any], *, check_first: bool
) -> dict[str, Any]:
    """Returns the arrays that come here; those of tasks are there then."""
    from jgraph.train.checkpoint.commit import reading

    remote = {n: a for n, a in leaves.items() if isinstance(a, RemoteArray)}
    with reading(target):
        remote_leaves = load_arrays(
            target, manifest.leaves, remote, check_only=check_first
        )
        manifest.compare(remote_leaves, remote_leaves, target)
        local_leaves = {n: manifest.leaves[n] for n in leaves if n not in remote_leaves}
        arrays, descriptions = read_arrays(target, local_leaves)
        manifest.compare(local_leaves, descriptions, target)
        if check_first:
            remote_leaves = load_arrays(target, manifest.leaves, remote)
            manifest.compare(remote_leaves, remote_leaves, target)
    return arrays


def verify(path: str | Path) -> Manifest:
    """Reads all of a checkpoint, and compares it with its checksums.

    Raises:
      CheckpointError: no checkpoint there.
      CheckpointCorruptError: it is not what was written.
    """
    from jgraph.train.checkpoint import commit

    target = absolute(path)
    put_back(target)
    manifest = read_manifest(target)
    _check_types(manifest, target)
    with commit.reading(target):
        _, descriptions = read_arrays(target, manifest.leaves)
    manifest.compare(manifest.leaves, descriptions, target)
    return manifest


def check_names(tree: Tree) -> None:
    """Refuses names that no directory can have; Orbax writes a dot for each level.

    Args:
      tree: ``{"params", "opt", "state", "global_step"}``, or as it is stored.

    Raises:
      CheckpointError: names an array, or two that would have one directory.
    """
    by_directory: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = path_of(path)
        name = "/".join(keys)
        directory = directory_of(name)
        other = by_directory.setdefault(directory, name)
        why = ""
        if any(character in key for key in keys for character in _NOT_IN_FILES):
            why = "a part of its name has a slash, a backslash or a NUL"
        elif len(os.fsencode(directory)) > _LONGEST:
            why = f"as the name of a directory it is longer than {_LONGEST} bytes"
        if why:
            raise CheckpointError(
                f"a checkpoint cannot have '{name}': {why}; rename that part of the "
                "model",
                leaves=[name],
            )
        if other != name:
            raise CheckpointError(
                f"a checkpoint cannot have both '{other}' and '{name}': Orbax stores "
                f"both as '{directory}'; give one of them a name without dots",
                leaves=[other, name],
            )


def absolute(path: str | Path) -> Path:
    """Returns the path that a user means.

    Raises:
      CheckpointPathError: it cannot be a directory of this machine.
    """
    try:
        return local_path(path)
    except ValueError as why:
        raise CheckpointPathError(
            f"{path!r:.80} cannot be a directory of checkpoints: {why}; give one of "
            "this machine, for example 'runs/mlp'",
            path=str(path),
        ) from None


def _check_types(manifest: Manifest, target: Path) -> None:
    """Compares what Orbax would read with the manifest, before memory is taken."""
    from jgraph.train.checkpoint import commit

    types = commit.names_of(commit.read_types(target))
    for name in sorted(manifest.leaves.keys() | types.keys()):
        leaf, type_ = manifest.leaves.get(name), types.get(name)
        if leaf is None or type_ is None or _in_files(leaf) != _type(type_):
            raise damaged(target, f"leaf '{name}' has another type or is gone", [name])


def _resized(
    layout: Tree,
    leaves: Mapping[str, Leaf],
    growing: Collection[str],
) -> Tree:
    """Returns arrays of the types to read; those that grow as they are stored.

    NumPy's: JAX's would be put on a device, and cast where it has no float64.
    """
    names = {re.sub("^opt/", "opt_state/", name) for name in growing}

    def resize(path: tuple[Any, ...], leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(leaf, RemoteArray):
            return leaf
        shape = leaf.shape
        if name in names and name in leaves and leaves[name].shape:
            shape = (leaves[name].shape[0], *shape[1:])
        return np.broadcast_to(np.zeros((), leaf.dtype), shape)

    return jax.tree_util.tree_map_with_path(resize, layout)


def restore_position(path: str | Path) -> Position:
    """Returns where in the data the training was; None: the checkpoint does not say.

    Raises:
      CheckpointCorruptError: what it says cannot be read.
    """
    return read_manifest(absolute(path)).position


def _layout(tree: Tree) -> Tree:
    """Returns the tree as it is stored: plain arrays, random keys as their data."""
    return stored_as(jax.tree.map(_plain, tree))


def stored_as(tree: Tree) -> Tree:
    """Returns the tree with the names that checkpoints have."""
    return {
        "params": tree["params"],
        "opt_state": tree["opt"],
        "state": tree["state"],
        "global_step": tree["global_step"],
    }


def _from_layout(layout: Tree, like: Tree) -> Tree:
    state = {
        "params": layout["params"],
        "opt": layout["opt_state"],
        "state": layout["state"],
        "global_step": layout["global_step"],
    }
    return jax.tree.map(_as_like, state, like)


def _here(leaf: Any) -> Any:
    return leaf if isinstance(leaf, RemoteArray) else np.asarray(leaf)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_like(leaf: Any, like: Any) -> Any:
    if _is_key(like):
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))
    return leaf


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _check(
    saved_leaves: Mapping[str, Leaf],
    leaves: Mapping[str, Any],
    where: str,
) -> None:
    missing = sorted(leaves.keys() - saved_leaves.keys())
    extra = sorted(saved_leaves.keys() - leaves.keys())
    if missing or extra:
        what = f"has no '{missing[0]}'" if missing else f"has '{extra[0]}' besides"
        raise CheckpointError(
            f"the checkpoint at {where} {what}: {len(missing)} leaves are missing and "
            f"{len(extra)} are not of this model; use the model and optimizer that "
            "it was saved with",
            missing=missing,
            extra=extra,
        )
    wrong = [n for n in sorted(leaves) if _type(saved_leaves[n]) != _type(leaves[n])]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"the checkpoint at {where} has {name} {_describe(saved_leaves[name])}, "
            f"the model wants {_describe(leaves[name])}; {len(wrong)} of {len(leaves)} "
            "leaves differ",
            leaves=wrong,
        )


def _type(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(leaf.shape), np.dtype(leaf.dtype)


def _in_files(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(leaf.shape), stored_dtype(np.dtype(leaf.dtype))


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
