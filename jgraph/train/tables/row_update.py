"""Sparse optimizer updates: whether and how a step may update only touched rows.

Nothing is known about optimizers by name. Small arrays are put through a few steps,
once as a whole and once by rows, and the results are compared: so it is seen whether
rows have to do with each other. That a row without a gradient stays as it is, in these
steps and in all others, follows from the jaxpr of the update (``unchanged_operands``).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgraph import _compat
from jgraph._compat import Atom, Equation, Jaxpr, Literal, Var
from jgraph.train.model.optimizer import CalledOptimizer
from jgraph.train.tables.flat_update import FlatUpdate, followed

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
      by_size: tables that the optimizer would treat otherwise if they had other sizes,
        as with a mask or labels by shape: rows alone tell it nothing.
    """

    exact: frozenset[int] = frozenset()
    reads_padding: bool = False
    held_back: frozenset[int] = frozenset()
    by_size: frozenset[int] = frozenset()


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
    hashed: Collection[int] = (),
) -> RowUpdate:
    """Tries an optimizer on small arrays, as a whole and by rows.

    Args:
      tx: the optimizer.
      params: the parameters, or their shapes and dtypes.
      tables: numbers of those leaves that would be updated by rows.
      owners: per leaf of the optimizer's state the leaf of ``params`` that it is of.
      hashed: those of ``tables`` that have no size of their own.

    Raises:
      Exception: whatever the optimizer raises on such arrays.
    """
    by_size = frozenset(tables) - frozenset(hashed)
    if not looks_at_sizes(tx, params, by_size):
        by_size = frozenset()
    elif not hashed:
        return RowUpdate(by_size=by_size)
    start, grads = _small(params, tables)
    leaves, tree = jax.tree.flatten((start, tx.init(start)))
    places = range(len(jax.tree.leaves(params)))
    leaf_owners = [*places, *owners]
    trial = _Trial.of(tx, tree, leaves, grads, [n in tables for n in leaf_owners])
    numbers = trial.numbers
    whole, zeros, garbage = leaves, leaves, leaves
    held_back: set[int | None] = set()
    nothing = _touching(grads, tables, [])
    for number, row_numbers in enumerate(_TOUCHED):
        ids = np.array([*row_numbers, _ROWS], np.int32)
        here = _touching(grads, tables, row_numbers)
        without, whole = trial.step(whole, nothing), trial.step(whole, here)
        if number:  # a learning rate may be 0 at first
            changed = [n for n in numbers if not _close(whole[n], without[n])]
            parameters = {n for n in changed if n in places}
            held_back |= {leaf_owners[n] for n in changed} - parameters
        zeros = trial.by_rows(zeros, here, ids, 0.0)
        garbage = trial.by_rows(garbage, here, ids, _GARBAGE)
    same = {n: _close(whole[n], zeros[n]) for n in numbers if n in places}
    others = all(ok for n, ok in same.items() if n not in tables)
    movers = by_size | {leaf_owners[n] for n in trial.moved()}
    return RowUpdate(
        exact=frozenset(n for n in tables if others and same[n] and n not in movers),
        reads_padding=not all(_close(zeros[n], garbage[n]) for n in numbers),
        held_back=frozenset(n for n in tables if n in held_back),
        by_size=by_size,
    )


def looks_at_sizes(tx: CalledOptimizer, params: Any, tables: Collection[int]) -> bool:
    """Whether an optimizer would compute something else if tables had few rows.

    Args:
      tx: the optimizer.
      params: the parameters, or their shapes and dtypes.
      tables: numbers of those leaves that are tables.

    Example:
      >>> def is_large(params):
      ...     return jax.tree.map(lambda x: len(x) > 99, params)
      >>> tx = CalledOptimizer(optax.masked(optax.sgd(0.1), is_large))
      >>> [looks_at_sizes(tx, [jnp.zeros((n, 2))], {0}) for n in (50, 200)]
      [False, True]
    """
    if not tables:
        return False
    leaves, tree = jax.tree.flatten(params)
    rows = [(len(_TOUCHED[0]), *x.shape[1:]) for x in leaves]
    few = [
        jax.ShapeDtypeStruct(shape, x.dtype) if n in tables else x
        for n, (x, shape) in enumerate(zip(leaves, rows, strict=True))
    ]

    def update(*leaves: Any) -> list[Any]:
        params = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(_update_of(tx)(params, tx.init(params), params))

    small = jax.tree.leaves(_small(params, tables)[0])
    whole, by_rows, sample = (
        FlatUpdate.traced(update, values) for values in (leaves, few, small)
    )
    # A number may hang on the columns, of which an array that is tried has fewer.
    return whole.operations(numbers=True) != by_rows.operations(
        numbers=True
    ) or whole.operations(numbers=False) != sample.operations(numbers=False)


@final
@dataclass(frozen=True, slots=True)
class _Trial:
    """An optimizer on small arrays: a step of whole tables, and one of some rows.

    Leaves are those of the parameters, then those of the state.

    Attributes:
      of_table: per leaf whether it is a table, or the state of one.
      gradients: positions of the gradients of tables among all operands.
      numbers: the leaves that a step computes. Others are the same by rows as of the
        whole, as nothing of a table goes into them.
      whole: the update of whole tables.
      run: computes these leaves.
      run_rows: likewise, of rows.
    """

    of_table: Sequence[bool]
    gradients: Sequence[int]
    numbers: Sequence[int]
    whole: FlatUpdate
    run: Any
    run_rows: Any

    @classmethod
    def of(
        cls,
        tx: CalledOptimizer,
        tree: Any,
        leaves: Sequence[Any],
        grads: Any,
        of_table: Sequence[bool],
    ) -> "_Trial":
        """Returns the trial of an optimizer.

        Args:
          tx: the optimizer.
          tree: of (parameters, state).
          leaves: their leaves.
          grads: of the parameters.
          of_table: per leaf whether it is a table, or the state of one.
        """
        grad_leaves, grad_tree = jax.tree.flatten(grads)
        step_of = _update_of(tx)
        every = [*of_table, *of_table[: len(grad_leaves)]]

        def update(*operands: Any) -> list[Any]:
            *values, loss = operands
            params, state = jax.tree.unflatten(tree, values[: len(leaves)])
            gradients = jax.tree.unflatten(grad_tree, values[len(leaves) :])
            return jax.tree.leaves(step_of(params, state, gradients, loss))

        def rows_of(operands: Sequence[Any], ids: Any, fill: Any) -> list[Any]:
            cut = operands[: len(leaves)], operands[len(leaves) :]
            rest = of_table[: len(grad_leaves)]
            return [
                *_rows_of({True}, cut[0], of_table, ids, fill),
                *_rows_of({True}, cut[1], rest, ids, jnp.float32(0)),
            ]

        operands, value = [*leaves, *grad_leaves], jnp.float32(1)
        count = len(_TOUCHED[0]) + 1
        rows = [
            jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) if is_of_table else x
            for x, is_of_table in zip(operands, every, strict=True)
        ]
        whole = FlatUpdate.traced(update, [*operands, value])
        by_rows = FlatUpdate.traced(update, [*rows, value])
        tables = [n for n, is_of_table in enumerate(every) if is_of_table]
        numbers = followed([whole, by_rows], tables)
        if not whole.computes_alike(
            by_rows, sorted({*range(len(leaves))} - {*numbers})
        ):
            numbers = list(range(len(leaves)))
        step, rows_step = whole.of(numbers), by_rows.of(numbers)

        def run(leaves: Sequence[Any], grads: Any) -> list[Any]:
            return step([*leaves, *jax.tree.leaves(grads), value])

        def run_rows(leaves: Sequence[Any], grads: Any, ids: Any, fill: Any) -> Any:
            operands = [*leaves, *jax.tree.leaves(grads)]
            new = rows_step([*rows_of(operands, ids, fill), value])
            return [
                leaves[n].at[ids].set(x, mode="drop") if every[n] else x
                for n, x in zip(numbers, new, strict=True)
            ]

        gradients = [n for n in tables if n >= len(leaves)]
        both = jax.jit(run), jax.jit(run_rows)
        return cls(of_table, gradients, numbers, whole, *both)

    def step(self, leaves: Sequence[Any], grads: Any) -> list[Any]:
        """Returns the leaves after a step."""
        return self._with(leaves, self.run(leaves, grads))

    def by_rows(
        self, leaves: Sequence[Any], grads: Any, ids: Any, fill: float
    ) -> list[Any]:
        """Returns the leaves after a step of some rows.

        Args:
          leaves: before it.
          grads: of whole tables.
          ids: of the rows; those that are not there are padding.
          fill: what stands for rows that are not there.
        """
        return self._with(leaves, self.run_rows(leaves, grads, ids, jnp.float32(fill)))

    def _with(self, leaves: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        changed = dict(zip(self.numbers, new, strict=True))
        return [changed.get(n, leaf) for n, leaf in enumerate(leaves)]

    def moved(self) -> set[int]:
        """Returns leaves of tables that may change though the gradient is zeros."""
        mine = [n for n, is_of_table in enumerate(self.of_table) if is_of_table]
        return set(mine) - unchanged_operands(self.whole, mine, self.gradients)


def unchanged_operands(
    flat: FlatUpdate, results: Sequence[int], zeros: Collection[int]
) -> set[int]:
    """Returns which of some results are certain to be the operands of their places.

    Args:
      flat: a function of arrays.
      results: places of those that are asked for.
      zeros: places of the operands that are zeros.

    Example:
      >>> def step(n, total, g):
      ...     total = total + g * g
      ...     return jnp.where(n > 9, total, 0 * n), total, g
      >>> flat = FlatUpdate.traced(step, [1.0, 2.0, 3.0])
      >>> unchanged_operands(flat, range(3), zeros=[2])
      {1, 2}
    """
    jaxpr = flat.slice(results)
    facts = [_Is(zero=n in zeros, same=n) for n in range(len(jaxpr.invars))]
    proof = _Proof([_compat.array_type(v).dtype for v in jaxpr.invars])
    values = proof.results(jaxpr, flat.consts, facts)
    return {
        n
        for n, value in zip(results, values, strict=True)
        if value.same == n or (value.zero and facts[n].zero)
    }


def rows_are_alone(
    tx: CalledOptimizer,
    params: Any,
    tables: Collection[int],
    owners: Sequence[int | None],
) -> frozenset[int]:
    """Returns the tables whose rows become what they would among all others.

    A state that begins, and two steps that look the same rows up: unlike ``probe``
    this says nothing of what becomes of other rows.

    Args:
      tx: the optimizer.
      params: the parameters, or their shapes and dtypes.
      tables: numbers of those leaves that would be updated by rows.
      owners: as for ``probe``.

    Example:
      >>> params = [jnp.zeros((9, 2))]
      >>> [sorted(rows_are_alone(CalledOptimizer(tx), params, {0}, owners))
      ...  for tx, owners in [(optax.sgd(0.1), []), (optax.lamb(0.1), [None, 0, 0])]]
      [[0], []]
    """
    start, grads = _small(params, tables)
    ids, fill = jnp.array(_TOUCHED[0], jnp.int32), jnp.float32(0)  # all are there
    places = list(range(len(jax.tree.leaves(params))))
    update = _update_of(tx)

    def trained(params: Any, state: Any, grads: Any) -> Any:
        return update(*update(params, state, grads), grads)[0]

    def rows_of(tree: Any, numbers: Sequence[int | None]) -> Any:
        return _rows_of(tables, tree, numbers, ids, fill)

    state, touching = tx.init(start), _touching(grads, tables, _TOUCHED[0])
    whole = rows_of(jax.jit(trained)(start, state, touching), places)
    parts = rows_of(start, places), rows_of(state, owners), rows_of(touching, places)
    alone = jax.jit(trained)(*parts)
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True)
    same = [_close(a, b) for a, b in pairs]
    others = all(ok for n, ok in enumerate(same) if n not in tables)
    return frozenset(n for n in tables if others and same[n])


def _update_of(tx: CalledOptimizer) -> Callable[..., Any]:
    """Returns a step: of (parameters, state, gradients, loss) the new ones."""

    def update(params: Any, state: Any, grads: Any, value: Any = 1.0) -> Any:
        value = jnp.asarray(value, jnp.float32)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return update


def _rows_of(
    tables: Collection[int],
    tree: Any,
    numbers: Sequence[int | None],
    ids: Any,
    fill: Any,
) -> Any:
    """Returns a tree of which the leaves of tables have these rows alone."""
    leaves = [
        _take(x, ids, fill) if n in tables else x
        for n, x in zip(numbers, jax.tree.leaves(tree), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


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
        np.asarray(x) * keep.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
        if n in tables
        else x
        for n, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, leaves)


def _close(a: Any, b: Any) -> bool:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return bool(np.allclose(x, y, rtol=1e-5, atol=1e-7, equal_nan=True))


# Proof from a jaxpr that zero gradients leave rows unchanged.
#
# An optimizer may update rows alone if it leaves those without a gradient as they are,
# in every step that will ever come. A few steps that are tried cannot tell: a schedule
# may begin to decay later, and accumulated gradients may be applied later. The jaxpr is
# all steps at once.


# Zero where the first operand is, and where all are.
_FIRST = {
    *("abs", "asin", "asinh", "atan", "atanh", "broadcast_in_dim", "cbrt", "ceil"),
    *("conj", "copy", "copy_p", "cumsum", "div", "dynamic_slice", "erf", "expand_dims"),
    *("expm1", "floor", "gather", "imag", "log1p", "neg", "real", "reduce_max"),
    *("reduce_min", "reduce_or", "reduce_precision", "reduce_sum", "rem", "reshape"),
    *("rev", "round", "sign", "sin", "sinh", "slice", "sort", "sqrt", "square"),
    *("squeeze", "stop_gradient", "tan", "tanh", "transpose", "convert_element_type"),
}
_ALL = {"add", "add_any", "concatenate", "max", "min", "or", "sub", "clamp", "pad"}
_ANY = {"and", "dot_general", "mul"}
_SAME = {"copy", "copy_p", "reduce_precision", "stop_gradient"}
_MOST_KNOWN = 4096


@final
@dataclass(frozen=True, slots=True)
class _Is:
    """What is known of a value.

    Attributes:
      zero: all of it is zero.
      same: it has the numbers of this operand of the function; -1: nobody knows.
      value: its value, if it is a small constant.
    """

    zero: bool = False
    same: int = -1
    value: Any = None


_ANYTHING = _Is()
_Env: TypeAlias = dict[Var, _Is]


@final
@dataclass(frozen=True, slots=True)
class _Proof:
    dtypes: Sequence[Any]

    def results(
        self, jaxpr: Jaxpr, consts: Sequence[Any], facts: Sequence[_Is]
    ) -> list[_Is]:
        env: _Env = dict(zip(jaxpr.invars, facts, strict=True))
        env.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        for equation in jaxpr.eqns:
            values = [_of(env, atom) for atom in equation.invars]
            outputs = self._equation(equation, values)
            env.update(zip(equation.outvars, outputs, strict=True))
        return [_of(env, atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Equation, values: list[_Is]) -> list[_Is]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name == "cond":
            return self._branches(equation, values)
        if name == "optimization_barrier":
            return values
        constant = _folded(equation, values)
        if constant is not None:
            return constant
        if count != 1:
            return [_ANYTHING] * count
        return [_Is(_is_zero(name, values, equation), self._same(equation, values))]

    def _branches(self, equation: Equation, values: list[_Is]) -> list[_Is]:
        columns = [
            self.results(
                _compat.open_jaxpr(body), getattr(body, "consts", ()), values[1:]
            )
            for _, body in _compat.inner_jaxprs(equation)
        ]
        return [_either(column) for column in zip(*columns, strict=True)]

    def _same(self, equation: Equation, values: list[_Is]) -> int:
        name, first = equation.primitive.name, values[0].same if values else -1
        out = _compat.array_type(equation.outvars[0])
        shapes = [_compat.array_type(v).shape for v in equation.invars]
        if name == "select_n":
            return _either(values[1:]).same
        if name in _SAME:
            return first
        if name == "convert_element_type" and first >= 0:
            holds_all = jnp.promote_types(self.dtypes[first], out.dtype) == out.dtype
            return first if holds_all else -1
        if name in {"add", "add_any", "sub"}:
            sums = [(values[0], values[1], shapes[0])]
            if name != "sub":
                sums.append((values[1], values[0], shapes[1]))
            for value, other, shape in sums:
                if other.zero and shape == out.shape:
                    return value.same
        return -1


def _of(env: _Env, atom: Atom) -> _Is:
    return _constant(atom.val) if isinstance(atom, Literal) else env[atom]


def _constant(value: Any) -> _Is:
    is_array = isinstance(value, np.ndarray | np.generic | int | float | complex)
    array = np.asarray(value) if is_array or hasattr(value, "__array__") else None
    if array is None or array.size > _MOST_KNOWN or array.dtype == object:
        return _ANYTHING
    return _Is(zero=not array.any(), value=array)


def _folded(equation: Equation, values: list[_Is]) -> list[_Is] | None:
    """Returns the results of an operation on small constants, if it is one."""
    sizes = [_compat.array_type(v).size for v in equation.outvars]
    if (
        equation.effects
        or not values
        or any(v.value is None for v in values)
        or max(sizes, default=0) > _MOST_KNOWN
        or any(_compat.inner_jaxprs(equation))
    ):
        return None
    results = _compat.run_equation(equation, [v.value for v in values])
    return [_constant(np.asarray(result)) for result in results]


def _is_zero(name: str, values: list[_Is], equation: Equation) -> bool:
    zeros = [value.zero for value in values]
    if name == "select_n":
        return all(zeros[1:])
    if name == "integer_pow":
        return zeros[0] and equation.params["y"] > 0
    if name in {"max", "min"} and any(zeros):
        # Clipping to a range that has zero in it.
        other = values[1 - zeros.index(True)].value
        if other is not None:
            return bool((other <= 0).all() if name == "max" else (other >= 0).all())
    return bool(
        (name in _FIRST and zeros[0])
        or (name in _ALL and all(zeros))
        or (name in _ANY and any(zeros))
    )


def _either(values: Sequence[_Is]) -> _Is:
    same = {value.same for value in values}
    return _Is(
        zero=all(value.zero for value in values),
        same=same.pop() if len(same) == 1 else -1,
    )
