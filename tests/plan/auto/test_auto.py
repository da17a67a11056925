"""Automatic placement: the fewest seconds that memory allows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jgraph as jg
from jgraph.errors import MemoryLimitError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.plan.analysis.flow import analyze
from jgraph.plan.auto.auto import GAIN, AutoPlanner
from jgraph.plan.auto.blocks import blocks_of
from jgraph.plan.auto.cost_model import CostModel, Link
from jgraph.plan.auto.search import MOST_JOBS, Search
from jgraph.plan.placement.tasks import Tasks
from jgraph.plan.plan import Plan
from tests.support.costs import FAST, SLOW, model, speed
from tests.support.plans import PS, WORKERS, check_plan, descended, graph_of

A, B = PAIR = tuple(WORKERS[:2])
X = jnp.full((300, 300), 0.01)  # a product of two takes 54 ms in these cost models


def tower(x: Any, layers: int = 3) -> Any:
    for _ in range(layers):
        x = jnp.tanh(x @ x)
    return x


def two_towers(x: Any) -> Any:
    return (tower(x) + tower(x + 1)).sum()


def placed(
    fn: Callable[..., Any],
    *args: Any,
    costs: CostModel,
    tasks: tuple[TaskName, ...] = PAIR,
    limits: dict[TaskName, int] | None = None,
    variables: tuple[jg.Variable, ...] = (),
    **kwargs: Any,
) -> Plan:
    """Places ``fn``, and checks that it computes what one jit does."""
    planner = AutoPlanner(costs, tasks, limits or {})
    return check_plan(
        fn,
        *args,
        variables=variables,
        tasks=tuple(costs.tasks),
        exact=False,
        auto=planner,
        **kwargs,
    )


def tasks_of(planned: Plan) -> set[str]:
    return {segment.task for segment in planned.segments}


def seconds(planned: Plan) -> float:
    assert planned.prediction is not None
    return planned.prediction.seconds


def chain(layers: int) -> tuple[tuple[jg.Variable, ...], Callable[[Any], Any]]:
    """A training step of an MLP without scopes: its variables, and the function."""
    weights = tuple(
        jg.Variable(f"w{n}", jnp.full((300, 300), 0.01)) for n in range(layers)
    )

    def step(x: Any) -> Any:
        def loss(values: list[Any]) -> Any:
            h = x
            for value in values:
                h = jnp.tanh(h @ value)
            return h.sum()

        return descended(loss, weights)

    return weights, step


def less_than_one_needs(
    step: Callable[..., Any], weights: tuple[jg.Variable, ...]
) -> dict[TaskName, int]:
    """Returns a limit for each task that everything on one of them would break."""
    planner = AutoPlanner(model(PAIR[:1]), PAIR[:1])
    graph = graph_of(step, X, variables=weights)
    alone = planner.arrange(analyze(graph), tasks(PAIR[:1]), {})
    return dict.fromkeys(PAIR, 9 * alone.prediction.memory[A] // 10)


def tasks(names: Sequence[TaskName]) -> Tasks:
    return Tasks(tuple(names), names[0], DeviceSpec())


def test_two_branches_go_to_two_tasks_where_the_link_is_fast() -> None:
    planned = placed(two_towers, X, costs=model(PAIR, FAST))
    assert tasks_of(planned) == {A, B}
    assert seconds(planned) == pytest.approx(3 * 0.054, rel=0.05)


def test_two_branches_stay_on_one_task_where_the_link_is_slow() -> None:
    planned = placed(two_towers, X, costs=model(PAIR, SLOW))
    assert tasks_of(planned) == {A}
    assert seconds(planned) == pytest.approx(6 * 0.054, rel=0.05)


def test_tasks_that_share_the_cores_of_a_host_are_no_gain() -> None:
    assert tasks_of(placed(two_towers, X, costs=model(PAIR, crowding=2.0))) == {A}
    assert tasks_of(placed(two_towers, X, costs=model(PAIR, crowding=1.1))) == {A, B}


def test_all_goes_to_the_faster_of_two_tasks() -> None:
    costs = model(PAIR, FAST)
    faster = replace(costs, tasks={A: speed("a"), B: speed("b", 1e10)})
    assert tasks_of(placed(tower, X, costs=faster)) == {B}


def test_the_prediction_is_never_above_one_task_alone() -> None:
    weights, step = chain(4)
    graphs = [graph_of(two_towers, X), graph_of(step, X, variables=weights)]
    for latency in (1e-6, 1e-3, 1e-2, 1e-1):
        planner = AutoPlanner(model(PAIR, Link(latency, 1e8)), PAIR)
        for graph in graphs:
            found = planner.arrange(analyze(graph), tasks(PAIR), {}).prediction
            (alone,) = found.alone.values()
            assert found.seconds <= alone
            assert len(found.by_task) == 1 or found.seconds <= GAIN * alone


def test_the_gradients_of_a_layer_and_its_update_are_where_its_weights_are() -> None:
    weights, step = chain(4)
    costs = model(PAIR, FAST)
    limits = less_than_one_needs(step, weights)
    planned = placed(step, X, costs=costs, variables=weights, limits=limits)
    assert [planned.task_of(w.name) for w in weights] in ([A, A, B, B], [B, B, A, A])
    # Only activations and their gradients travel.
    assert planned.nbytes_per_step <= 3 * X.nbytes + 100


def test_a_limit_of_memory_splits_what_would_go_on_one_task() -> None:
    weights, step = chain(4)
    costs = model(PAIR, Link(0.01, 1e7))
    free = placed(step, X, costs=costs, variables=weights)
    limits = less_than_one_needs(step, weights)
    split = placed(step, X, costs=costs, variables=weights, limits=limits)
    assert split.prediction is not None
    assert tasks_of(split) == {A, B}
    assert all(n <= limits[t] for t, n in split.prediction.memory.items())
    assert seconds(split) > seconds(free)


def test_limits_that_nothing_keeps_are_one_error_with_bytes_and_limits() -> None:
    weights, step = chain(4)
    limits = dict.fromkeys(PAIR, 100_000)
    with pytest.raises(MemoryLimitError, match=r"needs .* of the 97.7 KiB") as caught:
        placed(step, X, costs=model(PAIR), variables=weights, limits=limits)
    assert caught.value.code == "JG-235"
    assert caught.value.details["limits"] == [f"{task} 100000" for task in PAIR]


def test_what_the_user_placed_stays_there() -> None:
    def stamped(x: Any) -> Any:
        with jg.device(B):
            y = tower(x)
        return tower(y).sum()

    w = jg.Variable("w", X, device=PS[0])

    def with_variable(x: Any) -> Any:
        w[...] = w[...] * 0.5
        return tower(x + w[...]).sum()

    costs = model([*PS, *PAIR], SLOW)
    planned = placed(stamped, X, costs=costs)
    assert B in tasks_of(planned)
    planned = placed(with_variable, X, costs=costs, variables=(w,))
    assert planned.task_of("w") == PS[0]
    assert tasks_of(planned) == {PS[0], A}


def test_nothing_free_goes_to_tasks_that_were_not_offered() -> None:
    costs = model([*PS, *WORKERS], FAST)
    planned = placed(two_towers, X, costs=costs, tasks=PAIR, driver=PS[0])
    assert tasks_of(planned) <= {*PAIR, PS[0]}
    heavy = {s.task for s in planned.segments if "dot_general" in s.label}
    assert heavy == {A, B}


def test_modules_are_placed_whole_and_their_gradients_with_them() -> None:
    def loss(x: Any) -> Any:
        parts: list[Any] = []
        for name in ("left", "right"):
            with jax.named_scope(name):
                parts.append(tower(x + len(parts)))
        return (parts[0] * parts[1]).sum()

    graph = graph_of(jax.grad(loss), X)
    planned = placed(jax.grad(loss), X, costs=model(PAIR, FAST))
    for name in ("left", "right"):
        places = {
            task
            for task, equation in zip(planned.placement, graph.equations, strict=True)
            if name in str(equation.source_info.name_stack)
            and equation.primitive.name == "dot_general"
        }
        assert len(places) == 1
    assert tasks_of(planned) == {A, B}


def test_the_same_graph_is_placed_the_same_way_each_time() -> None:
    weights, step = chain(5)
    costs = model(WORKERS, Link(1e-4, 1e9))
    graph = graph_of(step, X, variables=weights)
    plans = [
        AutoPlanner(costs, tuple(WORKERS)).arrange(analyze(graph), tasks(WORKERS), {})
        for _ in range(2)
    ]
    assert plans[0].graph.stamps == plans[1].graph.stamps
    assert plans[0].variable_tasks == plans[1].variable_tasks
    assert plans[0].prediction == plans[1].prediction


def test_a_function_whose_variables_have_places_goes_where_they_are() -> None:
    weights, step = chain(4)
    costs = model(PAIR, Link(1e-3, 1e9))
    limits = less_than_one_needs(step, weights)
    first = placed(step, X, costs=costs, variables=weights, limits=limits)
    again = placed(
        step, X, costs=costs, variables=weights, variable_tasks=first.variable_tasks
    )
    assert again.variable_tasks == first.variable_tasks
    assert seconds(again) <= seconds(first)


def test_the_effort_for_5000_equations_is_bounded() -> None:
    def long(x: Any) -> Any:
        for n in range(50):
            with jax.named_scope(f"layer{n}"):
                for _ in range(50):
                    x = jnp.tanh(x @ x) + 1
        return x.sum()

    graph = graph_of(long, jnp.ones((8, 8)))
    assert len(graph.equations) > 5_000
    flow = analyze(graph)
    blocks = blocks_of(flow, tuple(WORKERS), {}, [])
    assert len(blocks.blocks) == 50
    search = Search(blocks, WORKERS, WORKERS[0], model(WORKERS), {})
    search.found(3)
    assert search.priced_jobs <= MOST_JOBS + 2 * len(blocks.blocks)


def test_a_graph_without_scopes_is_taken_in_pieces() -> None:
    graph = graph_of(lambda x: tower(x, 500), jnp.ones((8, 8)))
    blocks = blocks_of(analyze(graph), PAIR, {}, []).blocks
    assert 40 < len(blocks) < 90
    assert sum(len(block.ops) for block in blocks) == len(graph.equations)


def test_the_plan_tells_the_prediction() -> None:
    text = str(placed(two_towers, X, costs=model(PAIR, FAST)))
    assert "predicted 162 ms per step; all on" in text


def test_what_is_to_be_beside_a_variable_is() -> None:
    w = jg.Variable("w", jnp.full((300, 300), 0.01), device=B)
    free = jg.Variable("free", jnp.full((300, 300), 0.01))

    def step(x: Any) -> Any:
        with jg.colocate_with(w):
            y = jnp.tanh(x + w[...])
        with jg.colocate_with(free):
            return (tower(y) * free[...]).sum()

    planned = placed(step, X, costs=model(PAIR, SLOW), variables=(w, free))
    heavy = {s.task for s in planned.segments if "dot_general" in s.label}
    assert heavy == {planned.task_of("free")}
    assert B in tasks_of(planned)
