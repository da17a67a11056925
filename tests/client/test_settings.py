"""JAX's settings: those that change what a program means belong to the program."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client.session import Session
from jgraph.errors import GraphError
from jgraph.graph.device import device
from jgraph.graph.tracing.function import Function, function
from jgraph.graph.variable import Variable

WIDE = ("float64", "int64", "uint64", "complex128")
# Needs more bits than a 32-bit type has.
FINE = 2**40 + 1


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bit_values_pass_tasks_that_were_not_set_to_have_them(
    session: Session, dtype: str
) -> None:
    with jax.enable_x64(True):
        w = Variable("w", jnp.full((3, 2), FINE, dtype), device="/job:ps/task:0")

        @function
        def step(x: Any, ids: Any) -> Any:
            w[...] = w[...] + x
            w[ids] = w[ids] * 3
            with device("/job:worker/task:1"):
                return w[...] + x, w[ids].sum()

        ids = np.array([0, 2])
        whole, rows = session.run(step, np.ones((3, 2), dtype), ids)
        value = np.full((3, 2), FINE, dtype) + 1
        value[ids] *= 3
        assert whole.dtype == rows.dtype == dtype
        assert whole.tolist() == (value + 1).tolist()
        assert rows == value[ids].sum()
        assert session.read([w])["w"].tolist() == value.tolist()


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bit_variables_are_read_and_written_by_whoever_has_them(
    session: Session, dtype: str
) -> None:
    with jax.enable_x64(True):
        w = Variable("w", jnp.full((3,), FINE, dtype), device="/job:ps/task:0")
    session.initialize([w])
    assert session.read([w])["w"].tolist() == [FINE] * 3
    session.write({w: np.full(3, FINE + 1, dtype)})
    assert session.snapshot([w])["w"].tolist() == [FINE + 1] * 3
    session.write({w: [FINE, FINE, 2]})
    assert session.read([w])["w"].tolist() == [FINE, FINE, 2]
    with pytest.raises(GraphError, match=rf"'w' is {dtype}, .*jax_enable_x64"):
        session.run(lambda: w[...] * 2)


def test_callable_keeps_the_types_that_it_was_made_for(session: Session) -> None:
    with jax.enable_x64(True):
        third = session.make_callable(lambda x: x / 3, 1.0)
        given = jnp.ones(()) * FINE
    for value in (float(FINE), np.float64(FINE), np.array(float(FINE)), given):
        assert third(value) == pytest.approx(FINE / 3, rel=1e-14)


def test_sizes_that_are_names_and_64_bit_types_go_together(session: Session) -> None:
    @function(symbolic="n")
    def total(x: Any) -> Any:
        return x.sum()

    with jax.enable_x64(True):
        for n in (1, 4):
            assert session.run(total, np.full(n, FINE)) == n * FINE


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "generator": lambda: jax.default_prng_impl("rbg"),
    "threefry": lambda: jax.threefry_partitionable(False),
    "reuse of keys": lambda: jax.debug_key_reuse(True),
    "check for NaN": lambda: jax.debug_nans(True),
    "check for infinity": lambda: jax.debug_infs(True),
    "leaks": jax.checking_leaks,
    "default device": lambda: jax.default_device(jax.devices()[0]),
    "names of compilations": lambda: jax.log_compiles(False),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_function_is_traced_anew_where_jit_would(setting: str) -> None:
    traced: list[None] = []

    def step(x: Any) -> Any:
        traced.append(None)
        return x * 2

    def traces(call: Any) -> int:
        traced.clear()
        call(np.ones(2, np.float32))
        with SETTINGS[setting]():
            call(np.ones(2, np.float32))
        call(np.ones(2, np.float32))
        return len(traced)

    assert traces(Function(step).trace) >= traces(jax.jit(step))


@pytest.mark.parametrize("setting", ["generator", "threefry", "x64", "dtype promotion"])
def test_what_a_function_computes_follows_the_settings(
    session: Session, setting: str
) -> None:
    @function
    def draw(scale: Any) -> Any:
        return jax.random.normal(jax.random.key(3), (5,)) * scale

    def both() -> None:
        scale = np.full(5, 3, np.float32)
        due = draw(scale)  # jit would keep the draw of another generator
        got = session.run(draw, scale)
        assert got.dtype == due.dtype
        np.testing.assert_allclose(got, due, rtol=1e-6)

    for context in (nullcontext, SETTINGS[setting], nullcontext):
        with context():
            both()


def test_precision_of_products_is_that_of_the_setting() -> None:
    product = Function(lambda x: x @ x)
    plain = product.graph(np.ones((2, 2), np.float32))
    with jax.default_matmul_precision("highest"):
        exact = product.graph(np.ones((2, 2), np.float32))
    assert "HIGHEST" not in str(plain.jaxpr)
    assert "HIGHEST" in str(exact.jaxpr)


def test_variable_that_is_bound_anew_gives_its_new_initial_value(
    session: Session,
) -> None:
    w = Variable("w", jnp.ones(2), device="/job:ps/task:0")

    @function
    def read() -> Any:
        return w[...]

    assert session.run(read).tolist() == [1, 1]
    w = Variable("w", jnp.full(3, 5.0), device="/job:ps/task:1")
    session.reset()
    assert session.run(read).tolist() == [5, 5, 5]
    session.reset()
    w = Variable("w", jnp.full(3, 7.0), device="/job:ps/task:1")
    again = Session(session._cluster)
    assert again.run(read).tolist() == [7, 7, 7]
    assert read.traces == 1


class _Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.traced = 0

    def times(self, x: Any) -> Any:
        self.traced += 1
        return x * self.scale


def test_method_is_traced_once_per_object(session: Session) -> None:
    one, other = _Scaled(2.0), _Scaled(3.0)
    for _ in range(3):
        assert session.run(one.times, 1.0) == 2
        assert session.run(other.times, 1.0) == 3
    assert one.traced == other.traced == 1
    assert len(session._programs) == 2


def test_steps_of_functions_that_are_gone_are_taken_back(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jgraph.client.prepared_step.MAX_PLAIN", 2)
    for n in range(6):
        session.run(lambda x, n=n: x + n, 1.0)
        session.run(function(lambda x, n=n: x * n), 1.0)
    gc.collect()
    kept = session.make_callable(lambda x: x - 1, 1.0)
    session.run(lambda x: x - 2, 1.0)
    assert len(session._programs) <= 5
    for n in range(3):
        session.run(lambda x, n=n: x + n, 1.0)
    assert kept(5.0) == 4
