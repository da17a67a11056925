"""State of Flax models as nested dicts of named arrays."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jgraph.errors import GraphError

Tree: TypeAlias = Any
"""Nested dicts with string keys and arrays as leaves."""


def string_keys(tree: Tree) -> Tree:
    """Returns nested mappings as dicts with string keys, and leaves as arrays."""
    if isinstance(tree, Mapping):
        return {str(k): string_keys(v) for k, v in tree.items()}
    return jnp.asarray(tree)


def named_state(state: Any) -> tuple[Tree, Callable[[Tree], Any]]:
    """Returns an nnx state as nested dicts, and the function that goes back."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    paths = [_names(path) for path, _ in leaves]
    named: Tree = {}
    for path, (_, value) in zip(paths, leaves, strict=True):
        _put(named, path, value)

    def back(values: Tree) -> Any:
        return jax.tree.unflatten(tree, [_get(values, path) for path in paths])

    return named, back


def named_like(new: Any, old: Tree) -> Tree:
    """Returns the new state; it must have the structure and types of the old one."""
    named = new if isinstance(new, dict) else named_state(new)[0]
    structures: list[Any] = [jax.tree.structure(tree) for tree in (named, old)]
    if structures[0] != structures[1]:
        raise GraphError(
            "loss changed which state the model has (for example by nnx.sow or a new "
            "collection); return such values as metrics instead"
        )
    return jax.tree.map(lambda value, like: value.astype(like.dtype), named, old)


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
