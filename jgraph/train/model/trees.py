"""State of Flax models as nested dicts of named arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError, GraphError

Tree: TypeAlias = Any
"""Nested dicts with string keys and arrays as leaves."""

Path: TypeAlias = tuple[str, ...]


def string_keys(tree: Tree) -> Tree:
    """Returns nested mappings as dicts with string keys, and leaves as arrays."""
    if isinstance(tree, Mapping):
        return {str(k): string_keys(v) for k, v in tree.items()}
    return jnp.asarray(tree)


def named_state(state: Any) -> tuple[Tree, Callable[[Tree], Any]]:
    """Returns an nnx state as nested dicts, and the function that goes back."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    paths = [_names(path) for path, _ in leaves]
    by_name: Tree = {}
    for path, (_, value) in zip(paths, leaves, strict=True):
        _put(by_name, path, value)

    def back(values: Tree) -> Any:
        return jax.tree.unflatten(tree, [_get(values, path) for path in paths])

    return by_name, back


def named_like(new: Any, old: Tree) -> Tree:
    """Returns the new state; it must have the structure and types of the old one."""
    by_name = new if isinstance(new, dict) else named_state(new)[0]
    structures: list[Any] = [jax.tree.structure(tree) for tree in (by_name, old)]
    if structures[0] != structures[1]:
        raise GraphError(
            "loss changed which state the model has (for example by nnx.sow or a new "
            "collection); return such values as metrics instead"
        )
    return jax.tree.map(lambda value, like: value.astype(like.dtype), by_name, old)


def group_with_parameters(paths: Sequence[Path]) -> list[str]:
    """Returns, for each path, the name of the variable that it must live beside.

    Optimizer state of a parameter ends with the parameter's own path.

    Example:
      >>> group_with_parameters([("params", "a", "w"), ("opt", "0", "mu", "a", "w")])
      ['params/a/w', 'params/a/w']
      >>> group_with_parameters([("params", "w"), ("opt", "0", "count")])
      ['params/w', 'opt/0/count']
    """
    parameters = {path[1:] for path in paths if path[0] == "params"}

    def group(path: Path) -> str:
        if path[0] == "opt":
            for first in range(1, len(path)):
                if path[first:] in parameters:
                    return "/".join(("params", *path[first:]))
        return "/".join(path)

    return [group(path) for path in paths]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Returns the name of each path, by which its variable is known.

    Raises:
      ConfigError: two have the same.

    Example:
      >>> names_of([("params", "a", "w"), ("params", "b")])
      ['params/a/w', 'params/b']
    """
    by_name: dict[str, Path] = {}
    for path in paths:
        name = "/".join(path)
        if name in by_name:
            raise ConfigError(
                f"two variables would be called '{name}': {by_name[name]!r} and "
                f"{path!r}; give that part of the model a name without a slash"
            )
        by_name[name] = path
    return list(by_name)


def path_of(keys: tuple[Any, ...]) -> Path:
    """Returns the names of a path in a tree of dicts, tuples and named fields."""
    kinds = ("key", "name", "idx")
    return tuple(
        next(str(getattr(k, kind)) for kind in kinds if hasattr(k, kind)) for k in keys
    )


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    # The attribute `value` of an nnx.Variable is no part of the name.
    keys = [k for k in path if not hasattr(k, "name")]
    return tuple(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys)


def _put(tree: Tree, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _get(tree: Tree, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
