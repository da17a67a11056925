"""Metrics beside a loss: named arrays, and the pieces of those of whole numbers."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.coordination.step.step_metrics import BITS
from jgraph.errors import ConfigError, GraphError
from jgraph.runtime.data.batches import Array
from jgraph.train.model.trees import path_of

NOT_FINITE: Final = "not_finite"
"""Metric of a round of secure sums: how many contributions were not finite."""


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
    return -(-bits // BITS)


def pieces(value: jax.Array) -> jax.Array:
    """Returns whole numbers as pieces of 11 bits, lowest first: float32[n, …].

    Example:
      >>> pieces(jnp.array(5000)).tolist()
      [904.0, 2.0, 0.0]
    """
    count = num_pieces(value.dtype)
    low = [(value >> (BITS * n)) & (2**BITS - 1) for n in range(count - 1)]
    return jnp.stack([*low, value >> (BITS * (count - 1))]).astype(jnp.float32)
