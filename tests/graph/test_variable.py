"""Variables: what they are made from, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import (
    GraphError,
    PlacementError,
    UninitializedError,
    VariableMismatchError,
)
from jgraph.graph.device import DeviceSpec, device
from jgraph.graph.graph import eval_graph
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable, colocate_with


def test_variable_takes_shape_and_dtype_from_its_array() -> None:
    w = Variable("w", np.ones((2, 3), np.int8), device="/job:ps/task:1")
    assert (w.shape, w.dtype, str(w.device)) == ((2, 3), jnp.int8, "/job:ps/task:1")
    assert w.init is not None
    np.testing.assert_array_equal(w.init(), np.ones((2, 3), np.int8))


def test_variable_keeps_its_value_when_the_caller_changes_the_array() -> None:
    given = np.zeros(1024, np.float32)
    w = Variable("w", given)
    given += 1
    assert w.init is not None
    assert not np.asarray(w.init()).any()


def test_initial_value_by_function_is_made_only_when_asked_for() -> None:
    calls = []

    def init(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        calls.append(shape)
        return jnp.full(shape, 2, dtype)

    w = Variable("w", ((3, np.int64(4)), "bfloat16", init))
    assert calls == []
    assert (w.shape, w.dtype) == ((3, 4), jnp.bfloat16)
    assert w.init is not None
    assert w.init().dtype == jnp.bfloat16
    assert calls == [(3, 4)]


def test_variable_without_init_function_has_no_initial_value() -> None:
    assert Variable("w", ((3,), jnp.float32, None)).init is None


def test_init_function_that_makes_another_shape_is_refused() -> None:
    w = Variable("w", ((3,), "float32", lambda shape, dtype: jnp.zeros((4,), dtype)))
    assert w.init is not None
    with pytest.raises(VariableMismatchError, match=r"'w' is float32\[3\]"):
        w.init()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("", 1.0, "needs a name"),
        (" w", 1.0, "needs a name"),
        (3, 1.0, "needs a name"),
        ("w", (1, 2), "not a 2-tuple"),
        ("w", (3, "float32", None), "is not .shape, dtype"),
        ("w", ((3,), "float99", None), "is not .shape, dtype"),
        ("w", ((3.5,), "float32", None), "is not .shape, dtype"),
        ("w", ((-1,), "float32", None), "a size is below 0"),
        ("w", ((3,), "float32", 5), "5 is no function"),
        ("w", 2**80, "is not an array"),
        ("w", "text", "is not an array"),
        ("w", {"a": 1}, "is not an array"),
        ("w", None, "is not an array"),
    ],
)
def test_what_cannot_be_a_variable_says_so(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        Variable(name, value)


def test_variable_made_inside_a_trace_is_refused_with_the_reason() -> None:
    def f(x: jax.Array) -> jax.Array:
        Variable("w", x)
        return x

    with pytest.raises(GraphError, match=r"outside of jg\.function"):
        jax.jit(f)(1.0)


def test_variable_merges_the_device_scope_around_it() -> None:
    with device("/job:ps/task:2"):
        w = Variable("w", 1.0, device="/cpu:0")
    assert str(w.device) == "/job:ps/task:2/device:CPU:0"
    assert Variable("v", 1.0).device == DeviceSpec()


@pytest.mark.parametrize("use", [lambda w: w[...], lambda w: w.__setitem__(0, 1.0)])
def test_variable_outside_a_traced_function_says_how_to_use_it(use: object) -> None:
    assert callable(use)
    with pytest.raises(UninitializedError, match=r"'w'.*jg\.function"):
        use(Variable("w", jnp.zeros(3)))


def test_variable_cannot_be_iterated() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        iter(Variable("w", jnp.zeros(3)))


def test_key_can_be_a_variable() -> None:
    k = Variable("k", jax.random.key(0))
    assert (k.shape, str(k.dtype)) == ((), "key<fry>")


def test_variable_prints_in_one_line_and_in_html() -> None:
    w = Variable("<w>", jnp.zeros((2, 3)), device="/job:ps")
    assert repr(w) == "Variable('<w>', float32[2,3], device='/job:ps')"
    assert "&lt;w&gt;" in w._repr_html_()
    assert "2 x 3" in w._repr_html_()


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        ("float32", 0, [0, 0, 0]),
        ("float32", True, [1, 1, 1]),
        ("float32", [1, 2, 3], [1, 2, 3]),
        ("bfloat16", 2.5, [2.5, 2.5, 2.5]),
        ("int32", -3, [-3, -3, -3]),
    ],
)
def test_python_numbers_are_written_as_into_a_numpy_array(
    dtype: str, value: Any, stored: list[float]
) -> None:
    w = Variable("w", jnp.ones(3, dtype))

    def write() -> None:
        w[...] = value

    graph, _ = trace(write)
    _, (new,) = eval_graph(graph, [jnp.ones(3, dtype)], [])
    assert new.dtype == dtype
    assert new.tolist() == stored


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.ones(5, np.float32), r"float32\[5\]"),
        (np.ones(3, np.int32), r"int32\[3\]"),
        (1.5j, "a complex"),
        ("text", "a str"),
    ],
)
def test_write_of_another_type_names_the_variable_and_both(
    value: Any, what: str
) -> None:
    w = Variable("weights", jnp.ones(3))

    def write() -> None:
        w[...] = value

    with pytest.raises(
        VariableMismatchError, match=rf"'weights'.*float32\[3\].*{what}"
    ):
        trace(write)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w + 1,
        lambda w: 2 * w,
        lambda w: np.ones(3) @ w,
        lambda w: -w,
        jnp.sum,
        jax.nn.relu,
    ],
)
def test_variable_in_place_of_its_value_is_told_how_to_read_it(use: Any) -> None:
    w = Variable("w", jnp.ones(3))
    with pytest.raises(GraphError, match=r"w\[\.\.\.\]"):
        trace(lambda: use(w))


def test_operations_are_colocated_with_a_variable_of_one_task() -> None:
    w = Variable("w", jnp.ones(3), device="/job:ps/task:1")

    def step(x: jax.Array) -> jax.Array:
        with device("/job:worker/task:0"), colocate_with(w):
            return jnp.sin(x)

    graph, _ = trace(step, jnp.ones(3))
    assert [str(stamp) for stamp in graph.stamps] == ["/job:ps/task:1"]
    halves = Variable("v", jnp.ones(4), partitioner=lambda *_: [2])
    with pytest.raises(PlacementError, match="needs a variable of one task"):
        colocate_with(halves)
