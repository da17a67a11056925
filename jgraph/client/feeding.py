"""Conversion of arguments to feeds, and of fetches to results, at the client."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jgraph._compat import is_symbolic
from jgraph.errors import FeedError, NonFiniteError
from jgraph.graph.graph import Graph
from jgraph.graph.ir import Feed
from jgraph.graph.sizes import symbols_of
from jgraph.graph.tracing.feeds import check_mask
from jgraph.graph.variable import KINDS
from jgraph.plan.program.types import (
    from_plain,
    is_key,
    is_plain,
    num_elements,
    to_plain,
)

Array: TypeAlias = np.ndarray[Any, Any]


def feed_arrays(
    graph: Graph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    by_name: Mapping[str, Any],
    *,
    check_finite: bool,
) -> list[Array]:
    """Returns one plain array per feed of the graph, in order.

    Args:
      graph: traced with arguments of these types.
      args: positional arguments of the step.
      kwargs: keyword arguments of the step.
      by_name: values by feed name, in place of those in the arguments.
      check_finite: refuse NaN and infinity.

    Raises:
      FeedError: a name that is no feed, or another shape or dtype than traced.
      NonFiniteError: a value that is not finite, when asked to check.
    """
    leaves = jax.tree_util.tree_leaves((tuple(args), dict(kwargs)))
    return leaf_arrays(graph, leaves, by_name, check_finite=check_finite)


def leaf_arrays(
    graph: Graph,
    leaves: Sequence[Any],
    by_name: Mapping[str, Any],
    *,
    check_finite: bool,
) -> list[Array]:
    """Returns one plain array per feed, as ``feed_arrays``, of flat arguments.

    Feeds beyond the arguments (tapped values) are in ``by_name``.
    """
    names = [feed.name for feed in graph.feeds]
    check_by_name(by_name)
    for name in by_name:
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
        if feed.name in by_name:
            value = by_name[feed.name]
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


def check_by_name(feeds: object) -> None:
    """Refuses feeds that are not by name.

    Raises:
      FeedError: it is no mapping of names.
    """
    names = list(feeds) if isinstance(feeds, Mapping) else [None]
    if not all(isinstance(name, str) for name in names):
        raise FeedError(
            f"feeds is {feeds!r:.60}; give arrays by name, feeds={{'x': array}}"
        )


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


def as_result(graph: Graph, arrays: Sequence[Array]) -> Any:
    """Returns the fetched arrays in the structure that the function returned."""
    avals = [v.aval for v in graph.jaxpr.outvars]
    leaves = [
        a if is_plain(aval) else from_plain(a, aval)
        for a, aval in zip(arrays, avals, strict=True)
    ]
    return jax.tree_util.tree_unflatten(graph.out_tree, leaves)


def _plain(graph: Graph, feed: Feed, value: Any) -> Array:
    """Returns a value in its feed's type, converted where JAX would lose nothing."""
    aval = feed.aval
    check_mask(value, feed.name, graph.name)
    if (
        isinstance(value, np.ndarray | np.generic)
        and value.dtype == aval.dtype
        and value.shape == aval.shape
    ):
        return np.asarray(value)  # nearly always, and quickly seen
    if is_key(aval):
        return _key_data(graph, feed, value)
    array = _as_array(graph, feed, value)
    converts = _converts if hasattr(value, "dtype") else _takes_numbers
    fits = array.dtype == aval.dtype or converts(array, aval.dtype)
    if not fits or not _same_shape(array.shape, aval.shape):
        raise FeedError(
            f"argument {feed.name} of '{graph.name}' is "
            f"{_describe(array.dtype, array.shape)}; this step wants "
            f"{_describe(aval.dtype, aval.shape)}{_hint(array, aval)}",
            feed=feed.name,
        )
    if array.dtype.kind in "biu" and array.dtype != aval.dtype:
        _check_range(graph, feed, array)
    return np.asarray(array, aval.dtype)


def _key_data(graph: Graph, feed: Feed, value: Any) -> Array:
    aval = feed.aval
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype != aval.dtype or not _same_shape(shape or (), aval.shape):
        actual = f"{value!r:.60}" if shape is None else f"{dtype}{list(shape)}"
        raise FeedError(
            f"argument {feed.name} of '{graph.name}' is {actual}; this step wants "
            f"{aval.dtype}{list(aval.shape)}, as jax.random.key and "
            "jax.random.split give",
            feed=feed.name,
        )
    return np.asarray(to_plain(value))


def _as_array(graph: Graph, feed: Feed, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # lists of several lengths, traced values
        array = np.asarray(None)
    if not array.dtype.isnative:  # numbers of a file or the network: the same in ours
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind != "b" and not jnp.issubdtype(array.dtype, np.number):
        raise FeedError(
            f"argument {feed.name} of '{graph.name}' is {value!r:.60}, which is no "
            "array of numbers; give one, for example with np.array",
            feed=feed.name,
        )
    return array


def _converts(array: Array, aval: Any) -> bool:
    """Whether JAX makes an array narrower to this dtype: it has no 64-bit types."""
    return bool(jax.dtypes.canonicalize_dtype(array.dtype) == aval)


def _takes_numbers(array: Array, aval: Any) -> bool:
    """Whether Python's numbers are of the dtype's kind, or of a lower one."""
    kinds = KINDS.get(array.dtype.kind)
    return not array.size or (kinds is not None and bool(jnp.issubdtype(aval, kinds)))


def _check_range(graph: Graph, feed: Feed, array: Array) -> None:
    dtype = feed.aval.dtype
    if not array.size or not jnp.issubdtype(dtype, np.integer):
        return
    limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    low, high = int(array.min()), int(array.max())
    if low < limits.min or high > limits.max:
        raise FeedError(
            f"argument {feed.name} of '{graph.name}' has values from {low} to {high}; "
            f"this step wants {np.dtype(dtype).name}, which has {limits.min} to "
            f"{limits.max}: give smaller numbers, or make the step with a wider type",
            feed=feed.name,
        )


def _same_shape(shape: Sequence[int], feed_shape: Sequence[Any]) -> bool:
    """Whether a shape may be this; the driver compares the sizes of its names."""
    if tuple(shape) == tuple(feed_shape):
        return True
    return len(shape) == len(feed_shape) and all(
        is_symbolic(feed_size) or size == feed_size
        for size, feed_size in zip(shape, feed_shape, strict=True)
    )


def _describe(dtype: Any, shape: Sequence[int]) -> str:
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _hint(array: Array, aval: Any) -> str:
    hints = []
    if array.dtype != aval.dtype:
        hints.append(f".astype(np.{np.dtype(aval.dtype).name})")
    is_of_size = not symbols_of(aval.shape) and array.size == num_elements(aval)
    if is_of_size and not _same_shape(array.shape, aval.shape):
        hints.append(f".reshape{tuple(aval.shape)}")
    return f". Perhaps you forgot {' and '.join(hints)}" if hints else ""


def _check_finite(graph: Graph, feed: Feed, array: Array) -> None:
    if not np.issubdtype(array.dtype, np.inexact) and array.dtype.kind != "V":
        return
    # numpy knows its own kinds; the others are narrow.
    numbers = array if array.dtype.kind in "fc" else array.astype(np.float32)
    bad = array.size - int(np.isfinite(numbers).sum())
    if bad:
        raise NonFiniteError(
            f"argument {feed.name} of '{graph.name}' has {bad} of {array.size} values "
            "that are NaN or infinite; clean the input, or run with "
            "check_finite=False",
            feed=feed.name,
        )
