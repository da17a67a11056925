"""What operations ask of a processor."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

from jgraph.graph.sizes import ASSUMED_SIZE
from jgraph.plan.auto.work import Work, work_of

X = jnp.ones((64, 64))


def work(fn: Callable[..., Any], *args: Any) -> Work:
    jaxpr = jax.make_jaxpr(fn)(*args)
    return work_of(jaxpr.eqns, jaxpr.jaxpr.outvars)


def test_a_product_counts_two_operations_per_element_of_its_inner_axis() -> None:
    found = work(jnp.dot, X, X)
    assert found.flops == 2 * 64**3
    assert found.nbytes == 3 * X.nbytes


def test_what_only_the_next_elementwise_operation_takes_is_not_in_memory() -> None:
    assert work(lambda x: (x + 1) * 2 - 3, X).nbytes == 2 * X.nbytes
    assert work(lambda x: (x + 1) * 2 - 3, X).kernels == 1


def test_a_value_that_others_take_is_written() -> None:
    def both(x: Any) -> Any:
        y = x + 1
        return y, y * 2

    assert work(both, X).nbytes == 4 * X.nbytes


def test_a_sum_takes_what_it_adds_from_the_operation_before() -> None:
    assert work(lambda x: jnp.sum(x * x), X).nbytes == X.nbytes + 4


def test_exponentials_are_counted_apart() -> None:
    found = work(lambda x: jnp.exp(x) + 1, X)
    assert (found.slow, found.elements) == (X.size, X.size)


def test_a_scan_is_its_body_as_often_as_it_runs() -> None:
    def turns(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=10)[0]

    assert work(turns, X).flops == 10 * work(jnp.dot, X, X).flops


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.lax.scan(lambda c, row: (c @ row, None), jnp.eye(8), x)[0],
        lambda x: jnp.linalg.cholesky(x, symmetrize_input=False),
        lambda x: jax.lax.linalg.triangular_solve(x, x),
    ],
)
def test_a_size_that_is_a_name_counts_as_in_all_estimates(
    fn: Callable[..., Any],
) -> None:
    named = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 8, 8"), jnp.float32)
    assert work(fn, named) == work(fn, jnp.ones((ASSUMED_SIZE, 8, 8)))


def test_of_a_conditional_the_dearest_branch_counts() -> None:
    def either(x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x)

    assert work(either, X).flops == work(jnp.dot, X, X).flops


def test_taking_rows_costs_what_is_taken() -> None:
    table, ids = jnp.ones((10_000, 8)), jnp.arange(4)
    assert work(lambda t: t[ids], table).nbytes < 1_000


@pytest.mark.parametrize(
    "fn", [jnp.linalg.cholesky, lambda x: jnp.fft.fft(x[0]), jnp.sort]
)
def test_what_has_a_kernel_of_its_own_is_never_free(fn: Callable[..., Any]) -> None:
    found = work(fn, X)
    assert found.flops + found.slow > 0
    assert found.kernels >= 1


def test_work_of_turns_is_that_many_times_the_work() -> None:
    once = Work(1.0, 2.0, 3.0, 4.0, 5.0)
    assert once.times(2) == once + once
