"""The reference interpreter refuses what a real executor must refuse."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import FeedError, GraphError, InternalError, UninitializedError
from jgraph.graph.rows.hash_spec import Column, HashSpec
from jgraph.plan.plan import plan
from jgraph.plan.program.nodes import ReadNode, RecvNode
from jgraph.plan.program.program import Partition, Program
from tests.support.graph_interpreter import run_program
from tests.support.plans import DRIVER, PS, TASKS, WORKERS, graph_of


def program() -> Program:
    w = jg.Variable("w", jnp.ones((3,)), device=PS[0])

    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            return jnp.sin(w[...] + x)

    graph = graph_of(step, np.zeros(3, np.float32))
    return plan(graph, tasks=TASKS, driver=DRIVER).program


def without_sends(partition: Partition) -> Partition:
    kept = tuple(n for n in partition.nodes if type(n).__name__ != "SendNode")
    return dataclasses.replace(partition, nodes=kept)


X = {"x": np.zeros(3, np.float32)}


def test_a_missing_feed_is_named() -> None:
    with pytest.raises(FeedError, match="feed 'x' is missing"):
        run_program(program(), {("", "w"): np.ones(3, np.float32)}, {})


def test_a_variable_without_a_value_is_named_with_its_task() -> None:
    with pytest.raises(UninitializedError, match="'w' on /job:ps/task:0 has no value"):
        run_program(program(), {}, X)


def test_partitions_that_wait_for_each_other_are_reported_and_do_not_hang() -> None:
    whole = program()
    mute = tuple(map(without_sends, whole.partitions))
    stuck = dataclasses.replace(whole, partitions=mute)
    with pytest.raises(InternalError, match=r"wait for each other.*RecvNode"):
        run_program(stuck, {("", "w"): np.ones(3, np.float32)}, X)


def test_a_node_before_one_it_must_follow_is_reported() -> None:
    whole = program()
    nodes = list(whole.partition(PS[0]).nodes)
    assert isinstance(nodes[0], ReadNode)
    nodes[0] = dataclasses.replace(nodes[0], after=(1,))
    wrong = dataclasses.replace(whole.partition(PS[0]), nodes=tuple(nodes))
    others = tuple(p for p in whole.partitions if p.task != PS[0])
    bad = dataclasses.replace(whole, partitions=(wrong, *others))
    with pytest.raises(InternalError, match="nodes that come later"):
        run_program(bad, {("", "w"): np.ones(3, np.float32)}, X)


def test_a_hash_table_is_refused_where_there_are_plain_arrays() -> None:
    whole, spec = program(), HashSpec("ads", (Column("w", 3),), 1 << 20)
    (w,) = whole.partition(PS[0]).variables
    column = dataclasses.replace(w, table=spec)
    held = dataclasses.replace(whole.partition(PS[0]), variables=(column,))
    others = tuple(p for p in whole.partitions if p.task != PS[0])
    hashed = dataclasses.replace(whole, partitions=(held, *others))
    with pytest.raises(GraphError, match=r"'w' on /job:ps/task:0 .* table 'ads'"):
        run_program(hashed, {("", "w"): np.ones(3, np.float32)}, X)


def test_executables_are_shared_between_runs() -> None:
    compiled: dict[Any, Any] = {}
    store = {("", "w"): np.ones(3, np.float32)}
    first = run_program(program(), store, X, compiled)
    kept = dict(compiled)
    second = run_program(program(), store, X, compiled)
    assert compiled == kept
    np.testing.assert_array_equal(first[0], second[0])


def test_every_partition_of_the_example_has_something_to_do() -> None:
    whole = program()
    assert {p.task for p in whole.partitions} == {DRIVER, WORKERS[1], PS[0]}
    kinds = {type(n) for p in whole.partitions for n in p.nodes}
    assert RecvNode in kinds
