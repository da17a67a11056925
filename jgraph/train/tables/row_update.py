"""Sparse optimizer updates: whether and how a step may update only touched rows.

Nothing is known about optimizers by name. Small arrays are put through a few steps,
once as a whole and once by rows, and the results are compared: so it is seen whether
rows have to do with each other. That a row without a gradient stays as it is, in these
steps and in all others, follows from the jaxpr of the update
(``jgraph.train.tables.still_rows``).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgraph.train.model.optimizer import CalledOptimizer
from jgraph.train.tables.still_rows import unchanged_operands

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
      held_back: tables whose gradients wait in the optimizer's state and are applied,
        or forgotten, at a later step: by rows, those of rows that this step does not
        look up would be lost.
    """

    exact: frozenset[int] = frozenset()
    reads_padding: bool = False
    held_back: frozenset[int] = frozenset()


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

    def update(params: Any, state: Any, grads: Any, value: Any = 1.0) -> Any:
        value = jnp.asarray(value, jnp.float32)
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
    held_back: set[int | None] = set()
    nothing = _touching(grads, tables, [])
    owned = [*places, *owners]
    for number, touched in enumerate(_TOUCHED):
        ids = jnp.array([*touched, _ROWS], jnp.int32)
        here = _touching(grads, tables, touched)
        without, whole = step(*whole, nothing), step(*whole, here)
        if number:  # a learning rate may be 0 at first
            changed = _changed(whole, without, owned)
            held_back |= changed - _changed(whole[0], without[0], places)
        zeros = rows_step(*zeros, here, ids, jnp.float32(0))
        garbage = rows_step(*garbage, here, ids, jnp.float32(_GARBAGE))
    results = map(jax.tree.leaves, (whole[0], zeros[0]))
    same = [_close(a, b) for a, b in zip(*results, strict=True)]
    others = all(ok for n, ok in enumerate(same) if n not in tables)
    still = _still(update, (start, state, grads), tables, owned)
    return RowUpdate(
        exact=frozenset(n for n in tables if others and same[n] and n in still),
        reads_padding=not all(
            map(_close, jax.tree.leaves(zeros), jax.tree.leaves(garbage))
        ),
        held_back=frozenset(n for n in tables if n in held_back),
    )


def _still(
    update: Any,
    given: tuple[Any, Any, Any],
    tables: Collection[int],
    owned: Sequence[int | None],
) -> set[int]:
    """Returns the tables that, with their state, a gradient of zeros leaves alone."""
    leaves, tree = jax.tree.flatten(given)

    def flat(*operands: Any) -> list[Any]:
        *leaves, value = operands
        return jax.tree.leaves(update(*jax.tree.unflatten(tree, leaves), value))

    zeros = [len(owned) + n for n in tables]
    kept = unchanged_operands(flat, [*leaves, jnp.float32(1)], zeros)
    moved = {owner for n, owner in enumerate(owned) if n not in kept}
    return set(tables) - moved


def _changed(a: Any, b: Any, owned: Sequence[int | None]) -> set[int | None]:
    """Returns of which parameters some leaf is not the same in both trees."""
    leaves = zip(owned, jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return {owner for owner, x, y in leaves if not _close(x, y)}


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
