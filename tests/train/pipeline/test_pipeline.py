"""Pipelines: the loss and gradients of one piece, in the order of the schedule."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.errors import ConfigError, FeedError, PipelineError
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.nodes import SegmentNode
from jgraph.plan.schedule import Pass, schedule
from tests.support.layers import Embed, Head, layer, next_token, params_of, squares
from tests.support.plans import (
    FAST,
    PS,
    WORKERS,
    Values,
    assert_same,
    check_program,
    initial_values,
    simulated,
)

WIDTH = 6


def batch(size: int = 8) -> tuple[Any, Any]:
    x, t = jax.random.normal(jax.random.key(2), (2, size, WIDTH))
    return x, t


def planned(pipe: jg.Pipeline, params: Any, tx: Any, *args: Any) -> tuple[Plan, Values]:
    step = pipe.step(params, tx)
    graph, variables = step.train.trace(*args)
    made = plan(graph, tasks=PS + WORKERS, driver=WORKERS[0])
    check_program(made.program)
    return made, initial_values(variables)


def whole_step(
    stages: Sequence[Callable[[Any, Any], Any]], params: Any, tx: Any, x: Any, t: Any
) -> tuple[Any, Any]:
    """Returns (loss, new parameters) of the step in one piece."""

    def loss(params: Any) -> Any:
        h = x
        for stage, tree in zip(stages, params, strict=True):
            h = stage(tree, h)
        return squares(h, t)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    updates, _ = tx.update(grads, tx.init(params), params)
    return value, optax.apply_updates(params, updates)


@pytest.mark.parametrize(
    ("name", "stages", "tasks", "microbatches"),
    [
        pytest.param("gpipe", 4, 4, 4, marks=pytest.mark.nightly),
        pytest.param("1f1b", 3, 3, 8, marks=pytest.mark.nightly),
        ("interleaved", 4, 2, 4),
        ("1f1b", 1, 1, 1),
    ],
)
def test_a_step_is_that_of_the_model_in_one_piece(
    name: Any, stages: int, tasks: int, microbatches: int
) -> None:
    pipe = jg.Pipeline(
        [layer] * stages,
        squares,
        microbatches=microbatches,
        schedule=name,
        tasks=tasks,
    )
    params, tx, (x, t) = params_of(stages, WIDTH), optax.sgd(0.5), batch()
    made, values = planned(pipe, params, tx, x, t)
    (loss,), after = simulated(made, values, (x, t), FAST)
    wanted = whole_step([layer] * stages, params, tx, x, t)
    new = [
        {name: after[f"params/{stage}/{name}"] for name in ("w", "b")}
        for stage in range(stages)
    ]
    assert_same((loss, new), wanted, exact=False)


@pytest.mark.parametrize(
    ("name", "stages", "tasks"),
    [
        pytest.param("gpipe", 3, 3, marks=pytest.mark.nightly),
        ("1f1b", 3, 3),
        ("interleaved", 4, 2),
    ],
)
def test_every_task_runs_its_passes_in_the_order_of_the_schedule(
    name: Any, stages: int, tasks: int
) -> None:
    pipe = jg.Pipeline(
        [layer] * stages, squares, microbatches=4, schedule=name, tasks=tasks
    )
    made, _ = planned(pipe, params_of(stages, WIDTH), optax.sgd(0.5), *batch())
    for number, row in enumerate(pipe.schedule.rows):
        names = [
            s.label.removesuffix(" and back")
            for s in made.segments
            if s.task == WORKERS[number] and "@" in s.label
        ]
        passes = [str(work) for work in row]
        assert names == [p for p in passes if p in names]
        assert not {*passes} - {*names, *(f"B{k}@{stages - 1}" for k in range(4))}


def test_more_microbatches_are_more_segments_of_the_same_code() -> None:
    codes = []
    for microbatches in (2, 5):
        pipe = jg.Pipeline([layer] * 2, squares, microbatches=microbatches)
        made, _ = planned(
            pipe, params_of(2, WIDTH), optax.sgd(0.5), *batch(microbatches * 2)
        )
        passes = [s for s in made.segments if "@" in s.label]
        assert len(passes) == 3 * microbatches
        codes.append(len({s.digest for s in passes}))
    assert codes == [5, 5]


@pytest.mark.nightly  # smaller: test_replicas.py, tests/train/test_in_graph.py
def test_equal_stages_share_their_code() -> None:
    pipe = jg.Pipeline([layer] * 4, squares, microbatches=4)
    made, _ = planned(pipe, params_of(4, WIDTH), optax.sgd(0.5), *batch())
    middle = [s for s in made.segments if "@1" in s.label or "@2" in s.label]
    assert len({s.digest for s in middle}) == 3


def kept_by(made: Plan, label: str) -> list[str]:
    """Returns the types of what a pass on the first worker leaves."""
    digest = next(s.digest for s in made.segments if s.label == label)
    program = made.program.partition(WORKERS[0])
    nodes = [n for n in program.nodes if isinstance(n, SegmentNode)]
    node = next(n for n in nodes if n.digest == digest)
    return [str(program.values[v]) for v in node.outs]


def test_a_pass_keeps_no_parameter_and_nothing_that_is_cheap_to_make_again() -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=2)
    made, _ = planned(pipe, params_of(2, WIDTH), optax.sgd(0.5), *batch(4))
    # The output alone: 1 - tanh(…) ** 2 follows from it.
    assert kept_by(made, "F0@0") == ["float32[2,6]"]


def test_linen_stages_and_integers_between_them() -> None:
    stages = [Embed(WIDTH), Head()]
    pipe = jg.Pipeline(stages, next_token, microbatches=2)
    ids = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
    params = pipe.init(0, ids)

    def whole(params: Any) -> Any:
        h = stages[0].apply({"params": params[0]}, ids)
        return next_token(stages[1].apply({"params": params[1]}, h), ids)

    assert_same(
        jax.jit(pipe.value_and_grad)(params, ids, ids),
        jax.jit(jax.value_and_grad(whole))(params),
        exact=False,
    )


def test_nnx_stages() -> None:
    stages = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(2)]
    pipe = jg.Pipeline(stages, squares, microbatches=2)
    x, t = batch(4)
    params = pipe.init(0, x)

    def whole(params: Any) -> Any:
        h = x
        for tree in params:
            h = h @ tree["kernel"] + tree["bias"]
        return squares(h, t)

    loss, grads = jax.jit(pipe.value_and_grad)(params, x, t)
    assert loss == pytest.approx(whole(params))
    assert grads[0]["kernel"].shape == (WIDTH, WIDTH)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gradients_of_the_input_are_those_of_the_whole_batch(name: Any) -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=4, schedule=name)
    params, (x, t) = params_of(2, WIDTH), batch()

    def whole(x: Any) -> Any:
        return squares(layer(params[1], layer(params[0], x)), t)

    run = jax.jit(partial(pipe.value_and_grad, input_gradients=True))
    _, (_, gradient) = run(params, x, t)
    assert_same(gradient, jax.jit(jax.grad(whole))(x), exact=False)


def test_a_checkpointed_stage_keeps_its_input_only() -> None:
    def deep(params: Any, x: Any) -> Any:
        return layer(params, layer(params, layer(params, x)))

    sizes = []
    for stage in (deep, jax.checkpoint(deep)):
        pipe = jg.Pipeline([stage] * 2, squares, microbatches=2)
        made, _ = planned(pipe, params_of(2, WIDTH), optax.sgd(0.5), *batch(4))
        sizes.append(len(kept_by(made, "F0@0")))
    assert sizes == [3, 1]


def test_the_readable_schedule_names_the_bubble() -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=2)
    assert str(pipe.schedule).startswith(
        "1f1b: 2 stages on 2 tasks, 2 microbatches, bubble 33.3%"
    )
    assert pipe.schedule == schedule("1f1b", stages=2, tasks=2, microbatches=2)
    assert Pass(0, 0) in pipe.schedule.rows[0]


def refused(sentence: str, **changed: Any) -> None:
    """Runs a step of two stages with something changed, which is refused."""
    x, t = batch(changed.pop("size", 8))
    stages = changed.pop("stages", [layer, layer])
    loss = changed.pop("loss", squares)
    params = changed.pop("params", params_of(2, WIDTH))

    def run() -> None:
        pipe = jg.Pipeline(stages, loss, **{"microbatches": 4, **changed})
        pipe.value_and_grad(params, x, t)

    with pytest.raises(PipelineError, match=sentence) as raised:
        run()
    assert raised.value.code == "JG-234"


def test_what_cannot_be_a_pipeline_is_refused_with_a_sentence() -> None:
    refused("a pipeline needs a stage", stages=[])
    refused("stages is a function; give a list", stages=layer)
    refused("loss is 'mse'; give a function of outputs and targets", loss="mse")
    refused("microbatches is 1.5; a batch is cut into 1 or more", microbatches=1.5)
    refused("microbatches is '2'; a batch is cut into 1 or more", microbatches="2")
    refused("stage 1 .'int'. is no stage", stages=[layer, 3])
    refused("there are 'gpipe', '1f1b' and 'interleaved'", schedule="zigzag")
    refused("there are 2 stages for 1 tasks", tasks=1)
    refused("params has 1 trees and there are 2 stages", params=params_of(1, WIDTH))
    refused(
        r"stage 1 \('layer'\) does not take float32\[2,3\]: dot_general requires",
        stages=[lambda p, x: x[:, :3], layer],
    )
    refused(r"loss gives float32\[2,6\]; it has to give one", loss=lambda y, t: y - t)
    refused(
        r"gives int32\[2,6\], which has no gradient",
        stages=[lambda p, x: x.astype(jnp.int32), layer],
    )
    refused("gives a float; it has to give arrays", stages=[lambda p, x: 1.0, layer])
    refused("has a parameter .'w'. of int32", params=[{"w": jnp.ones(2, int)}] * 2)


def test_an_optimizer_of_a_step_that_is_none_is_refused() -> None:
    pipe = jg.Pipeline([layer], squares, microbatches=4)
    with pytest.raises(ConfigError, match="tx is a str; give an optax optimizer"):
        pipe.step(params_of(1, WIDTH), "adam")


def test_a_batch_that_the_microbatches_do_not_divide_is_refused() -> None:
    pipe = jg.Pipeline([layer], squares, microbatches=4)
    with pytest.raises(
        FeedError, match="x has 10 examples, which cannot be cut into 4"
    ):
        pipe.value_and_grad(params_of(1, WIDTH), *batch(10))


def test_modules_with_other_state_and_functions_have_no_initial_parameters() -> None:
    x, _ = batch()
    norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(PipelineError, match=r"than parameters \(batch_stats\)"):
        jg.Pipeline([nn.BatchNorm(False)], squares, microbatches=1).init(0, x)
    with pytest.raises(PipelineError, match=r"than parameters \(BatchStat\)"):
        jg.Pipeline([norm], squares, microbatches=1)
    with pytest.raises(PipelineError, match="make the list of parameters yourself"):
        jg.Pipeline([layer], squares, microbatches=1).init(0, x)
    with pytest.raises(PipelineError, match=r"'Head'\) does not take float32\[8,3\]"):
        jg.Pipeline([nn.Dense(3), Head()], squares, microbatches=1).init(0, x)


def test_a_stage_that_reads_a_variable_itself_is_refused() -> None:
    w = jg.Variable("w", jnp.ones(WIDTH))
    pipe = jg.Pipeline([lambda p, x: x * w[...]], squares, microbatches=1)
    step = pipe.step(params_of(1, WIDTH), optax.sgd(0.1))
    with pytest.raises(PipelineError, match="reads a variable itself; give its value"):
        step.train.graph(*batch())


def test_half_precision_stages_cast_their_parameters_again() -> None:
    def half(params: Any, x: Any) -> Any:
        w = params["w"].astype(jnp.bfloat16)
        return jnp.tanh(x.astype(jnp.bfloat16) @ w)

    pipe = jg.Pipeline([half] * 2, squares, microbatches=2, schedule="gpipe")
    made, _ = planned(pipe, params_of(2, WIDTH), optax.sgd(0.5), *batch(4))
    assert "bfloat16[2,6]" in kept_by(made, "F0@0")
    for number in (0, 1):
        types = {str(t) for t in made.program.partition(WORKERS[number]).values}
        assert f"bfloat16[{WIDTH},{WIDTH}]" not in types
