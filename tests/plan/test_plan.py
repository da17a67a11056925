"""Whole plans of real training steps: they compute what one jit computes."""

import functools
import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import jgraph as jg
from jgraph.errors import UnknownDeviceError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.nodes import ReadNode, SegmentNode, SendNode
from tests.support.plans import (
    DRIVER,
    EXACT,
    FAST,
    PS,
    TASKS,
    WORKERS,
    Values,
    assert_same,
    check_plan,
    check_program,
    graph_of,
    nodes_of,
    reference,
    segments_per_task,
    simulated,
)
from tests.support.programs import (
    EXAMPLES,
    MLP,
    Transformer,
    batch_of,
    linen_step,
    staged_mlp,
    tokens,
)
from tests.support.scattered import scattered, traced

LARGE = {
    *("lstm_momentum", "transformer_momentum", "resnet_block_sgd"),
    *("mlp_lamb", "mlp_adamw_schedule", "mlp_sgd"),
}
"""Models that compile for long, and like which another one is."""
GOLDEN = pathlib.Path(__file__).parent / "testdata" / "plan.txt"


@functools.cache
def wanted(name: str) -> tuple[list[Any], Values]:
    example, graph, values = traced(name)
    return reference(graph, values, example.args, FAST)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in LARGE else ())
        for name in EXAMPLES
    ],
)
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**16))
def test_a_step_cut_anywhere_computes_what_one_jit_computes(
    name: str, seed: int
) -> None:
    example, graph, values = traced(name)
    stamped, tasks, homes = scattered(graph, seed)
    planned = plan(stamped, tasks=tasks, driver=tasks[0], variable_tasks=homes)
    check_program(planned.program)
    assert planned.variable_tasks == homes
    got = simulated(planned, values, example.args, FAST)
    assert_same(got, wanted(name), exact=False)


@pytest.mark.parametrize(
    "name",
    ["mlp_clip_adam", "mlp_momentum_nnx", "embedding_sgd_nnx", "staged_mlp_adam"],
)
def test_a_step_is_bit_equal_to_one_jit_without_fusion(name: str) -> None:
    example, graph, values = traced(name)
    planned = plan(graph, tasks=TASKS, driver=DRIVER)
    got = simulated(planned, values, example.args, EXACT)
    assert_same(got, reference(graph, values, example.args, EXACT), exact=True)


@functools.cache
def on_two_ps(name: str) -> Plan:
    return plan(traced(name)[1], tasks=TASKS, driver=DRIVER)


LINEN_PS = ["mlp_sgd", "mlp_adam", "mlp_adamw_schedule", "mlp_clip_adam", "mlp_lamb"]
OTHER_PS = ["mlp_momentum_nnx", "mlp_adafactor", "cnn_adam", "transformer_momentum"]


@pytest.mark.parametrize("name", LINEN_PS + OTHER_PS)
def test_one_worker_and_each_ps_have_one_segment(name: str) -> None:
    assert segments_per_task(on_two_ps(name)) == {PS[0]: 1, PS[1]: 1, DRIVER: 1}


@pytest.mark.parametrize("name", LINEN_PS)
def test_an_update_reads_and_writes_its_variables_in_one_segment(name: str) -> None:
    """A gradient applied meanwhile by another worker is not lost."""
    planned = on_two_ps(name)
    updated = 0
    for task in PS:
        (segment,) = nodes_of(planned, task, SegmentNode)
        read_before = {
            value for read in nodes_of(planned, task, ReadNode) for value in read.outs
        }
        assert not read_before & set(segment.inputs)
        updated += len(segment.updates)
    assert updated == len(planned.graph.variables)


@pytest.mark.parametrize("name", LINEN_PS)
def test_only_parameters_counts_and_gradients_cross(name: str) -> None:
    """Each parameter to the worker, its gradient back, and a few single numbers."""
    planned = on_two_ps(name)
    params = [v for v in planned.graph.variables if v.name.startswith("params")]
    nbytes = sum(4 * int(np.prod(v.shape)) for v in params)
    numbers = planned.nbytes_per_step - 2 * nbytes
    assert 0 <= numbers <= 16


def test_clipping_by_global_norm_crosses_as_one_number_per_task() -> None:
    planned = on_two_ps("mlp_clip_adam")
    small = [v for e in planned.edges for v in e.values if v.shape == ()]
    adam = [v for e in on_two_ps("mlp_adam").edges for v in e.values if v.shape == ()]
    assert len(small) - len(adam) <= 2 * len(PS)


@pytest.mark.parametrize(
    ("stages", "tx", "count"),
    [
        (2, optax.sgd(0.1), 3),
        (2, optax.adam(0.1), 3),
        (4, optax.adam(0.1), 7),
    ],
    ids=["sgd", "adam", "adam, 4 stages"],
)
def test_a_pipeline_of_n_stages_has_2n_minus_1_segments(
    stages: int, tx: Any, count: int
) -> None:
    example = staged_mlp(stages, tx)
    graph = graph_of(example.fn, *example.args, variables=example.variables)
    planned = plan(graph, tasks=WORKERS, driver=DRIVER)
    assert len(planned.segments) == count


def test_clipping_in_a_pipeline_exchanges_partial_norms() -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    example = staged_mlp(2, tx)
    planned = check_plan(
        example.fn, *example.args, variables=example.variables, tasks=WORKERS
    )
    assert len(planned.segments) == 4
    plain = staged_mlp(2, optax.adam(0.1))
    graph = graph_of(plain.fn, *plain.args, variables=plain.variables)
    without = plan(graph, tasks=WORKERS, driver=DRIVER)
    assert planned.nbytes_per_step - without.nbytes_per_step <= 16


def test_a_transformer_of_two_stages_has_three_segments() -> None:
    model = Transformer(devices=(WORKERS[0], WORKERS[1]))
    example = linen_step(
        model, tokens(), optax.sgd(0.1), device=WORKERS[0], compute=None
    )
    graph = graph_of(example.fn, *example.args, variables=example.variables)
    second = ["Attention_1", "LayerNorm_2", "LayerNorm_3"]
    second += ["Dense_2/", "Dense_3/", "Dense_4/"]
    homes = {
        v.key: WORKERS[any(part in v.name for part in second)] for v in graph.variables
    }
    planned = plan(graph, tasks=WORKERS, driver=DRIVER, variable_tasks=homes)
    assert len(planned.segments) == 3


def test_two_workers_that_share_a_ps_have_one_segment_each() -> None:
    w = jg.Variable("w", np.ones((3, 3), np.float32), device=PS[0])

    def step(x: Any) -> Any:
        grads = []
        for worker, part in zip(WORKERS[:2], (x[:2], x[2:]), strict=True):
            with jg.device(worker):
                grads.append((part.T @ (part @ w[...])) / 2)
        w[...] = w[...] - 0.1 * (grads[0] + grads[1])

    planned = check_plan(step, np.eye(4, 3, dtype=np.float32), variables=[w])
    assert segments_per_task(planned) == {WORKERS[0]: 1, WORKERS[1]: 1, PS[0]: 1}
    (sent,) = [n for n in nodes_of(planned, PS[0], SendNode) if n.dst == WORKERS[1]]
    assert len(sent.values) == 1


def test_renaming_the_worker_makes_the_other_replicas_program() -> None:
    program = on_two_ps("mlp_sgd").program
    renamed = program.rename_task(WORKERS[0], WORKERS[3])
    assert renamed.driver == WORKERS[3]
    check_program(renamed)
    assert renamed.rename_task(WORKERS[3], WORKERS[0]) == program


def test_partial_stamps_take_the_default_and_free_equations_do_not() -> None:
    w = jg.Variable("w", np.ones((64, 8), np.float32), device="/job:ps")

    def step(x: Any) -> None:
        with jg.device("/job:worker"):
            g = x.T @ (x @ w[...])
        w[...] = w[...] - 0.1 * g

    default = DeviceSpec.from_string(WORKERS[2])
    planned = check_plan(
        step,
        np.ones((2, 64), np.float32),
        variables=[w],
        default=default,
        driver=WORKERS[2],
    )
    assert {s.task for s in planned.segments} == {WORKERS[2], PS[0]}
    assert planned.segments[-1].updates == ("w",)


def test_equal_graphs_give_equal_programs() -> None:
    def make() -> Plan:
        example = linen_step(MLP(), batch_of(5), optax.adam(0.1))
        graph = graph_of(example.fn, *example.args, variables=example.variables)
        return plan(graph, tasks=TASKS, driver=DRIVER)

    assert make().program == make().program


def test_equal_segments_of_two_tasks_share_their_code() -> None:
    def step(x: Any) -> Any:
        outs = []
        for worker in WORKERS[1:3]:
            with jg.device(worker):
                outs.append(jnp.sin(x) @ x)
        return outs

    planned = check_plan(step, np.ones((3, 3), np.float32))
    assert len(planned.segments) == 2
    assert len(planned.program.segments) == 1


def test_a_driver_outside_the_cluster_is_refused() -> None:
    graph = graph_of(jnp.sin, np.float32(1))
    with pytest.raises(UnknownDeviceError, match="driver '/job:chief/task:0'"):
        plan(graph, tasks=TASKS, driver=TaskName("/job:chief/task:0"))


def test_the_table_of_a_plan_is_stable(rewrite: bool) -> None:
    text = str(on_two_ps("mlp_clip_adam")) + "\n"
    if rewrite:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert any_counts(text) == any_counts(GOLDEN.read_text())


def any_counts(table: str) -> str:
    """A table without what differs between versions of JAX: how many equations."""
    return re.sub(r"\d+ equations .*? more *", "N equations  ", table)
