"""Arguments to feeds and fetches to results, at the client."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jgraph._compat import is_symbolic
from jgraph.errors import FeedError, NonFiniteError
from jgraph.graph.ir import Feed, Graph
from jgraph.graph.sizes import symbols_of
from jgraph.plan.types import from_plain, is_key, num_elements, to_plain


def feed_arrays(
    graph: Graph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    named: Mapping[str, Any],
    *,
    check_finite: bool,
) -> list[np.ndarray[Any, Any]]:
    """Returns one plain array per feed of the graph, in order.

    Args:
      graph: traced with arguments of these types.
      args: positional arguments of the step.
      kwargs: keyword arguments of the step.
      named: values by feed name, in place of those in the arguments.
      check_finite: refuse NaN and infinity.

    Raises:
      FeedError: a name that is no feed, or another shape or dtype than traced.
      NonFiniteError: a value that is not finite, when asked to check.
    """
    leaves = jax.tree_util.tree_leaves((tuple(args), dict(kwargs)))
    return leaf_arrays(graph, leaves, named, check_finite=check_finite)


def leaf_arrays(
    graph: Graph,
    leaves: Sequence[Any],
    named: Mapping[str, Any],
    *,
    check_finite: bool,
) -> list[np.ndarray[Any, Any]]:
    """Returns one plain array per feed, as ``feed_arrays``, of flat arguments.

    Feeds beyond the arguments (tapped values) are in ``named``.
    """
    names = [feed.name for feed in graph.feeds]
    for name in named:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise FeedError(
                f"'{graph.name}' has no argument called {name}.{hint} Its feeds are: "
                f"{', '.join(names) or 'none'}",
                feed=name,
            )
    arrays = []
    for index, feed in enumerate(graph.feeds):
        if feed.name in named:
            value = named[feed.name]
        elif index < len(leaves):
            value = leaves[index]
        else:
            raise FeedError(
                f"the tapped value {feed.name} of '{graph.name}' is missing; give it "
                f"with feeds={{{feed.name!r}: array}}",
                feed=feed.name,
            )
        array = _plain(graph, feed, value)
        if check_finite:
            _check_finite(graph, feed, array)
        arrays.append(array)
    return arrays


def plain_feeds(graph: Graph) -> Callable[[Sequence[Any]], bool]:
    """Returns what tells whether leaves are the feeds of a graph just as they are.

    Those that are not may be feeds after a conversion, or are refused with a sentence:
    ``leaf_arrays`` knows.
    """
    kinds = [(feed.aval.shape, feed.aval.dtype) for feed in graph.feeds]

    def fit(leaves: Sequence[Any]) -> bool:
        if len(leaves) != len(kinds):
            return False
        for leaf, (shape, dtype) in zip(leaves, kinds, strict=True):
            if type(leaf) is not np.ndarray and not isinstance(leaf, np.generic):
                return False
            if leaf.dtype != dtype or leaf.shape != shape:
                return False
        return True

    return fit


def as_result(graph: Graph, arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Returns the fetched arrays in the structure that the function returned."""
    avals = [v.aval for v in graph.jaxpr.outvars]
    leaves = [
        from_plain(a, aval) if is_key(aval) else a
        for a, aval in zip(arrays, avals, strict=True)
    ]
    return jax.tree_util.tree_unflatten(graph.out_tree, leaves)


def _plain(graph: Graph, feed: Feed, value: Any) -> np.ndarray[Any, Any]:
    wanted = feed.aval
    if (
        isinstance(value, np.ndarray | np.generic)
        and value.dtype == wanted.dtype
        and value.shape == wanted.shape
    ):
        return np.asarray(value)  # nearly always, and quickly seen
    if is_key(wanted):
        return np.asarray(to_plain(value))
    is_array = hasattr(value, "dtype")
    array = np.asarray(value) if is_array else np.asarray(value, wanted.dtype)
    # JAX has no 64-bit values unless told: numpy's default widths are cast as it does.
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if not _same_shape(array.shape, wanted.shape) or dtype != wanted.dtype:
        raise FeedError(
            f"argument {feed.name} of '{graph.name}' is "
            f"{_describe(array.dtype, array.shape)}; this step wants "
            f"{_describe(wanted.dtype, wanted.shape)}{_hint(array, wanted)}",
            feed=feed.name,
        )
    return np.asarray(array, wanted.dtype)


def _same_shape(shape: Sequence[int], wanted: Sequence[Any]) -> bool:
    """Whether a shape may be this; the driver compares the sizes of its names."""
    if tuple(shape) == tuple(wanted):
        return True
    return len(shape) == len(wanted) and all(
        is_symbolic(due) or have == due for have, due in zip(shape, wanted, strict=True)
    )


def _describe(dtype: Any, shape: Sequence[int]) -> str:
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _hint(array: np.ndarray[Any, Any], wanted: Any) -> str:
    hints = []
    if array.dtype != wanted.dtype:
        hints.append(f".astype(np.{np.dtype(wanted.dtype).name})")
    if array.size == num_elements(wanted) and not symbols_of(wanted.shape):
        hints.append(f".reshape{tuple(wanted.shape)}")
    return f". Perhaps you forgot {' and '.join(hints)}" if hints else ""


def _check_finite(graph: Graph, feed: Feed, array: np.ndarray[Any, Any]) -> None:
    if not np.issubdtype(array.dtype, np.inexact) and array.dtype.kind != "V":
        return
    bad = array.size - int(np.isfinite(array.astype(np.float32)).sum())
    if bad:
        raise NonFiniteError(
            f"argument {feed.name} of '{graph.name}' has {bad} of {array.size} values "
            "that are NaN or infinite; clean the input, or run with "
            "check_finite=False",
            feed=feed.name,
        )
