"""How an optimizer may update the rows that a step has touched, and only these.

Nothing is known about optimizers by name. Small arrays are put through a few steps,
once as a whole and once by rows, and the results are compared.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgraph.train.optimizer import CalledOptimizer

_ROWS = 6
_TOUCHED = ([0, 2], [1, 2], [0, 5], [2, 4])
_GARBAGE = 7.0


@final
@dataclass(frozen=True, slots=True)
class RowUpdate:
    """What became of an optimizer by rows.

    Attributes:
      exact: tables, by leaf number, whose update by rows is that of the whole.
      reads_padding: rows that are not there change the result; they must be zeros.
    """

    exact: frozenset[int]
    reads_padding: bool


def other_shapes(
    slots: Mapping[str, tuple[str, tuple[int, ...]]], tables: Mapping[str, Any]
) -> dict[str, str]:
    """Returns why tables cannot be updated by rows, given the optimizer's state.

    Args:
      slots: (parameter, shape) of each variable of the optimizer's state.
      tables: shape of each table by name.

    Example:
      >>> slots = {"opt/0/v_row/t": ("params/t", (9,))}
      >>> other_shapes(slots, {"params/t": (9, 4)})
      {'params/t': 'the optimizer keeps opt/0/v_row/t of shape (9,) for it, which has
                    no row for each of its (9, 4)'}
    """
    return {
        table: f"the optimizer keeps {name} of shape {shape} for it, which has no row "
        f"for each of its {tables[table]}"
        for name, (table, shape) in slots.items()
        if table in tables and shape != tables[table]
    }


def probe(
    tx: CalledOptimizer,
    params: Any,
    tables: Collection[int],
    owners: Sequence[int | None],
) -> RowUpdate:
    """Tries an optimizer on small arrays, as a whole and by rows.

    Args:
      tx: the optimizer.
      params: the parameters, or their shapes and dtypes.
      tables: numbers of those leaves that would be updated by rows.
      owners: per leaf of the optimizer's state the leaf of ``params`` that it is of.

    Raises:
      Exception: whatever the optimizer raises on such arrays.
    """
    start, grads = _small(params, tables)
    state = tx.init(start)

    def update(params: Any, state: Any, grads: Any) -> Any:
        value = jnp.zeros(())
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    def rows_of(tree: Any, numbers: Sequence[int | None], ids: Any, fill: Any) -> Any:
        leaves = [
            _take(x, ids, fill) if n in tables else x
            for n, x in zip(numbers, jax.tree.leaves(tree), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def written(old: Any, new: Any, numbers: Sequence[int | None], ids: Any) -> Any:
        leaves = [
            a.at[ids].set(b, mode="drop") if n in tables else b
            for n, a, b in zip(
                numbers, jax.tree.leaves(old), jax.tree.leaves(new), strict=True
            )
        ]
        return jax.tree.unflatten(jax.tree.structure(old), leaves)

    places = list(range(len(jax.tree.leaves(params))))

    def by_rows(params: Any, state: Any, grads: Any, ids: Any, fill: Any) -> Any:
        new, slots = update(
            rows_of(params, places, ids, fill),
            rows_of(state, owners, ids, fill),
            rows_of(grads, places, ids, jnp.float32(0)),
        )
        return written(params, new, places, ids), written(state, slots, owners, ids)

    whole = (start, state)
    zeros, garbage = whole, whole
    rows_step, step = jax.jit(by_rows), jax.jit(update)
    for touched in _TOUCHED:
        ids = jnp.array([*touched, _ROWS], jnp.int32)
        here = _touching(grads, tables, touched)
        whole = step(*whole, here)
        zeros = rows_step(*zeros, here, ids, jnp.float32(0))
        garbage = rows_step(*garbage, here, ids, jnp.float32(_GARBAGE))
    results = map(jax.tree.leaves, (whole[0], zeros[0]))
    same = [_close(a, b) for a, b in zip(*results, strict=True)]
    others = all(ok for n, ok in enumerate(same) if n not in tables)
    return RowUpdate(
        exact=frozenset(n for n in tables if others and same[n]),
        reads_padding=not all(
            map(_close, jax.tree.leaves(zeros), jax.tree.leaves(garbage))
        ),
    )


def _take(table: Any, ids: Any, padding: Any) -> Any:
    there = (ids < _ROWS).reshape(-1, *[1] * (table.ndim - 1))
    return jnp.where(there, table[ids], padding.astype(table.dtype))


def _small(params: Any, tables: Collection[int]) -> tuple[Any, Any]:
    """Returns (parameters, gradients): few numbers, the ranks and dtypes kept."""
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(params)

    def numbers(n: int, like: Any) -> jax.Array:
        shape = [min(size, 2) for size in like.shape]
        if n in tables:
            shape[0] = _ROWS
        return jnp.asarray(rng.uniform(0.5, 1.5, shape), like.dtype)

    return tuple(
        jax.tree.unflatten(tree, [numbers(n, x) for n, x in enumerate(leaves)])
        for _ in range(2)
    )


def _touching(grads: Any, tables: Collection[int], rows: Sequence[int]) -> Any:
    leaves, tree = jax.tree.flatten(grads)
    keep = np.isin(np.arange(_ROWS), rows)
    leaves = [
        x * keep.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype) if n in tables else x
        for n, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, leaves)


def _close(a: Any, b: Any) -> bool:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return bool(np.allclose(x, y, rtol=1e-5, atol=1e-7, equal_nan=True))
