"""Operations and memory of equations, counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jgraph.graph.cost import flops_of_all, peak_nbytes

X = jnp.ones((4, 8))


def count(fn: Any, *args: Any) -> float:
    return flops_of_all(jax.make_jaxpr(fn)(*args).eqns)


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (lambda x, y: x @ y, (X, X.T), 2 * 4 * 8 * 4),
        (jnp.tanh, (X,), 32),
        (lambda x: x.sum(), (X,), 32),
        (lambda x: x.T.reshape(-1)[2:], (X,), 0),
        (lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=5)[0], (X,), 160),
        (lambda x: jax.lax.cond(True, lambda: x + x * x, lambda: x), (X,), 64),
        (jax.jit(lambda x: x + 1), (X,), 32),
        (jax.checkpoint(lambda x: x + 1), (X,), 32),
    ],
)
def test_operations_are_counted(fn: Any, args: Any, flops: float) -> None:
    assert count(fn, *args) == pytest.approx(flops, abs=2)


def test_a_batched_product_counts_its_batch() -> None:
    a, b = jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))
    assert count(lambda a, b: a @ b, a, b) == 2 * 3 * 4 * 5 * 6


def test_a_convolution_counts_its_window_and_features() -> None:
    image, kernel = jnp.ones((1, 2, 8, 8)), jnp.ones((3, 2, 3, 3))

    def conv(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")

    assert count(conv, image, kernel) == 2 * (3 * 8 * 8) * (2 * 3 * 3)


def test_memory_is_that_of_the_values_alive_together() -> None:
    def chain(x: Any) -> Any:
        for _ in range(10):
            x = jnp.sin(x)
        return x

    def kept(x: Any) -> Any:
        made = [jnp.sin(x + n) for n in range(10)]
        return sum(made)

    x = jnp.ones(1000)
    assert peak_nbytes(jax.make_jaxpr(chain)(x).eqns) == 2 * 4000
    assert peak_nbytes(jax.make_jaxpr(kept)(x).eqns) > 10 * 4000
