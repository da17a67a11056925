"""Segments of rows give the same however much padding they are run with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph import _compat
from jgraph._compat import Var
from jgraph.graph.tracing.inline import inline_calls
from jgraph.plan.lowering.by_count import find_counts, open_types, run
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.row_values import LEAST_ROWS, at_level, rows_at

MOST, WIDTH = 96, 3
ROWS = jax.ShapeDtypeStruct((MOST, WIDTH), jnp.float32)

Step = Callable[..., Any]


def adagrad(rows: Any, sums: Any, grads: Any) -> Any:
    sums = sums + grads * grads
    return rows - 0.1 * grads / jnp.sqrt(sums + 1e-7), sums


def clipped(rows: Any, sums: Any, grads: Any) -> Any:
    norm = jnp.sqrt(jnp.sum(grads**2))
    return rows - grads / jnp.maximum(norm, 1.0), sums


def normed_rows(rows: Any, sums: Any, grads: Any) -> Any:
    length = jnp.linalg.norm(rows, axis=1, keepdims=True)
    return rows - length * grads, sums.T[:, : len(sums)].T


def weighted(rows: Any, sums: Any, grads: Any) -> Any:
    place = jnp.arange(MOST, dtype=jnp.float32)[:, None]
    return rows - jnp.where(place < 5, grads, 2 * grads) * jnp.ones((MOST, WIDTH)), sums


def projected(rows: Any, sums: Any, grads: Any) -> Any:
    return rows - grads @ jnp.eye(WIDTH), jnp.flip(sums, axis=1)


def mean_of_all(rows: Any, sums: Any, grads: Any) -> Any:
    return rows - jnp.mean(jnp.exp(grads)), sums


def scaled_mean(rows: Any, sums: Any, grads: Any) -> Any:
    return rows - jnp.sum(jnp.exp(grads) * jnp.sum(grads**2)), sums


def largest_of_all(rows: Any, sums: Any, grads: Any) -> Any:
    return rows - jnp.max(grads, axis=0), sums


def sorted_rows(rows: Any, sums: Any, grads: Any) -> Any:
    return rows - jnp.sort(grads, axis=0), sums


def looped(rows: Any, sums: Any, grads: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, r: r - grads, rows), sums


def jaxpr_of(step: Step) -> tuple[Any, dict[Var, Var]]:
    """Returns a flat jaxpr, and its operands as rows of one array of ids."""
    jaxpr, consts, _ = _compat.make_jaxpr(step, ROWS, ROWS, ROWS)
    flat = inline_calls(jaxpr, consts).jaxpr
    ids = _compat.new_var(jax.core.ShapedArray((MOST,), jnp.dtype("int32")))
    return flat, dict.fromkeys(flat.invars, ids)


def numbers(count: int) -> list[np.ndarray[Any, Any]]:
    """Returns rows, sums and gradients: ``count`` rows, then zeros."""
    rng = np.random.default_rng(count)
    arrays = [np.zeros((MOST, WIDTH), np.float32) for _ in range(3)]
    for array in arrays:
        array[:count] = rng.uniform(0.5, 1.5, (count, WIDTH))
    return arrays


BY_ROWS = [adagrad, clipped, normed_rows, weighted, projected]
MIXED = [mean_of_all, scaled_mean, largest_of_all, sorted_rows, looped]


@pytest.mark.parametrize("step", BY_ROWS)
def test_rows_that_are_there_are_changed_as_with_all_padding(step: Step) -> None:
    jaxpr, given = jaxpr_of(step)
    counts = find_counts(jaxpr, given, ())
    assert set(jaxpr.invars) <= set(counts)
    for count in (1, 40, MOST):
        args = numbers(count)
        wanted = jax.core.eval_jaxpr(jaxpr, (), *args)
        found = run(jaxpr, counts, [a[:count] for a in args])
        for a, b in zip(found, wanted, strict=True):
            assert len(a) == count
            np.testing.assert_allclose(a, np.asarray(b)[:count], rtol=1e-6)


@pytest.mark.parametrize("step", BY_ROWS)
def test_the_number_of_rows_is_open_in_what_is_exported(step: Step) -> None:
    jaxpr, given = jaxpr_of(step)
    counts = find_counts(jaxpr, given, ())
    args = open_types([ROWS] * 3, [counts[v].ids for v in jaxpr.invars])
    exported = jax.export.export(jax.jit(lambda *a: run(jaxpr, counts, a)))(*args)
    assert [str(aval.shape) for aval in exported.in_avals] == [f"(rows0, {WIDTH})"] * 3
    few = [a[:7] for a in numbers(7)]
    for a, b in zip(exported.call(*few), run(jaxpr, counts, few), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("step", MIXED)
def test_what_depends_on_the_padding_keeps_it(step: Step) -> None:
    assert find_counts(*jaxpr_of(step), ()) == {}


def test_rows_that_leave_the_segment_keep_their_padding() -> None:
    jaxpr, given = jaxpr_of(adagrad)
    assert find_counts(jaxpr, given, jaxpr.outvars[:1]) == {}


def test_few_rows_are_always_padded() -> None:
    few = jax.ShapeDtypeStruct((LEAST_ROWS, WIDTH), jnp.float32)
    jaxpr, _, _ = _compat.make_jaxpr(lambda x: -x, few)
    assert find_counts(jaxpr, {jaxpr.invars[0]: jaxpr.invars[0]}, ()) == {}


@given(st.integers(2 * LEAST_ROWS, 100_000), st.data())
def test_a_size_has_room_and_is_at_most_about_twice_what_is_needed(
    most: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, most))
    type_ = ValueType((most, WIDTH), "float32", ragged=True)
    sizes = [rows_at(level, most) for level in range(40)]
    assert sizes == sorted(sizes, reverse=True)
    assert len({size for size in sizes if size >= LEAST_ROWS}) <= most.bit_length()
    fitting = min(size for size in sizes if size >= max(count, LEAST_ROWS))
    assert fitting <= max(2 * LEAST_ROWS, 9 / 4 * count) + 1
    assert at_level(type_, 1).shape == (sizes[1], WIDTH)
    assert at_level(ValueType((most,), "int32"), 1).shape == (most,)
