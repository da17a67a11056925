"""Tracing: variables, feeds, fetches, constants; and that the meaning is kept."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.errors import FeedError, GraphError, VariableMismatchError
from jgraph.graph.device import device
from jgraph.graph.graph import Graph, eval_graph
from jgraph.graph.tracing.function import function
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable

Same: TypeAlias = Callable[..., Graph]
F32 = jax.ShapeDtypeStruct((3,), jnp.float32)
X = jnp.arange(3.0)


def feed_names(graph: Graph) -> list[str]:
    return [feed.name for feed in graph.feeds]


def test_feeds_are_named_by_the_users_arguments() -> None:
    def step(x: Any, batch: Any, *rest: Any, lr: Any, **more: Any) -> Any:
        return x

    graph, _ = trace(step, F32, {"image": F32, "y": (F32, F32)}, 1, lr=0.1, extra=[2.0])
    assert feed_names(graph) == [
        "x",
        "batch['image']",
        "batch['y'][0]",
        "batch['y'][1]",
        "rest[0]",
        "extra[0]",
        "lr",
    ]


def test_feed_of_a_keyword_has_the_name_of_the_parameter() -> None:
    assert feed_names(trace(lambda x, y: x + y, 1.0, y=2.0)[0]) == ["x", "y"]


def test_argument_left_at_its_default_is_not_fed(same: Same) -> None:
    graph = same(lambda x, n=2: x * n, {}, X)
    assert feed_names(graph) == ["x"]


def test_method_and_partial_name_their_free_parameters() -> None:
    class Model:
        def apply(self, x: Any) -> Any:
            return x

    assert feed_names(trace(Model().apply, F32)[0]) == ["x"]
    bound = functools.partial(lambda n, x: n * x, 3)
    assert feed_names(trace(bound, F32)[0]) == ["x"]


def test_python_numbers_are_weakly_typed_feeds_as_in_jit() -> None:
    def f(i: Any, x: Any, b: Any) -> Any:
        return i * jnp.ones(3, jnp.bfloat16), x * jnp.ones(3, jnp.bfloat16), b

    graph, _ = trace(f, 1, 2.0, True)
    assert [(f.aval.dtype, f.aval.weak_type) for f in graph.feeds] == [
        (jnp.int32, True),
        (jnp.float32, True),
        (jnp.bool_, False),
    ]
    outs, _ = eval_graph(graph, [], [1, 2.0, True])
    assert [jax.typeof(x).dtype for x in outs] == [
        jnp.bfloat16,
        jnp.bfloat16,
        jnp.bool_,
    ]


def test_wide_arrays_are_fed_as_jit_would_take_them() -> None:
    graph, _ = trace(lambda x: x, np.zeros(3, np.float64))
    assert graph.feeds[0].aval.dtype == jnp.float32


@pytest.mark.parametrize("leaf", ["text", object(), np.array(["a"]), print, 2**80])
def test_argument_that_is_no_array_is_refused_by_name(leaf: Any) -> None:
    with pytest.raises(FeedError, match=r"'batch\['name'\]' of step"):
        function_step(leaf)


def function_step(leaf: Any) -> Graph:
    @function
    def step(batch: Any) -> Any:
        return batch["x"]

    return step.graph({"x": 1.0, "name": leaf})


def test_an_array_of_another_byte_order_is_refused_with_what_to_type() -> None:
    with pytest.raises(FeedError, match=r"'x\[0\]' of f .* x\[0\].astype\('float32'\)"):
        trace(lambda x: x, [np.zeros(2, ">f4")], name="f")


def test_variable_as_an_argument_is_refused_by_name() -> None:
    w = Variable("w", X)
    with pytest.raises(FeedError, match="argument 'a' of f is the variable 'w'"):
        trace(lambda a: a, w, name="f")


def test_missing_argument_is_refused_by_name() -> None:
    with pytest.raises(FeedError, match=r"f\(x, y\) cannot .* missing .* 'y'"):
        trace(lambda x, y: x, 1.0, name="f")


def test_none_and_empty_trees_are_structure(same: Same) -> None:
    graph = same(lambda x, none: {"a": None, "b": (x, [])}, {}, X, None)
    assert graph.fetches == ("['b'][0]",)


def test_fetches_are_named_by_the_result_tree() -> None:
    assert trace(lambda x: x, X)[0].fetches == ("",)
    assert trace(lambda x: (x, {"loss": x}), X)[0].fetches == ("[0]", "[1]['loss']")


@pytest.mark.parametrize("result", ["text", object(), print])
def test_result_that_is_no_array_is_refused_by_its_place(result: Any) -> None:
    with pytest.raises(GraphError, match=r"f returns .* at result\['a'\]\[1\]"):
        trace(lambda x: {"a": (x, result)}, X, name="f")


def test_variable_as_a_result_is_refused_with_what_to_write() -> None:
    w = Variable("w", X)
    with pytest.raises(GraphError, match=r"w\[\.\.\.\]"):
        trace(lambda: w)


def test_ref_from_outside_is_refused() -> None:
    ref = jax.new_ref(X)
    with pytest.raises(GraphError, match=r"jg\.Variable"):
        trace(lambda: ref[...])


def test_results_that_are_inputs_or_numbers_pass_through(same: Same) -> None:
    w = Variable("w", X)
    same(lambda x: (x, x, 3.0, True, w[...], np.ones(2)), {w: X}, X)


def test_reads_and_writes_happen_in_program_order(same: Same) -> None:
    w, v = Variable("w", X), Variable("v", X)

    def step(x: jax.Array) -> Any:
        before = w[...]
        w[...] = before + x
        v[1:] = w[:2] * 2
        w[0] = 7.0
        return before, w[...], v[jnp.array([0, 0, 2])]

    same(step, {w: X, v: -X}, X)


def test_graph_lists_only_the_variables_that_are_used() -> None:
    w, v, unused = Variable("w", X), Variable("v", X), Variable("u", X)
    graph, variables = trace(lambda: v[...] + w[...], variables=[w, unused, v])
    assert variables == (w, v)
    assert [spec.name for spec in graph.variables] == ["w", "v"]


def test_variables_that_were_not_told_are_found(same: Same) -> None:
    w, k = Variable("w", X), Variable("k", jax.random.key(0))

    def step(x: jax.Array) -> Any:
        key, k[...] = jax.random.split(k[...])
        w[...] += jax.random.normal(key, x.shape)
        return w[...]

    assert trace(step, X, variables=[w])[1] == (w, k)
    same(step, {w: X, k: jax.random.key(3)}, X)


def test_finding_variables_allocates_none_of_them() -> None:
    huge = Variable("huge", ((1 << 20, 1 << 20), "float32", None))
    assert trace(lambda ids: huge[ids], jnp.arange(3))[1] == (huge,)


def test_two_objects_of_one_name_and_spec_are_one_variable(same: Same) -> None:
    a, b = Variable("w", X), Variable("w", X + 1)

    def step() -> Any:
        a[...] = a[...] + 1
        return b[...]

    graph, variables = trace(step)
    assert variables == (a,)
    outs, _ = eval_graph(graph, [X], [])
    np.testing.assert_array_equal(outs[0], X + 1)


@pytest.mark.parametrize(
    "other",
    [
        Variable("w", jnp.zeros(4)),
        Variable("w", jnp.zeros(3, jnp.int32)),
        Variable("w", jnp.zeros(3), device="/job:ps/task:1"),
    ],
)
def test_one_name_for_two_variables_is_refused(other: Variable) -> None:
    w = Variable("w", X)
    with pytest.raises(VariableMismatchError, match=r"'w'.*float32\[3\], and "):
        trace(lambda: (w[...], other[...]))
    with pytest.raises(VariableMismatchError, match="'w'"):
        trace(lambda: (w[...], other[...]), variables=[w, other])


def test_one_name_in_two_containers_is_two_variables(same: Same) -> None:
    a, b = Variable("w", X, container="a"), Variable("w", jnp.ones(4), container="b")
    same(lambda: (a[...], b[...]), {a: X, b: jnp.ones(4)})


def test_constants_are_held_once_however_often_they_are_used(same: Same) -> None:
    table = np.arange(100.0, dtype=np.float32)
    other = jnp.ones(100)

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return (x[0] * table + other).sum()

    def step(x: jax.Array) -> Any:
        return inner(x) + inner(x + 1) + (other * x[1]).sum()

    graph = same(step, {}, X)
    assert len(graph.consts) == 2


def test_jitted_function_is_traced_anew_for_each_graph() -> None:
    """A layer from a library reads the variable of whoever calls it."""
    w = Variable("w", X)

    @jax.jit
    def layer(x: jax.Array) -> Any:
        return x * w[...]

    for _ in range(2):
        graph, _ = trace(layer, X)
        outs, _ = eval_graph(graph, [X + 1], [X])
        np.testing.assert_array_equal(outs[0], X * (X + 1))
    both, _ = trace(lambda x: (layer(x), layer(x)), X)
    assert len(both.variables) == 1


def test_function_is_traced_once_per_argument_type() -> None:
    calls = []

    @function
    def step(x: Any) -> Any:
        calls.append(x)
        return x + 1

    assert step.graph(X) is step.graph(F32)
    assert step.graph(x=X) is not step.graph(X)
    assert len(calls) == 2
    assert step.graph(jnp.ones(4)) is not step.graph(X)
    assert step.graph(X).name == step.name == "step"


def test_scope_around_the_trace_is_the_outermost_scope() -> None:
    @function
    def step(x: Any) -> Any:
        with device("/task:1"):
            return jax.jit(jnp.sin)(x)

    inside = []
    for scope in ("/job:worker/task:0", "/job:ps"):
        with device(scope):
            inside.append(str(step.graph(1.0).stamps[0]))
    assert inside == ["/job:worker/task:1", "/job:ps/task:1"]
    assert str(step.graph(1.0).stamps[0]) == "/task:1"


def test_function_inside_a_function_is_its_code(same: Same) -> None:
    w = Variable("w", X)

    @function
    def inner(x: Any) -> Any:
        w[...] = w[...] + x
        return w[...]

    same(lambda x: inner(x) + inner(x), {w: X}, X)


def test_function_that_makes_new_variables_each_time_is_refused() -> None:
    count = iter(range(100))

    def step(x: Any) -> Any:
        return Variable(f"v{next(count)}", 1.0)[...] + x

    with pytest.raises(GraphError, match="step uses other variables each time"):
        trace(step, X)


def test_variable_made_inside_by_the_same_name_is_one_variable(same: Same) -> None:
    graph, _ = trace(lambda x: Variable("v", 1.0)[...] + x, X)
    assert [v.name for v in graph.variables] == ["v"]


def test_variable_where_jax_allows_no_state_is_refused_with_the_way_out() -> None:
    w = Variable("w", X)

    def read_in_vmapped_cond(x: jax.Array) -> Any:
        return jax.vmap(lambda a: jax.lax.cond(a > 0, lambda: w[0], lambda: a))(x)

    def read_in_solver(x: jax.Array) -> Any:
        return jax.scipy.sparse.linalg.cg(lambda v: v * w[...], x)[0]

    for step in (read_in_vmapped_cond, read_in_solver):
        with pytest.raises(GraphError, match=r"read it before, value = w\[\.\.\.\]"):
            trace(step, X)


def test_error_in_the_users_function_comes_out_unchanged() -> None:
    def step(x: Any) -> Any:
        raise KeyError(x.shape)

    with pytest.raises(KeyError, match="3"):
        trace(step, X)


# Random straight-line programs over three variables and one feed.
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "add", "row", "jit"]),
        st.integers(0, 2),
        st.integers(0, 9),
    ),
    max_size=12,
)


@given(_STEPS)
def test_graph_of_a_random_program_means_the_program(
    same: Same, steps: list[tuple[str, int, int]]
) -> None:
    cells = [Variable(f"v{i}", X) for i in range(3)]

    def program(x: jax.Array) -> Any:
        values = [x]
        for what, i, j in steps:
            cell, value = cells[i], values[j % len(values)]
            if what == "read":
                values.append(cell[...])
            elif what == "write":
                cell[...] = value
            elif what == "add":
                values.append(value + values[-1])
            elif what == "row":
                cell[j % 3] = value[0]
            else:
                values.append(jax.jit(lambda y, c=cell: jnp.sin(y) + c[...])(value))
        return values

    same(program, {c: X + i for i, c in enumerate(cells)}, X)


def branches(x: Any) -> Any:
    if x.sum() > 0:
        return x
    return -x


@pytest.mark.parametrize(
    ("fn", "advice"),
    [
        (branches, "jnp.where"),
        (lambda x: np.sin(x) + 1, "jax.numpy"),
        (lambda x: [1, 2][x.astype(int)[0]], "jnp.arange"),
        (lambda x: float(x[0]), "compute with the array"),
        (lambda x: x[x > 0], "jnp.where"),
    ],
)
def test_code_that_needs_a_value_is_named_with_its_line(
    fn: Callable[[Any], Any], advice: str
) -> None:
    with pytest.raises(GraphError, match=advice) as caught:
        trace(fn, jnp.ones(3))
    line = caught.value.details["line"]
    number = fn.__code__.co_firstlineno + (fn is branches)
    assert line == f"{__file__}:{number}"
    assert line in str(caught.value)
