"""Checkpoints that Orbax reads without jgraph.

Layout: ``{"params": …, "opt_state": …, "state": …, "global_step": …}``. ``params`` and
``state`` are nested dicts by name; ``opt_state`` is the optax state over such
``params``, so that ``tx.init(params)`` is a target for ``opt_state``:

    tree = orbax.checkpoint.StandardCheckpointer().restore(path)
    tree["params"]["Dense_0"]["kernel"]

Beside it, ``jgraph_data.json`` says where in the data the training was.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import CheckpointError
from jgraph.train.runner import Position
from jgraph.train.trees import Tree

_POSITION = "jgraph_data.json"


def save(
    path: str | Path, tree: Tree, position: Position = None, *, overwrite: bool = False
) -> Path:
    """Writes a state tree to a new directory, and returns its absolute path.

    Args:
      path: the directory; ``~`` and relative paths are fine.
      tree: ``{"params", "opt", "state", "global_step"}``.
      position: where in the data the training is.
      overwrite: replace what is there.

    Raises:
      CheckpointError: the directory exists, or cannot be written.
    """
    import orbax.checkpoint as ocp

    target = Path(path).expanduser().absolute()
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} exists; choose another path, or save(…, overwrite=True)"
        )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(target, _layout(tree), force=overwrite)
        if position is not None:
            (target / _POSITION).write_text(json.dumps(position))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {target}: {error}"
        ) from error
    return target


def restore(
    path: str | Path, like: Tree, growing: Collection[str] = frozenset()
) -> Tree:
    """Reads a state tree from a checkpoint.

    Args:
      path: a directory that ``save`` wrote.
      like: a tree of the same model; every leaf must agree in shape and dtype.
      growing: names of leaves, ``params/ads/rows``, that have any number of rows.

    Raises:
      CheckpointError: no checkpoint there, a damaged one, or one of another model;
        names the first leaf that differs.
    """
    import orbax.checkpoint as ocp

    target = Path(path).expanduser().absolute()
    if not target.is_dir():
        raise CheckpointError(f"there is no checkpoint at {target}")
    layout = _layout(like)
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(_here())
        ),
        layout,
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored = checkpointer.metadata(target).item_metadata.tree
            found = _leaves(stored)
            wanted = _resized(wanted, found, growing)
            _check(found, _leaves(wanted), str(target))
            restored = checkpointer.restore(target, target=wanted)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint at {target} cannot be read: {error}"
        ) from error
    return _from_layout(restored, like)


def _resized(
    wanted: Tree,
    stored: Mapping[str, tuple[tuple[int, ...], Any]],
    growing: Collection[str],
) -> Tree:
    """Returns types in which leaves that grow have as many rows as are stored."""
    names = {re.sub("^opt/", "opt_state/", name) for name in growing}

    def resize(path: tuple[Any, ...], leaf: Any) -> Any:
        name = "/".join(_key_name(key) for key in path)
        if name not in names or not stored.get(name, ((),))[0]:
            return leaf
        shape = (stored[name][0][0], *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(resize, wanted)


def restore_position(path: str | Path) -> Position:
    """Returns where in the data the training was; None: the checkpoint does not say.

    Raises:
      CheckpointError: what it says cannot be read.
    """
    file = Path(path).expanduser().absolute() / _POSITION
    try:
        position: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}; delete it to begin the data by the "
            "number of the step"
        ) from error
    return position


def _here() -> jax.Device:
    return jax.local_devices()[0]


def _layout(tree: Tree) -> Tree:
    """Returns the tree as it is stored: plain arrays, random keys as their data."""
    plain = jax.tree.map(_plain, tree)
    return {
        "params": plain["params"],
        "opt_state": plain["opt"],
        "state": plain["state"],
        "global_step": plain["global_step"],
    }


def _from_layout(stored: Tree, like: Tree) -> Tree:
    named = {
        "params": stored["params"],
        "opt": stored["opt_state"],
        "state": stored["state"],
        "global_step": stored["global_step"],
    }
    return jax.tree.map(_as_like, named, like)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_like(leaf: Any, like: Any) -> Any:
    if _is_key(like):
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))
    return leaf


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _leaves(tree: Tree) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns (shape, dtype) of each leaf by its path.

    Orbax describes named tuples as dicts and lists; the names are what is compared.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if hasattr(leaf, "shape") and leaf.shape is not None:
            name = "/".join(_key_name(key) for key in path)
            found[name] = (tuple(leaf.shape), np.dtype(leaf.dtype))
    return found


def _key_name(key: Any) -> str:
    for kind in ("key", "name", "idx"):
        if hasattr(key, kind):
            return str(getattr(key, kind))
    return str(key)


def _check(
    stored: dict[str, tuple[tuple[int, ...], Any]],
    wanted: dict[str, tuple[tuple[int, ...], Any]],
    where: str,
) -> None:
    missing = sorted(wanted.keys() - stored.keys())
    extra = sorted(stored.keys() - wanted.keys())
    if missing or extra:
        what = f"has no '{missing[0]}'" if missing else f"has '{extra[0]}' besides"
        raise CheckpointError(
            f"the checkpoint at {where} {what}: {len(missing)} leaves are missing and "
            f"{len(extra)} are not of this model; use the model and optimizer that "
            "it was saved with",
            missing=missing,
            extra=extra,
        )
    wrong = [name for name in sorted(wanted) if stored[name] != wanted[name]]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"the checkpoint at {where} has {name} {_describe(stored[name])}, the "
            f"model wants {_describe(wanted[name])}; {len(wrong)} of {len(wanted)} "
            "leaves differ",
            leaves=wrong,
        )


def _describe(leaf: tuple[tuple[int, ...], Any]) -> str:
    shape, dtype = leaf
    return f"{dtype}[{','.join(map(str, shape))}]"
