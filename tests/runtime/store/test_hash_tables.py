"""Hash tables behind the nodes that move rows: steps of a worker and two ps."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import (
    GraphError,
    InvalidProgramError,
    MalformedMessageError,
    VariableMismatchError,
)
from jgraph.graph.graph import Graph, eval_graph
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_keys import NO_KEY, Keys, shard_of, split_keys
from jgraph.graph.rows.hash_spec import Column, HashSpec, Initial
from jgraph.graph.rows.rows import Layout, merge_rows, route_rows, split_rows
from jgraph.graph.tracing.trace import trace
from jgraph.plan.plan import plan
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import Program, StoredVariable
from jgraph.rpc.wire.program_codec import decode_program, encode_program
from jgraph.runtime.store.entry import RowsOf
from jgraph.runtime.store.hash_rows import initial_rows
from jgraph.runtime.store.hash_shard import HashShard, reshard
from jgraph.runtime.store.store import VariableStore
from tests.support.tasks import Tasks

PS = [TaskName(f"/job:ps/task:{i}") for i in range(2)]
WORKER = TaskName("/job:worker/task:0")
LAYOUT = Layout((1, 1), "hash")
COUNT, WIDTH = 5, 3
RATE = 0.1
ROWS = ValueType((COUNT, WIDTH), "float32", ragged=True)


def spec_of(shard: int) -> HashSpec:
    initial = Initial("normal", 0.1, seed=4)
    columns = (
        Column(f"rows/{shard}", WIDTH, initial=initial),
        Column(f"sums/{shard}", WIDTH, initial=Initial(scale=0.5)),
    )
    return HashSpec(f"ads/{shard}", columns, 1 << 20)


def adagrad() -> Graph:
    """Each row moves towards 1, by Adagrad."""
    specs = [spec_of(0), spec_of(1)]
    rows, sums = (
        [
            jg.Variable(
                f"{name}/{n}", jnp.zeros((1, WIDTH)), device=PS[n], table=specs[n]
            )
            for n in range(2)
        ]
        for name in ("rows", "sums")
    )

    def loss(merged: Any, positions: Any) -> Any:
        found = merged.at[positions].get(mode="fill", fill_value=1)
        return 0.5 * ((found - 1) ** 2).sum()

    def step(keys: jax.Array) -> jax.Array:
        with jg.device(WORKER):
            positions, local = route_rows(keys, layout=LAYOUT, feature="ad")
        old = [table[ids] for table, ids in zip(rows, local, strict=True)]
        with jg.device(WORKER):
            merged = merge_rows(local, old, layout=LAYOUT)
            value, grad = jax.value_and_grad(loss)(merged, positions)
            grads = split_rows(grad, local, layout=LAYOUT)
        for n, ids in enumerate(local):
            total = sums[n][ids] + grads[n] ** 2
            sums[n][ids] = total
            rows[n][ids] = rows[n][ids] - RATE * grads[n] / jnp.sqrt(total)
        result: jax.Array = value
        return result

    return trace(step, jax.ShapeDtypeStruct((COUNT, 2), jnp.uint32))[0]


@pytest.fixture(scope="module")
def program() -> Program:
    program = plan(adagrad(), tasks=[*PS, WORKER], driver=WORKER).program
    message, tensors = encode_program(program)
    assert decode_program(message, tensors) == program
    return program


@pytest.fixture
def tasks(program: Program) -> Tasks:
    tasks = Tasks(*PS, WORKER)
    tasks.register("step", program)
    return tasks


def shards(tasks: Tasks) -> list[HashShard]:
    return [s for ps in PS for _, s in tasks.runtimes[ps].store._tables]


def keys(*numbers: int) -> Keys:
    return np.array(numbers, np.int64)


def test_rows_and_slots_are_those_of_a_dict(tasks: Tasks) -> None:
    rng = np.random.default_rng(0)
    pool = rng.integers(-(2**62), 2**62, 12)
    model: dict[int, list[Any]] = {}
    column = spec_of(0).columns[0]
    for step in range(1, 15):
        batch = rng.choice(pool, COUNT)
        (loss,) = tasks.run("step", step, {"keys": split_keys(batch)})
        for key in batch.tolist():
            new = [initial_rows(keys(key), column)[0], np.full(WIDTH, 0.5, np.float32)]
            model.setdefault(key, new)
        expected = sum(0.5 * ((model[k][0] - 1) ** 2).sum() for k in batch.tolist())
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        for key, count in zip(*np.unique(batch, return_counts=True), strict=True):
            row, total = model[int(key)]
            grad = count * (row - 1)
            total += grad**2
            row -= RATE * grad / np.sqrt(total)
    states = [
        {
            "keys": state["keys"],
            "rows": state[f"rows/{n}"],
            "sums": state[f"sums/{n}"],
        }
        for n, state in enumerate(shard.state() for shard in shards(tasks))
    ]
    for n, state in enumerate(states):
        assert (shard_of(state["keys"], 2) == n).all()
    (whole,) = reshard(states, 1)
    assert whole["keys"].tolist() == sorted(model)
    for n, key in enumerate(sorted(model)):
        np.testing.assert_allclose(whole["rows"][n], model[key][0], rtol=1e-5)
        np.testing.assert_allclose(whole["sums"][n], model[key][1], rtol=1e-5)


def test_only_needed_keys_and_rows_travel(tasks: Tasks) -> None:
    ids = keys(7, 2**60, 7, NO_KEY, -3)
    tasks.start("step", 1, {"keys": split_keys(ids)})
    sizes: dict[str, int] = {"int64": 0, "float32": 0}
    while tasks.messages:
        _, _, _, values = tasks.messages[0]
        for value in values:
            sizes[str(value.dtype)] += len(value)
        tasks.deliver_one()
    assert sizes == {"int64": 3, "float32": 6}
    assert sum(len(shard) for shard in shards(tasks)) == 3


def test_table_of_a_task_says_how_many_rows_it_has(tasks: Tasks) -> None:
    tasks.run("step", 1, {"keys": split_keys(np.arange(COUNT))})
    info = [row for ps in PS for row in tasks.runtimes[ps].store.table()]
    rows = {row.name: row for row in info}
    assert rows["rows/0"].type.shape[0] + rows["rows/1"].type.shape[0] == COUNT
    assert rows["sums/0"].version == 1
    assert tasks.runtimes[PS[0]].store.drop() == 1
    assert tasks.runtimes[PS[0]].store.table() == []


def test_graph_with_a_hash_table_needs_a_cluster() -> None:
    zeros = [jnp.zeros((1, WIDTH))] * 4
    with pytest.raises(GraphError, match="ad: a hash table lives on parameter servers"):
        eval_graph(adagrad(), zeros, [jnp.zeros((COUNT, 2), jnp.uint32)])


def test_one_name_is_one_table(tasks: Tasks) -> None:
    tasks.run("step", 1, {"keys": split_keys(np.arange(COUNT))})
    other = replace(spec_of(0), capacity_bytes=1 << 21)
    variable = StoredVariable("rows/0", ValueType((1, WIDTH), "float32"), table=other)
    with pytest.raises(VariableMismatchError, match="'ads/0' on /job:ps/task:0 has an"):
        tasks.runtimes[PS[0]].store.lookup([RowsOf(variable, keys(1), ROWS)])


def test_keys_of_another_dtype_are_refused() -> None:
    store = VariableStore(PS[0])
    type_ = ValueType((1, WIDTH), "float32")
    variable = StoredVariable("rows/0", type_, table=spec_of(0))
    with pytest.raises(MalformedMessageError, match="came as int32, not int64"):
        store.lookup([RowsOf(variable, np.array([1], np.int32), ROWS)])


def with_variable(program: Program, **changes: Any) -> Program:
    """The program with the first variable of the first ps changed."""
    partitions = list(program.partitions)
    at = next(n for n, p in enumerate(partitions) if p.task == PS[0])
    first, *others = partitions[at].variables
    variables = (replace(first, **changes), *others)
    partitions[at] = replace(partitions[at], variables=variables)
    return replace(program, partitions=tuple(partitions))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "rows/9"}, "is no column of the hash table 'ads/0'"),
        ({"type": ValueType((1, 9), "float32")}, "is no column of the hash table"),
        ({"table": None}, "ids of type"),
    ],
)
def test_program_that_uses_a_table_wrongly_is_refused(
    program: Program, changes: dict[str, Any], says: str
) -> None:
    message, tensors = encode_program(with_variable(program, **changes))
    with pytest.raises(InvalidProgramError, match=says):
        decode_program(message, tensors)


def test_table_that_cannot_be_is_refused_when_it_arrives(program: Program) -> None:
    message, tensors = encode_program(program)
    for partition in message.partitions:
        for variable in partition.variables:
            variable.table.eviction = "fifo"
    with pytest.raises(InvalidProgramError, match="eviction='fifo'; use 'lru'"):
        decode_program(message, tensors)
