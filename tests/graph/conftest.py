"""What a traced function means without a graph: the reference of these tests."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest

from jgraph.graph.check import check
from jgraph.graph.graph import Graph, eval_graph
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import _BINDING, Variable

Values: TypeAlias = Mapping[Variable, Any]
Plain: TypeAlias = Callable[..., tuple[Any, dict[Variable, Any]]]
Same: TypeAlias = Callable[..., Graph]

_MANY = 50


def run_plain(
    fn: Callable[..., Any], values: Values, *args: Any
) -> tuple[Any, dict[Variable, Any]]:
    """Runs ``fn`` with a real Ref per variable; returns (result, new values)."""
    refs = {v: jax.new_ref(x) for v, x in values.items()}
    token = _BINDING.set(refs.__getitem__)
    try:
        result = fn(*args)
    finally:
        _BINDING.reset(token)
    return result, {v: jax.freeze(ref) for v, ref in refs.items()}


def assert_same(fn: Callable[..., Any], values: Values, *args: Any) -> Graph:
    """Checks that the graph of ``fn`` means what ``fn`` does; returns the graph."""
    graph, variables = function(fn).trace(*args)
    check(graph)

    def plain(state: list[Any], args: Any) -> tuple[Any, list[Any]]:
        result, after = run_plain(fn, dict(zip(values, state, strict=True)), *args)
        return result, list(after.values())

    def evaluated(state: list[Any], feeds: list[Any]) -> Any:
        return eval_graph(graph, state, feeds)

    if len(graph.jaxpr.eqns) > _MANY:
        # As one program: to compile each operation by itself takes ten times as long.
        plain, evaluated = jax.jit(plain), jax.jit(evaluated)
    want, after = plain(list(values.values()), args)
    new_values = dict(zip(values, after, strict=True))
    have, new = evaluated([values[v] for v in variables], jax.tree.leaves((args, {})))
    assert jax.tree.structure(want) == graph.out_tree
    pairs = [*zip(jax.tree.leaves(want), have, strict=True)]
    pairs += [(new_values[v], x) for v, x in zip(variables, new, strict=True)]
    for a, b in pairs:
        assert jax.typeof(a).shape == jax.typeof(b).shape
        assert jax.typeof(a).dtype == jax.typeof(b).dtype
        np.testing.assert_allclose(_numbers(a), _numbers(b), rtol=1e-5, atol=1e-6)
    return graph


def _numbers(x: Any) -> np.ndarray[Any, Any]:
    if jax.numpy.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.asarray(x)
    # numpy's own kinds are compared as they are, ml_dtypes' as what they stand for.
    return array.astype(np.float64) if array.dtype.kind == "V" else array


@pytest.fixture(scope="session")
def same() -> Same:
    return assert_same


@pytest.fixture(scope="session")
def plain() -> Plain:
    return run_plain
