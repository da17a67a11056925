"""Loops that only read variables run anywhere; loops that write stay with them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pytest

from jgraph import _compat
from jgraph.graph.graph import Graph
from jgraph.graph.variable import Variable

Same: TypeAlias = Callable[..., Graph]
X = jnp.arange(3.0)


def loops_with_refs(graph: Graph) -> int:
    return sum(
        any(_compat.is_ref(v.aval) for v in e.invars)
        for e in graph.equations
        if next(_compat.inner_jaxprs(e), None) is not None
    )


def _scan(w: Variable, v: Variable, x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, a: (c + (w[...] * a).sum() * v[0], c), 0.0, x)


def _cond(w: Variable, v: Variable, x: jax.Array) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda: w[...] + v[...], lambda: w[...] * 2)


def _while(w: Variable, v: Variable, x: jax.Array) -> Any:
    return jax.lax.while_loop(lambda s: s.sum() < v[2], lambda s: s + w[...] + 1, x)


def _nested(w: Variable, v: Variable, x: jax.Array) -> Any:
    return jax.lax.map(lambda a: jax.lax.map(lambda b: w[b] * a, jnp.arange(3)), v[...])


@pytest.mark.parametrize("loop", [_scan, _cond, _while, _nested])
def test_loop_that_only_reads_takes_values_instead_of_refs(
    loop: Callable[..., Any], same: Same
) -> None:
    w, v = Variable("w", X), Variable("v", X)

    def step(x: jax.Array) -> Any:
        w[...] = w[...] + 1
        result = loop(w, v, x)
        w[...] = w[...] + 1
        return result

    graph = same(step, {w: X, v: X * 50}, X)
    assert loops_with_refs(graph) == 0


def test_gradient_of_a_loop_that_reads_is_the_gradient(same: Same) -> None:
    w, v = Variable("w", X), Variable("v", X)

    def step(x: jax.Array) -> Any:
        return jax.grad(lambda y: _scan(w, v, y)[0])(x)

    assert loops_with_refs(same(step, {w: X, v: X + 1}, X)) == 0


def test_loop_that_writes_keeps_its_refs(same: Same) -> None:
    w, v = Variable("w", X), Variable("v", X)

    def step(x: jax.Array) -> Any:
        def body(c: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
            w[...] = w[...] + v[...] * a
            return c + 1, a

        return jax.lax.scan(body, 0, x)

    assert loops_with_refs(same(step, {w: X, v: X}, X)) == 1


def test_row_writes_under_a_condition_are_kept(same: Same) -> None:
    w = Variable("w", X)

    def step(x: jax.Array) -> Any:
        def then() -> None:
            w[jnp.array([0, 2])] = x[:2]

        jax.lax.cond(x.sum() > 0, then, lambda: None)
        return w[...]

    same(step, {w: X}, X + 1)
    same(step, {w: X}, -X)
