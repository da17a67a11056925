"""Replicas of a pipeline: one step of all is that of the model in one piece."""

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, strategies as st

import jgraph as jg
from jgraph.errors import DeviceSpecError, FeedError, PipelineError, UnknownDeviceError
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan
from jgraph.train.pipeline.replicas import task_rows
from jgraph.train.pipeline.step import PipelineStep
from tests.support.graph_interpreter import Compiled
from tests.support.layers import Embed, Head, layer, next_token, params_of, squares
from tests.support.plans import (
    EXACT,
    FAST,
    PS,
    Values,
    assert_same,
    check_program,
    initial_values,
    simulated,
)

WIDTH, MICROBATCHES = 4, 2
NINE = [TaskName(f"/job:worker/task:{n}") for n in range(9)]
ARRAY = [[NINE[0], NINE[1]], [NINE[2], NINE[3]]]


def batch(size: int = 12, seed: int = 2) -> Any:
    return jax.random.normal(jax.random.key(seed), (2, size, WIDTH))


def planned(step: PipelineStep, *args: Any) -> tuple[Plan, Values]:
    graph, variables = step.train.trace(*args)
    made = plan(graph, tasks=PS + NINE, driver=NINE[0])
    check_program(made.program)
    return made, initial_values(variables)


def whole_loss(params: Any, x: Any, t: Any) -> Any:
    for tree in params:
        x = layer(tree, x)
    return squares(x, t)


@pytest.mark.combined
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "stages", "tasks"),
    [
        *(("gpipe", n, n) for n in (1, 2, 3)),
        *(("1f1b", n, n) for n in (1, 2, 3)),
        ("interleaved", 2, 1),
        ("interleaved", 4, 2),
    ],
)
def test_steps_of_replicas_are_those_of_the_model_in_one_piece(
    name: Any, stages: int, tasks: int, replicas: int
) -> None:
    pipe = jg.Pipeline(
        [layer] * stages,
        squares,
        microbatches=MICROBATCHES,
        schedule=name,
        tasks=tasks,
        replicas=replicas,
    )
    params, tx = params_of(stages), optax.adam(1e-2)
    opt = tx.init(params)
    made, values = planned(pipe.step(params, tx), *batch())
    assert {s.task for s in made.segments if "@" in s.label} == {
        *NINE[: tasks * replicas]
    }
    compiled: Compiled = {}
    grad = jax.jit(jax.value_and_grad(whole_loss))
    for number in range(3):
        x, t = batch(seed=number)
        (loss,), values = simulated(made, values, (x, t), FAST, compiled)
        wanted, grads = grad(params, x, t)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        new = [
            {name: values[f"params/{stage}/{name}"] for name in ("w", "b")}
            for stage in range(stages)
        ]
        assert_same((loss, new), (wanted, params), exact=False)


def in_order(pipe: jg.Pipeline, params: Any, x: Any, t: Any) -> tuple[Any, Any]:
    """Returns loss and gradients of plain JAX, added in the order of the replicas."""
    count = len(pipe.replicas) * MICROBATCHES
    sums, losses = [], []
    for of_x, of_t in zip(
        jnp.split(x, len(pipe.replicas)), jnp.split(t, len(pipe.replicas)), strict=True
    ):
        total, of_replica = None, []
        for a, b in zip(
            jnp.split(of_x, MICROBATCHES), jnp.split(of_t, MICROBATCHES), strict=True
        ):
            loss, back = jax.vjp(lambda p, a=a, b=b: whole_loss(p, a, b), params)
            (grads,) = back(jnp.float32(1 / count))
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            of_replica.append(loss)
        sums.append(total)
        losses.append(jnp.stack(of_replica).mean())
    grads = sums[0]
    for other in sums[1:]:
        grads = jax.tree.map(jnp.add, grads, other)
    return (losses[0] if len(losses) == 1 else jnp.stack(losses).mean()), grads


@pytest.mark.parametrize(
    ("name", "replicas"),
    [pytest.param("gpipe", 2, marks=pytest.mark.nightly), ("1f1b", 3)],
)
def test_sums_in_the_same_order_are_the_same_bit_for_bit(
    name: Any, replicas: int
) -> None:
    pipe = jg.Pipeline(
        [layer] * 2,
        squares,
        microbatches=MICROBATCHES,
        schedule=name,
        replicas=replicas,
    )
    params, (x, t) = params_of(2), batch()
    weights = [
        jg.Variable(f"{stage}/{name}", value, device=pipe.devices[stage])
        for stage, tree in enumerate(params)
        for name, value in sorted(tree.items())
    ]
    tree = jax.tree.structure(params)

    @jg.function
    def step(x: Any, t: Any) -> Any:
        now = jax.tree.unflatten(tree, [w[...] for w in weights])
        return pipe.value_and_grad(now, x, t)

    made = plan(step.trace(x, t)[0], tasks=PS + NINE, driver=NINE[0])
    got, _ = simulated(made, initial_values(weights), (x, t), EXACT)
    run = jax.jit(partial(in_order, pipe), compiler_options=EXACT)
    assert_same(got, jax.tree.leaves(run(params, x, t)), exact=True)


def between_workers(made: Plan) -> dict[tuple[int, int], int]:
    """Returns the bytes that each worker sends each other one in a step."""
    found: Counter[tuple[int, int]] = Counter()
    for edge in made.edges:
        if "worker" in edge.src and "worker" in edge.dst:
            src, dst = (int(task.rpartition(":")[2]) for task in (edge.src, edge.dst))
            found[src, dst] += edge.nbytes
    return dict(found)


def test_parameters_go_to_each_replica_once_and_gradients_come_home_once() -> None:
    pipe = jg.Pipeline(
        [layer] * 3, squares, microbatches=MICROBATCHES, tasks=3, replicas=2
    )
    step = pipe.step(params_of(3), optax.sgd(0.1))
    made, _ = planned(step, *batch(16))
    assert [made.task_of(f"params/{n}/w") for n in range(3)] == NINE[:3]
    of_params = 4 * (WIDTH * WIDTH + WIDTH)
    part = 4 * 8 * WIDTH  # of x, of the targets, and of what is between stages
    loss = 4
    assert between_workers(made) == {
        # The batch is at the first worker, and each replica takes its part.
        (0, 3): part + of_params,
        (0, 5): part,
        # Parameters and gradients of a stage, between the replicas.
        (1, 4): of_params,
        (2, 5): of_params,
        (3, 0): of_params,
        (4, 1): of_params,
        (5, 2): of_params + loss,
        # What the stages of a replica give each other.
        **{(n, n + 1): part for n in (0, 1, 3, 4)},
        **{(n + 1, n): part for n in (0, 1, 3, 4)},
        (0, 2): part,
        (2, 0): loss,
    }


def test_all_replicas_share_the_code_of_their_stages() -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=MICROBATCHES, replicas=3)
    made, _ = planned(pipe.step(params_of(2), optax.sgd(0.5)), *batch())
    passes = [s for s in made.segments if "@" in s.label]
    assert (len(passes), len({s.digest for s in passes})) == (18, 5)


def test_towers_of_a_pipeline_are_its_replicas() -> None:
    params, (x, t) = params_of(2), batch()
    made = partial(jg.Pipeline, [layer] * 2, squares, microbatches=MICROBATCHES)
    wanted = jax.jit(made(replicas=2).value_and_grad)(params, x, t)
    for tasks in (2, ARRAY, np.array(ARRAY), [*ARRAY[0], *ARRAY[1]]):
        assert_same(
            jax.jit(jg.towers(made().loss, tasks))(params, x, t), wanted, exact=True
        )
    by_name = made(tasks=ARRAY)
    assert_same(jax.jit(jg.towers(by_name.loss, 2))(params, x, t), wanted, exact=True)
    assert by_name.replicas == tuple(map(tuple, ARRAY))
    assert by_name.devices == ARRAY[0]
    assert str(by_name).startswith("<Pipeline 2 replicas of 1f1b: 2 stages on 2 tasks")
    run = jg.towers(by_name.loss, 2)
    graph = jg.function(lambda x, t: run(params, x, t)).graph(x, t)
    planned = plan(graph, tasks=PS + NINE, driver=NINE[0])
    assert {s.task for s in planned.segments} == {*NINE[:4]}


def test_the_loss_of_a_pipeline_is_that_of_the_model() -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=MICROBATCHES, replicas=2)
    params, (x, t) = params_of(2), batch(5)  # in one piece: of any size
    assert_same(
        jax.jit(jax.value_and_grad(pipe.loss))(params, x, t),
        jax.jit(jax.value_and_grad(whole_loss))(params, x, t),
        exact=False,
    )


def test_gradients_of_the_input_are_those_of_the_whole_batch() -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=MICROBATCHES, replicas=3)
    params, (x, t) = params_of(2), batch()
    run = jax.jit(partial(pipe.value_and_grad, input_gradients=True))
    _, (_, gradient) = run(params, x, t)
    wanted = jax.jit(jax.grad(whole_loss, 1))(params, x, t)
    assert_same(gradient, wanted, exact=False)


def test_replicas_of_linen_stages_with_integers_between_them() -> None:
    stages = [Embed(WIDTH), Head()]
    pipe = jg.Pipeline(stages, next_token, microbatches=2, replicas=2)
    ids = jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % 10
    params = pipe.init(0, ids)

    def whole(params: Any) -> Any:
        h = stages[0].apply({"params": params[0]}, ids)
        return next_token(stages[1].apply({"params": params[1]}, h), ids)

    assert_same(
        jax.jit(pipe.value_and_grad)(params, ids, ids),
        jax.jit(jax.value_and_grad(whole))(params),
        exact=False,
    )


def test_replicas_of_nnx_stages() -> None:
    stages = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(2)]
    pipe = jg.Pipeline(stages, squares, microbatches=2, replicas=3)
    x, t = batch()
    params = pipe.init(0, x)

    def whole(params: Any) -> Any:
        h = x
        for tree in params:
            h = h @ tree["kernel"] + tree["bias"]
        return squares(h, t)

    assert_same(
        jax.jit(pipe.value_and_grad)(params, x, t),
        jax.jit(jax.value_and_grad(whole))(params),
        exact=False,
    )


@pytest.mark.nightly  # smaller: tests/train/test_any_batch.py
def test_one_plan_is_for_batches_of_all_sizes_that_can_be_cut() -> None:
    params = params_of(2)
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=2, replicas=2)

    @jg.function(symbolic="4*b, ...")
    def step(x: Any, t: Any) -> Any:
        return pipe.value_and_grad(params, x, t)

    made = plan(step.trace(*batch(4))[0], tasks=PS + NINE, driver=NINE[0])
    for size in (4, 12):
        got, _ = simulated(made, {}, tuple(batch(size)), FAST)
        wanted = jax.jit(jax.value_and_grad(whole_loss))(params, *batch(size))
        assert_same(got, jax.tree.leaves(wanted), exact=False)


@given(replicas=st.integers(1, 5), each=st.integers(1, 5))
def test_tasks_are_dealt_by_rows_whatever_they_are_given_as(
    replicas: int, each: int
) -> None:
    names = [f"/job:worker/task:{n}" for n in range(replicas * each)]
    array = np.array(names).reshape(replicas, each)
    wanted = tuple(map(tuple, array.tolist()))
    assert task_rows(each, replicas) == wanted
    assert task_rows(names, replicas) == wanted
    assert task_rows(array) == task_rows(array.tolist(), replicas) == wanted
    assert task_rows(names) == (tuple(names),)


def refused(sentence: str, **changed: Any) -> None:
    with pytest.raises(PipelineError, match=sentence) as raised:
        jg.Pipeline([layer] * 2, squares, microbatches=2, **changed)
    assert raised.value.code == "JG-234"
    assert "\n" not in raised.value.message


@pytest.mark.bad_input_row(32)
@pytest.mark.parametrize("replicas", [0, -1, 1.5, True, "2"])
def test_no_whole_number_of_replicas_is_refused(replicas: Any) -> None:
    refused("replicas is .*; give how many copies", replicas=replicas)


@pytest.mark.bad_input_row(32)
def test_tasks_that_are_no_array_of_devices_are_refused() -> None:
    ragged = [ARRAY[0], ARRAY[1][:1]]
    refused("tasks has rows of 1 and 2 tasks; each row is a replica", tasks=ragged)
    refused("rows of 0 and 2 tasks", tasks=[ARRAY[0], []])
    twice = [ARRAY[0], [NINE[2], "worker:1"]]
    refused("tasks has '/job:worker/task:1' 2 times", tasks=twice)
    refused("3 tasks cannot be dealt to 2 replicas", tasks=NINE[:3], replicas=2)
    refused("replicas is 3 and tasks has 2 rows", tasks=ARRAY, replicas=3)
    refused("there are 2 stages for 1 tasks", tasks=[[NINE[0]], [NINE[1]]])
    refused("cannot use 3 tasks", tasks=[NINE[:3], NINE[3:6]])
    refused("needs a task; tasks is empty", tasks=[])
    refused("needs a task; tasks is empty", tasks=[[], []])
    refused("tasks is '/job:worker'; give how many", tasks="/job:worker")
    refused("tasks is 2.0; give how many", tasks=2.0)
    refused("tasks is True; give how many", tasks=True)
    refused(r"tasks has \[0, 1\]; give how many", tasks=np.arange(4).reshape(2, 2))
    refused("tasks has '/job:worker/task:0'; give", tasks=[NINE[0], ARRAY[1]])
    refused(r"tasks has \[\['/job", tasks=[ARRAY])
    with pytest.raises(DeviceSpecError, match="'nowhere' in device string"):
        jg.Pipeline([layer] * 2, squares, microbatches=2, tasks=[NINE[0], "nowhere"])


@pytest.mark.bad_input_row(32)
def test_towers_refuse_what_replicas_of_a_pipeline_cannot_have() -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=2, tasks=ARRAY)
    for tasks, sentence in (
        (3, "3 replicas of a pipeline whose 2 have tasks by name; give an array"),
        (NINE[:3], "has 2 tasks, and tasks has 3; give a row of 2 for each"),
        ([NINE[:3], NINE[3:6]], "has 2 tasks, and tasks has rows of 3; give a row"),
    ):
        with pytest.raises(PipelineError, match=sentence):
            jg.towers(pipe.loss, tasks)
    assert pipe.replicas == tuple(map(tuple, ARRAY))


@pytest.mark.bad_input_row(32)
def test_a_batch_that_replicas_and_microbatches_do_not_divide_is_refused() -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=4, replicas=2)
    step = pipe.step(params_of(2), optax.sgd(0.1))
    for size, sentence in (
        (12, "x has 12 examples, .* 8 equal parts, 4 microbatches for each of 2 repl"),
        (7, "x has 7 examples"),
        (0, "x has 0 examples"),
    ):
        with pytest.raises(FeedError, match=sentence):
            pipe.value_and_grad(params_of(2), *batch(size))
        with pytest.raises(FeedError, match=sentence):
            step.train.graph(*batch(size))
    with pytest.raises(FeedError, match="targets has 6 examples"):
        pipe.value_and_grad(params_of(2), batch(8)[0], batch(6)[1])


@pytest.mark.bad_input_row(32)
def test_a_replica_on_tasks_that_are_not_there_names_the_first_of_them() -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=2, replicas=2)
    graph = pipe.step(params_of(2), optax.sgd(0.1)).train.graph(*batch(8))
    missing = f"worker/task:2' is not in this cluster.*, at {re.escape(__file__)}:"
    with pytest.raises(UnknownDeviceError, match=missing):
        plan(graph, tasks=PS + NINE[:2], driver=NINE[0])
