"""Metrics beside a loss: named arrays, and their exact means over workers.

A mean of whole numbers over workers is exact. A worker sends a large whole number as
pieces of 11 bits, whose float32 sums are exact, and whoever reads the mean puts them
together as float64.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import ConfigError, GraphError
from jgraph.runtime.data.batches import Array
from jgraph.train.model.trees import path_of

CONTRIBUTIONS: Final = "contributions"
"""Metric of a synchronous step: of how many contributions its update is the mean."""

LOCAL_STEPS: Final = "local_steps"
"""Metric of an update from local steps that are not as many for each worker."""

NOT_FINITE: Final = "not_finite"
"""Metric of a round of secure sums: how many contributions were not finite."""

WHOLE: Final = "<whole>"
"""Prefix of the fetch that has the pieces of a metric of whole numbers."""

_BITS: Final = 11


def named_metrics(tree: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns each value of nested dicts and lists as an array of its own name.

    Raises:
      GraphError: a value is no number, or two values have one name.

    Example:
      >>> named_metrics({"lr": 0.5, "top": {"1": 3, "5": 4}})["top/5"].item()
      4
    """
    arrays: dict[str, jax.Array] = {}
    for keys, value in jax.tree_util.tree_flatten_with_path(dict(tree))[0]:
        name = "/".join(path_of(keys))
        if name in arrays:
            raise GraphError(f"two metrics are called '{name}'; rename one")
        arrays[name] = _as_array(value, name)
    return arrays


def _as_array(value: Any, name: str) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise GraphError(
            f"metric '{name}' is {value!r:.60} ({type(value).__name__}), which JAX "
            f"does not take as an array: {error}; return numbers"
        ) from error
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_):
        raise GraphError(f"metric '{name}' has dtype {array.dtype}; return numbers")
    return array


def metric_values(
    metrics: Mapping[str, Callable[[Any, Any], Any]], model: Any, batch: Any
) -> dict[str, Any]:
    """Returns what each metric gives for a batch.

    Raises:
      ConfigError: one gives nothing.
    """
    values = {name: fn(model, batch) for name, fn in metrics.items()}
    for name, value in values.items():
        if value is None:
            raise ConfigError(
                f"metric '{name}' returned None; return the mean over the batch, a "
                "scalar"
            )
    return values


def as_float64(values: Any) -> Array:
    """Returns numbers of any real type, bfloat16 too, as float64."""
    return np.asarray(values).astype(np.float64)


def is_complex(values: Any) -> bool:
    """Whether values have no order, and no mean that is one real number."""
    return bool(np.iscomplexobj(values))


def needs_pieces(dtype: Any) -> bool:
    """Whether float32 cannot hold every value of a type of whole numbers."""
    kind: np.dtype[Any] = np.dtype(dtype)
    return kind.kind in "iu" and kind.itemsize > 2


def num_pieces(dtype: Any) -> int:
    """Returns how many pieces a value of this type has."""
    bits: int = 8 * np.dtype(dtype).itemsize
    return -(-bits // _BITS)


def pieces(value: jax.Array) -> jax.Array:
    """Returns whole numbers as pieces of 11 bits, lowest first: float32[n, …].

    Example:
      >>> pieces(jnp.array(5000)).tolist()
      [904.0, 2.0, 0.0]
    """
    count = num_pieces(value.dtype)
    low = [(value >> (_BITS * n)) & (2**_BITS - 1) for n in range(count - 1)]
    return jnp.stack([*low, value >> (_BITS * (count - 1))]).astype(jnp.float32)


def from_pieces(means: Array, counts: Array) -> Array:
    """Returns the means of whole numbers, float64[steps, …].

    Args:
      means: of the pieces, float32[steps, n, …].
      counts: of how many each is the mean, int[steps].

    Example:
      >>> means = np.float32([[904.0, 2.0, 0.0], [0.5, 0.0, 0.0]])
      >>> from_pieces(means, np.array([1, 2])).tolist()
      [5000.0, 0.5]
    """
    number = counts.reshape(-1, *[1] * (means.ndim - 1)).astype(np.float64)
    # What was summed is whole: a mean that was rounded to float32 still tells it.
    sums = np.rint(means.astype(np.float64) * number)
    weights = 2.0 ** (_BITS * np.arange(means.shape[1]))
    totals = np.tensordot(np.moveaxis(sums, 1, -1), weights, axes=1)
    result: Array = totals / number[:, 0]
    return result


def metrics_by_name(names: Sequence[str], fetches: Sequence[Array]) -> dict[str, Array]:
    """Returns what a loop fetched, a row per step, by the names of the metrics."""
    by_name = dict(zip(names, fetches, strict=bool(names)))
    return {
        name.removeprefix(WHOLE): from_pieces(values, by_name[CONTRIBUTIONS])
        if name.startswith(WHOLE)
        else values
        for name, values in by_name.items()
    }
