"""The graph of a training step, and where its variables go."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.errors import GraphError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import eval_graph
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import plan
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.model.trees import group_with_parameters
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.train_step import TrainStep
from tests.support.graph_interpreter import run_program
from tests.support.models import (
    LinenNorm,
    NnxMLP,
    NnxNorm,
    data,
    linen_norm_loss,
    nnx_loss,
)

PS = [TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")]
WORKER = TaskName("/job:worker/task:0")


def in_turn(sizes: Mapping[str, int]) -> dict[str, TaskName]:
    return {name: PS[i % 2] for i, name in enumerate(sorted(sizes))}


def make_step(
    tx: Any, loss: Any = nnx_loss, model: Any = NnxMLP, **options: Any
) -> TrainStep:
    return TrainStep(adapt(model(rngs=nnx.Rngs(0)), loss, seed=0), tx, **options)


def batch() -> tuple[Any, Any]:
    x, y = data(8)
    return x, y


def test_variables_are_named_by_their_paths() -> None:
    assert make_step(optax.sgd(0.1, momentum=0.9), model=NnxNorm).names == [
        "global_step",
        "opt/0/trace/first/bias",
        "opt/0/trace/first/kernel",
        "opt/0/trace/last/bias",
        "opt/0/trace/last/kernel",
        "opt/0/trace/norm/bias",
        "opt/0/trace/norm/scale",
        "params/first/bias",
        "params/first/kernel",
        "params/last/bias",
        "params/last/kernel",
        "params/norm/bias",
        "params/norm/scale",
        "state/norm/mean",
        "state/norm/var",
    ]


def test_linen_variables_are_named_by_their_paths() -> None:
    adapter = adapt(
        LinenNorm(), linen_norm_loss, seed=0, data=as_dataset(data()[0][:1])
    )
    names = TrainStep(adapter, optax.sgd(0.1)).names
    assert "params/Dense_0/kernel" in names
    assert "state/batch_stats/BatchNorm_0/mean" in names


def test_feeds_and_fetches_go_by_the_users_names() -> None:
    step = make_step(optax.sgd(0.1), lambda m, b: (nnx_loss(m, b), {"one": 1.0}))
    graph = step.graph(batch())
    names = [feed.name for feed in graph.feeds]
    assert names == ["batch[0]", "batch[1]", "step", "replica"]
    assert step.metric_names(graph) == ["loss", "one"]


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(1e-2),
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        optax.adafactor(1e-2, min_dim_size_to_factor=2),
        pytest.param(optax.lamb(1e-2), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    "check_finite", [pytest.param(False, marks=pytest.mark.nightly), True]
)
def test_step_over_two_servers_and_a_worker_equals_the_whole(
    tx: Any, check_finite: bool
) -> None:
    step = make_step(
        tx, model=NnxNorm, arrangement=Arrangement(in_turn), check_finite=check_finite
    )
    graph = step.graph(batch())
    planned = plan(
        graph,
        tasks=[*PS, WORKER],
        driver=WORKER,
        default=DeviceSpec.from_string(WORKER),
    )
    assert {planned.variable_tasks["", n] for n in step.names} == set(PS)
    assert len(planned.segments) <= 5
    values = [np.asarray(v) for v in step.initial_values]
    feeds = [*batch(), np.int32(3), np.int32(1)]
    fetches, new = jax.jit(lambda v, f: eval_graph(graph, v, f))(values, feeds)
    store = {("", n): v for n, v in zip(step.names, values, strict=True)}
    names = [name for name, _ in planned.program.feeds]
    given = dict(zip([f.name for f in graph.feeds], feeds, strict=True))
    found = run_program(planned.program, store, {n: given[n] for n in names})
    for a, b in zip(found, fetches, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)
    for name, value in zip(step.names, new, strict=True):
        np.testing.assert_allclose(store["", name], value, 1e-5, 1e-6)


def test_update_lands_where_its_variables_are() -> None:
    step = make_step(optax.adam(1e-2), arrangement=Arrangement(in_turn))
    planned = plan(
        step.graph(batch()),
        tasks=[*PS, WORKER],
        driver=WORKER,
        default=DeviceSpec.from_string(WORKER),
    )
    assert sorted(s.task for s in planned.segments) == sorted([*PS, WORKER])
    worker = next(s for s in planned.segments if s.task == WORKER)
    assert not worker.updates
    down = sum(e.nbytes for e in planned.edges if e.dst == WORKER)
    parameters = sum(
        v.nbytes
        for n, v in zip(step.names, step.initial_values, strict=True)
        if n.startswith("params/")
    )
    assert down == parameters


def test_optimizer_state_is_grouped_with_the_longest_matching_parameter() -> None:
    paths = [
        ("params", "a", "w"),
        ("params", "w"),
        ("opt", "0", "mu", "a", "w"),
        ("opt", "0", "mu", "w"),
        ("opt", "0", "count"),
        ("state", "a", "w"),
        ("global_step",),
    ]
    assert group_with_parameters(paths) == [
        "params/a/w",
        "params/w",
        "params/a/w",
        "params/w",
        "opt/0/count",
        "state/a/w",
        "global_step",
    ]


def test_parameters_keep_their_dtype() -> None:
    class Half(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2, param_dtype=jnp.bfloat16)(x)

    def loss(params: Any, batch: Any) -> Any:
        outputs: Any = Half().apply({"params": params}, batch[0])
        return jnp.mean(outputs**2)

    adapter = adapt(Half(), loss, seed=0, data=as_dataset(data()[0][:1]))
    step = TrainStep(adapter, optax.adam(1e-2))
    graph = step.graph(batch())
    feeds = [*batch(), np.int32(0), np.int32(0)]
    _, new = jax.jit(lambda v: eval_graph(graph, v, feeds))(step.initial_values)
    assert [v.dtype for v in new] == [v.dtype for v in step.initial_values]


def test_loss_that_adds_state_to_the_model_is_refused() -> None:
    def loss(model: Any, batch: Any) -> Any:
        model.extra = nnx.BatchStat(jnp.zeros(3))
        return nnx_loss(model, batch)

    with pytest.raises(GraphError, match="changed which state the model has"):
        make_step(optax.sgd(0.1), loss).graph(batch())
