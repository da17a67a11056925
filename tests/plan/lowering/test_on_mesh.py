"""How the values of a segment lie on the devices of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgraph as jg
from jgraph.plan.lowering.on_mesh import laid_out

MESH = jg.mesh(data=2, model=2)
W = jax.ShapeDtypeStruct((4, 8), "float32")


def lie(x: Any, *axes: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*axes)))


def specs(fn: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """Returns the specs of the arguments and the results of ``fn``."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    arguments, results = (
        [found.spec for found in laid_out(values, jaxpr, MESH, ())]
        for values in (jaxpr.invars, jaxpr.outvars)
    )
    return arguments, results


def test_a_constraint_says_it_of_what_it_takes_and_gives() -> None:
    assert specs(lambda w: lie(w, "data", "model"), W) == (
        [P("data", "model")],
        [P("data", "model")],
    )


def test_what_follows_element_by_element_lies_alike() -> None:
    def update(w: Any, m: Any, x: Any) -> Any:
        gradient = x.T @ (x @ lie(w, None, "model"))
        m = 0.9 * m + gradient
        return w - 0.1 * m.astype(jnp.float32), m

    columns = P(None, "model")
    arguments, results = specs(update, W, W, jax.ShapeDtypeStruct((3, 4), "float32"))
    assert arguments == [columns, columns, P()]
    assert results == [columns, columns]


def test_each_value_takes_the_nearest_constraint() -> None:
    def two(a: Any, b: Any) -> Any:
        return lie(a, "data") + lie(b, None, "model")

    assert specs(two, W, W)[0] == [P("data"), P(None, "model")]


@pytest.mark.parametrize(
    ("shape", "axes", "wanted"),
    [
        ((3, 8), ("data", "model"), P(None, "model")),
        ((8, 2), (("data", "model"),), P(("data", "model"))),
        ((6, 2), (("data", "model"),), P(None)),
        ((4, 2), (P.UNCONSTRAINED, "model"), P(None, "model")),
    ],
)
def test_what_does_not_divide_among_the_devices_is_whole(
    shape: tuple[int, ...], axes: Any, wanted: Any
) -> None:
    value = jax.ShapeDtypeStruct(shape, "float32")
    assert specs(lambda w: lie(w, *axes) * 2, value)[0] == [wanted]


def test_a_size_that_is_a_name_is_not_cut() -> None:
    value = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 8"), "float32")
    assert specs(lambda x: lie(x, "data", "model"), value)[0] == [P(None, "model")]


def test_what_shard_map_takes_lies_as_it_says() -> None:
    @jax.shard_map(mesh=MESH, in_specs=(P("data"), P()), out_specs=P("data"))
    def each(x: Any, y: Any) -> Any:
        return x + y[:2]

    assert specs(each, W, W) == ([P("data"), P()], [P("data")])


def test_constraints_over_another_mesh_and_numbers_change_nothing() -> None:
    other = NamedSharding(jg.mesh(rows=4), P("rows"))

    def fn(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, other) + lie(jnp.float32(1)), 3.0

    assert specs(fn, W) == ([P()], [P(), P()])
