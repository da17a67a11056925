"""Arguments and results of a traced function, under the names that the user gave."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jgraph.errors import FeedError, GraphError
from jgraph.graph.ir import Feed
from jgraph.graph.variable import Variable


def named_feeds(
    fn: Callable[..., Any],
    title: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Feed, ...], Any]:
    """Returns a feed per leaf of the arguments, and their tree.

    Args:
      fn: the function that takes the arguments; it names them.
      title: name of the function, for errors.
      args: positional arguments: arrays, ``jax.ShapeDtypeStruct`` or numbers, in
        pytrees.
      kwargs: keyword arguments, likewise.

    Returns:
      The feeds, in the order of the leaves of ``(args, kwargs)``, and the tree of that
      pair. Numbers become weakly typed scalars, as in ``jax.jit``.

    Raises:
      FeedError: arguments that ``fn`` does not take, or a leaf that is no array.

    Example:
      >>> feeds, _ = named_feeds(lambda x, opt: 0, "f", (1.0,), {"opt": {"lr": 2}})
      >>> [feed.name for feed in feeds]
      ['x', "opt['lr']"]
    """
    names = _parameter_names(fn, title, args, kwargs)
    leaves, tree = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))
    feeds = []
    for path, leaf in leaves:
        top = names[path[1].idx] if path[0].idx == 0 else path[1].key
        name = top + keystr(path[2:])
        feeds.append(Feed(name, _aval(leaf, name, title)))
    return tuple(feeds), tree


def check_mask(value: object, name: str, title: str) -> None:
    """Refuses an array that has a mask, as JAX does: its values would count.

    Raises:
      FeedError: it is one of ``numpy.ma``.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise FeedError(
            f"argument '{name}' of {title} has a mask, which JAX does not know; give "
            f"{name}.filled(0), and ~{name}.mask as an argument of its own",
            feed=name,
        )


def named_outputs(result: Any, title: str) -> tuple[list[Any], tuple[str, ...], Any]:
    """Returns (leaves, their names, tree) of what a traced function returned.

    Raises:
      GraphError: a leaf that is not an array.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(result)
    for path, leaf in leaves:
        if isinstance(leaf, Variable):
            raise GraphError(
                f"{title} returns the variable '{leaf.name}' at {_place(path)}; return "
                f"its value: {leaf.name}[...]"
            )
        if (aval := _typeof(leaf)) is None or hasattr(aval, "inner_aval"):
            raise GraphError(
                f"{title} returns {_kind(leaf)} at {_place(path)}; a result is an "
                "array, a number or None, in a pytree. Return it outside of the graph"
            )
    values = [leaf for _, leaf in leaves]
    return values, tuple(keystr(path) for path, _ in leaves), tree


def _parameter_names(
    fn: Callable[..., Any], title: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some builtins have none
        return [f"args[{i}]" for i in range(len(args))]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise FeedError(
            f"{title}{signature} cannot take these arguments: {error}", function=title
        ) from None
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = range(len(args) - len(names))
            names += [f"{parameter.name}[{i}]" for i in rest]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names


def _aval(leaf: Any, name: str, title: str) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, Variable):
        raise FeedError(
            f"argument '{name}' of {title} is the variable '{leaf.name}'; a function "
            "uses variables directly, without an argument",
            feed=name,
        )
    check_mask(leaf, name, title)
    aval = _typeof(leaf)
    is_numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iufc"
    if is_numeric and not leaf.dtype.isnative:
        raise FeedError(
            f"argument '{name}' of {title} is {leaf.dtype.name} with its bytes in the "
            "order of another machine, which JAX does not take; give "
            f"{name}.astype('{leaf.dtype.name}')",
            feed=name,
        )
    if aval is None and isinstance(leaf, int):
        raise FeedError(
            f"argument '{name}' of {title} is {leaf}, which no integer type of JAX "
            "holds here; give a float, or write jax.config.update('jax_enable_x64', "
            "True) at the top of your program",
            feed=name,
        )
    if aval is None or hasattr(aval, "inner_aval"):
        raise FeedError(
            f"argument '{name}' of {title} is {_kind(leaf)}; only arrays and numbers "
            "can be fed. Bind it before: jg.function(functools.partial(fn, …))",
            feed=name,
        )
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def _typeof(leaf: Any) -> Any:
    """The leaf's aval, or None when it is no array; JAX raises many kinds of error."""
    try:
        return jax.typeof(leaf)
    except (TypeError, ValueError, OverflowError):
        return None


def _kind(leaf: Any) -> str:
    return f"{leaf!r:.40} (a {type(leaf).__name__})"


def _place(path: Any) -> str:
    return f"result{keystr(path)}"
