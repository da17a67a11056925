"""Embedding bags: the rows of several ids, combined to one."""

from typing import Literal

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError
from jgraph.graph.rows.rows import NO_ID
from jgraph.train.tables.ids import OF_BAGS, wide_ids, without_no_id

_COMBINERS = ("sum", "mean", "sqrtn")


def embedding_bag(
    table: jax.Array,
    ids: jax.Array,
    weights: jax.Array | None = None,
    *,
    combiner: Literal["sum", "mean", "sqrtn"] = "mean",
    max_norm: float | None = None,
) -> jax.Array:
    """Returns the combined rows of each bag of ids.

    A bag that is not full is padded with the id -1, or with weights 0; unsigned ids
    have no -1 and take weights. A bag without ids gives zeros. The rules are those of
    ``tf.nn.safe_embedding_lookup_sparse``, but an id below -1 or past the last row is
    an error in training.

    Args:
      table: float[rows, …].
      ids: int[…, n].
      weights: float[…, n]; ones if unset. For ``"mean"`` and ``"sqrtn"`` ids of a
        weight below 0 do not count.
      combiner: ``"sum"`` of the rows times their weights; ``"mean"``: divided by the
        sum of the weights; ``"sqrtn"``: by the root of the sum of their squares.
      max_norm: rows of a larger norm are scaled to it before they are combined; the
        table stays as it is.

    Returns:
      float[…, *table.shape[1:]], of the table's dtype.

    Raises:
      ConfigError: another combiner, a ``max_norm`` that is not above 0, or shapes or
        dtypes that do not fit.

    Example:
      >>> table = jnp.array([[1.0], [2.0], [4.0]])
      >>> embedding_bag(table, jnp.array([[0, 2], [1, -1], [-1, -1]])).tolist()
      [[2.5], [2.0], [0.0]]
    """
    try:
        ids = jnp.asarray(ids)
    except (TypeError, ValueError):
        raise ConfigError(
            f"ids are a {type(ids).__name__} that is no array of numbers; pad bags of "
            "different lengths with -1"
        ) from None
    if combiner not in _COMBINERS:
        raise ConfigError(f"combiner is {combiner!r:.60}; it is one of {_COMBINERS}")
    if not (jnp.issubdtype(ids.dtype, jnp.integer) and ids.ndim):
        raise ConfigError(
            f"ids are {ids.dtype}{list(ids.shape)}; a bag is an array of whole numbers"
        )
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm is {max_norm}; it is a number above 0, or None")
    table = jnp.asarray(table)
    weights = jnp.ones(ids.shape) if weights is None else jnp.asarray(weights)
    if weights.shape != ids.shape:
        raise ConfigError(
            f"weights have the shape {weights.shape} and ids {ids.shape}; give one "
            "weight per id"
        )
    weights = weights.astype(table.dtype)
    # First: narrow and unsigned ids have no -1 or NO_ID to be compared with.
    ids = without_no_id(wide_ids(ids))
    there = (ids != -1) & (weights != 0 if combiner == "sum" else weights > 0)
    with jax.named_scope(OF_BAGS):  # only here NO_ID is no error
        rows = jnp.take(table, jnp.where(there, ids, NO_ID), axis=0)
    wide = (..., *[None] * (table.ndim - 1))
    rows = jnp.where(there[wide], rows, 0)
    if max_norm is not None:
        rows = _clipped(rows, ids.ndim, max_norm)
    weights = jnp.where(there, weights, 0)
    total = (rows * weights[wide]).sum(ids.ndim - 1)
    if combiner == "sum":
        return total
    if combiner == "mean":
        divisor = weights.sum(-1)
    else:
        # The root has no derivative at 0, where a bag is empty.
        squares = (weights**2).sum(-1)
        divisor = jnp.sqrt(jnp.where(squares > 0, squares, 1))
    return total / jnp.where(there.any(-1), divisor, 1)[wide]


def _clipped(rows: jax.Array, first: int, most: float) -> jax.Array:
    """Returns rows, those of a norm over ``most`` scaled to it."""
    axes = tuple(range(first, rows.ndim))
    squares = (rows**2).sum(axes, keepdims=True)
    # The root has no derivative at 0, and a short row is not scaled.
    norms = jnp.sqrt(jnp.where(squares > most**2, squares, most**2))
    return rows * (most / norms).astype(rows.dtype)
