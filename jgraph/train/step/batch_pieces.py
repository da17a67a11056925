"""Batch pieces: gradients of equal pieces of a batch, summed in a loop of their number.

A worker's share of the batch of an update may be of any number of pieces up to a limit,
without another compilation: its batch has room for all, and the loop says how many are
there. That number is the weight of its contribution: the weighted mean over workers is
the mean over all pieces, whoever computed them.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp

from jgraph.graph.device import device
from jgraph.train.model.checks import value_and_grad
from jgraph.train.model.trees import Tree
from jgraph.train.tables.row_step import Computed, RowStep


@final
class BatchPieces:
    """What a worker makes of its pieces.

    Args:
      most: pieces of one worker at most.

    Example:
      >>> types = BatchPieces(4).together(jax.ShapeDtypeStruct((8, 3), jnp.float32))
      >>> types.shape
      (32, 3)
    """

    def __init__(self, most: int) -> None:
        self.most = most

    @property
    def note(self) -> str:
        """A line for the plan."""
        return f"a worker computes its share of a batch, {self.most} pieces at most"

    def together(self, piece: Any) -> Any:
        """Returns the types of a batch with room for all, given those of a piece."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self.most * x.shape[0], *x.shape[1:]), x.dtype
            ),
            piece,
        )

    def computed(
        self,
        loss: Callable[..., Any],
        now: Tree,
        by_rows: RowStep | None,
        batch: Any,
        count: Any,
        step: Any,
        replica: Any,
    ) -> Computed:
        """Returns the means over the pieces that are there; called inside a graph.

        A metric of whole numbers is summed; of those in the model's state the last are
        taken.

        Args:
          loss: as ``Adapter.loss``.
          now: has the parameters and the model's state.
          by_rows: has the tables whose ids are looked at; None: there are none.
          batch: the pieces, one after the other, and room for more.
          count: how many are there, int32, 1 or more.
          step: number of the step, int32.
          replica: number of the worker, int32.
        """
        with device("/job:worker"):
            pieces = jax.tree.map(
                lambda x: x.reshape(self.most, x.shape[0] // self.most, *x.shape[1:]),
                batch,
            )
            if by_rows is not None:
                seeds = step * self.most + jnp.arange(self.most, dtype=jnp.int32)
                pieces = by_rows.all_checked(pieces, replica, seeds)

            def of(number: Any) -> tuple[Any, Any, Any, Any]:
                piece = jax.tree.map(
                    lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False),
                    pieces,
                )
                seeds = replica, step * self.most + number
                compute = value_and_grad(loss)
                (value, (metrics, state)), grads = compute(
                    now["params"], now["state"], piece, seeds
                )
                return value, _as_floats(metrics), state, grads

            def add(number: Any, sums: tuple[Any, Any, Any, Any]) -> Any:
                values = of(number)
                value, metrics, state, grads = jax.tree.map(_summed, sums, values)
                counts = jax.tree.map(_counted, sums[1], values[1], metrics)
                return value, counts, state, grads

            types = jax.eval_shape(of, jax.ShapeDtypeStruct((), jnp.int32))
            sums = jax.lax.fori_loop(0, count, add, jax.tree.map(_zeros, types))
            mean = lambda total, one: _mean(total, count, one.dtype)
            value, metrics, state, grads = jax.tree.map(mean, sums, types)
            weight = count.astype(jnp.float32)
        return Computed(value, metrics, state, grads, {}, _no_loss, weight)


def _as_floats(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns metrics of which those that are true or not have a mean."""
    return {
        name: value.astype(jnp.float32) if value.dtype == jnp.bool_ else value
        for name, value in metrics.items()
    }


def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _zeros(value: Any) -> jax.Array:
    # Half types are summed as float32, as means over workers are.
    wide = jnp.promote_types(value.dtype, jnp.float32)
    return jnp.zeros(value.shape, wide if _is_real(value.dtype) else value.dtype)


def _summed(total: jax.Array, value: jax.Array) -> jax.Array:
    return total + value.astype(total.dtype) if _is_real(value.dtype) else value


def _mean(total: jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
    return (total / count).astype(dtype) if _is_real(dtype) else total


def _counted(total: jax.Array, value: jax.Array, summed: jax.Array) -> jax.Array:
    counts = jnp.issubdtype(value.dtype, jnp.integer)
    return total + value if counts else summed


def _no_loss(params: Tree) -> jax.Array:
    raise AssertionError("the update is where no batch is")
