from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jgraph.errors import FeedError, FetchError, GraphError
from jgraph.graph.device import device
from jgraph.graph.graph import Graph, eval_graph
from jgraph.graph.tracing.function import function
from jgraph.graph.tracing.select import select_fetches, select_targets
from jgraph.graph.tracing.taps import feed_taps, tap, tapped
from jgraph.graph.variable import Variable


def _graph(fn: Any, *args: Any) -> Graph:
    return function(fn).graph(*args)


def _run(graph: Graph, *feeds: Any, values: tuple[Any, ...] = ()) -> list[Any]:
    return [np.asarray(x).tolist() for x in eval_graph(graph, values, feeds)[0]]


def test_fed_value_takes_the_place_of_what_was_tapped() -> None:
    def step(x: Any) -> Any:
        hidden = tap("hidden", x * 10)
        return hidden + 1, tap("out", hidden * 2)

    graph = _graph(step, 1.0)
    fed = feed_taps(graph, ["hidden"])
    assert [f.name for f in fed.feeds] == ["x", "hidden"]
    assert _run(fed, 1.0, 5.0) == [6.0, 10.0]
    assert _run(feed_taps(graph, ["out"]), 1.0, 7.0) == [11.0, 7.0]


def test_tapped_values_are_fetched_by_name_beside_results() -> None:
    graph = _graph(lambda x: {"y": tap("half", x / 2) + 1}, 4.0)
    chosen = select_fetches(graph, {"both": ["half", "y"]})
    assert _run(chosen, 4.0) == [2.0, 3.0]
    with pytest.raises(FetchError, match=r"Did you mean half\?.*it taps half"):
        select_fetches(graph, "hal")


def test_leaves_of_a_tapped_tree_have_the_names_of_their_paths() -> None:
    graph = _graph(lambda x: tap("h", {"a": x, "b": (x * 2,)}), 1.0)
    assert list(tapped(graph)) == ["h['a']", "h['b'][0]"]
    assert _run(feed_taps(graph, ["h['b'][0]"]), 1.0, 9.0) == [1.0, 9.0]


def test_gradient_computes_with_the_fed_value() -> None:
    def loss(x: Any) -> Any:
        return jnp.square(tap("h", 3 * x))

    graph = _graph(jax.grad(loss), 1.0)
    assert _run(graph, 1.0) == [18.0]
    assert _run(feed_taps(graph, ["h"]), 1.0, 10.0) == [60.0]


def test_value_that_is_computed_again_for_its_gradient_is_fed_once() -> None:
    @jax.checkpoint
    def block(x: Any) -> Any:
        with device("/job:worker/task:0"):
            h = tap("h", 3 * x)
        with device("/job:worker/task:1"):
            return jnp.square(h)

    graph = feed_taps(_graph(jax.value_and_grad(block), 1.0), ["h"])
    assert _run(graph, 1.0, 2.0) == [4.0, 12.0]
    assert not tapped(graph)


def test_taps_work_under_jit_and_vmap_and_inside_flax_modules() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(1)(tap("hidden", nn.relu(nn.Dense(3)(x))))

    x = jnp.ones((2, 4))
    net = Net()
    params = net.init(jax.random.key(0), x)
    graph = _graph(lambda x: jax.jit(net.apply)(params, x), x)
    fed = feed_taps(graph, ["hidden"])
    dense = params["params"]["Dense_0"]
    want = jnp.ones((2, 3)) @ dense["kernel"] + dense["bias"]
    np.testing.assert_allclose(
        _run(fed, x, jnp.ones((2, 3)))[0], np.asarray(want), rtol=1e-6
    )
    batched = _graph(jax.vmap(lambda row: tap("double", row * 2)), jnp.ones((5, 3)))
    assert [str(v.aval) for v in tapped(batched).values()] == ["float32[5,3]"]


def test_tap_inside_a_loop_says_where_to_tap_instead() -> None:
    def step(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: tap("turn", y * 2), x)

    graph = _graph(step, 1.0)
    with pytest.raises(FeedError, match=r"tapped inside a .*tap what goes in"):
        feed_taps(graph, ["turn"])


def test_unknown_taps_and_names_used_twice_are_refused() -> None:
    graph = _graph(lambda x: tap("hidden", x + 1), 1.0)
    with pytest.raises(FeedError, match="did you mean 'hidden'"):
        feed_taps(graph, ["hiden"])
    twice = _graph(lambda x: (tap("a", x), tap("a", jnp.ones(3) * x)), 1.0)
    with pytest.raises(GraphError, match="taps two values as 'a'"):
        tapped(twice)
    with pytest.raises(GraphError, match="a tap needs a name"):
        tap("", 1.0)


# ---------------------------------------------------------------- targets


def _training() -> tuple[Any, Graph]:
    w, steps = Variable("w", jnp.array(4.0)), Variable("steps", jnp.array(0))

    def step(x: Any) -> Any:
        loss = w[...] * x
        w[...] = w[...] - 1
        steps[...] = steps[...] + 1
        return {"loss": loss, "steps": steps[...]}

    return step, _graph(step, 2.0)


def test_without_targets_a_fetched_loss_changes_no_variable() -> None:
    _, graph = _training()
    loss = select_targets(select_fetches(graph, ["loss"]), [])
    fetched, values = eval_graph(loss, (4.0, 0), (2.0,))
    assert (float(fetched[0]), float(values[0]), int(values[1])) == (8.0, 4.0, 0)


def test_targets_run_their_updates_alone_with_nothing_fetched() -> None:
    _, graph = _training()
    only = select_targets(select_fetches(graph, []), ["w"])
    fetched, values = eval_graph(only, (4.0, 0), (2.0,))
    assert (fetched, float(values[0]), int(values[1])) == ([], 3.0, 0)


def test_fetch_that_needs_an_update_not_asked_for_is_refused() -> None:
    _, graph = _training()
    with pytest.raises(FetchError, match="needs variable 'steps' as it is after"):
        select_targets(select_fetches(graph, ["steps"]), ["w"])
    with pytest.raises(FetchError, match="does not write a variable called 'v'"):
        select_targets(graph, ["v"])


def test_a_target_is_the_variable_of_its_container() -> None:
    first = Variable("w", jnp.asarray(1.0), container="a")
    second = Variable("w", jnp.asarray(1.0), container="b")

    def step() -> None:
        first[...] = first[...] + 1
        second[...] = second[...] + 1

    graph = _graph(step)
    (written,) = eval_graph(select_targets(graph, [("b", "w")]), (1.0, 1.0), ())[1:]
    kept = dict(zip([v.container for v in graph.variables], written, strict=True))
    assert kept == {"a": 1.0, "b": 2.0}
    with pytest.raises(FetchError, match="in the containers 'a', 'b'; give the vari"):
        select_targets(graph, ["w"])
    with pytest.raises(FetchError, match="called 'w' in the container 'c'; it writes"):
        select_targets(graph, [("c", "w")])
