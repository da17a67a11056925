"""Rows of stored variables: looked up and updated in place, none lost, none torn."""

import hashlib
import threading
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import MalformedMessageError, RowIdError
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.rows import Layout, merge_rows, route_rows, split_rows
from jgraph.graph.tracing.trace import trace
from jgraph.plan.plan import plan
from jgraph.plan.program.nodes import SegmentNode, ValueType, WriteNode
from jgraph.plan.program.program import Partition, Program, SegmentCode, StoredVariable
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.runtime.loaded import load_partition
from jgraph.runtime.store.entry import RowsOf
from jgraph.runtime.store.store import VariableStore
from tests.support.tasks import Tasks

PS = TaskName("/job:ps/task:0")
WORKERS = [TaskName(f"/job:worker/task:{i}") for i in range(2)]
SIZE, WIDTH, COUNT = 100, 4, 5
TABLE = StoredVariable("table", ValueType((SIZE, WIDTH), "float32"))
ROWS = ValueType((COUNT, WIDTH), "float32", ragged=True)


def ids(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.int32)


@pytest.fixture
def store() -> VariableStore:
    store = VariableStore(PS)
    store.write([TABLE], [np.zeros((SIZE, WIDTH), np.float32)])
    return store


@jax.jit
def plus_one(taken: Any) -> Any:
    return [taken + 1]


def add(store: VariableStore, rows: np.ndarray[Any, Any]) -> None:
    store.update([], [], plus_one, [RowsOf(TABLE, rows, ROWS)])


def test_lookup_gives_as_many_rows_as_ids(store: VariableStore) -> None:
    add(store, ids(3, 7))
    (found,) = store.lookup([RowsOf(TABLE, ids(7, 2, 7), ROWS)])
    assert found[:, 0].tolist() == [1.0, 0.0, 1.0]
    (nothing,) = store.lookup([RowsOf(TABLE, ids(), ROWS)])
    assert nothing.shape == (0, WIDTH)


def test_update_changes_the_named_rows_and_no_others(store: VariableStore) -> None:
    add(store, ids(0, 99))
    assert float(store.read([TABLE])[0].sum()) == 2 * WIDTH
    assert [row.version for row in store.table()] == [1]


def test_update_of_rows_moves_no_memory(store: VariableStore) -> None:
    add(store, ids(1))
    before = store.read([TABLE])[0].ctypes.data
    add(store, ids(2))
    assert store.read([TABLE])[0].ctypes.data == before


def test_whole_view_keeps_its_values_while_rows_change(store: VariableStore) -> None:
    whole = store.read([TABLE])[0]
    part = whole[:4].reshape(-1)
    del whole
    add(store, ids(1))
    assert float(part.sum()) == 0.0
    assert float(store.read([TABLE])[0].sum()) == WIDTH


def test_rows_and_whole_updates_take_turns(store: VariableStore) -> None:
    double = jax.jit(lambda whole: [whole * 2], donate_argnums=0)
    for _ in range(3):
        add(store, ids(5))
        store.update([TABLE], [], double)
    assert store.lookup([RowsOf(TABLE, ids(5), ROWS)])[0][0, 0] == 14.0
    store.write([TABLE], [np.ones((SIZE, WIDTH), np.float32)])
    assert store.lookup([RowsOf(TABLE, ids(5), ROWS)])[0][0, 0] == 1.0


def test_array_that_nobody_else_has_is_stored_without_a_copy() -> None:
    store = VariableStore(PS)
    made = jnp.zeros((SIZE, WIDTH)) + 1
    pointer = made.unsafe_buffer_pointer()
    store.write([TABLE], [made], owned=[0])
    assert store.read([TABLE])[0].ctypes.data == pointer


@pytest.mark.parametrize("wrong", [ids(-1), ids(2, SIZE)], ids=str)
def test_row_that_is_not_there_is_refused_and_nothing_changes(
    store: VariableStore, wrong: np.ndarray[Any, Any]
) -> None:
    with pytest.raises(MalformedMessageError, match="a table of 100 rows"):
        store.lookup([RowsOf(TABLE, wrong, ROWS)])
    with pytest.raises(MalformedMessageError, match="a table of 100 rows"):
        add(store, wrong)
    with pytest.raises(MalformedMessageError, match="6 rows of 'table'"):
        add(store, ids(1, 2, 3, 4, 5, 6))
    assert float(store.read([TABLE])[0].sum()) == 0.0


def test_every_concurrent_update_counts_and_no_reader_sees_half_of_one(
    store: VariableStore,
) -> None:
    torn: list[float] = []

    def worker(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            some = np.sort(rng.choice(SIZE, COUNT, replace=False)).astype(np.int32)
            add(store, some)
            (seen,) = store.lookup([RowsOf(TABLE, some, ROWS)])
            torn.extend(np.ptp(seen, axis=1))

    threads = [threading.Thread(target=worker, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert float(store.read([TABLE])[0].sum()) == 4 * 50 * COUNT * WIDTH
    assert not any(torn)


def routed_program(count: int = COUNT) -> Program:
    """A worker reads rows and sends one for each back; the ps adds them."""
    layout = Layout((SIZE,))
    table = jg.Variable("table", jnp.zeros((SIZE, WIDTH)), device=PS)

    def step(ids: jax.Array) -> jax.Array:
        with jg.device(WORKERS[0]):
            _, local = route_rows(ids, layout=layout, feature="colour")
        rows = table[local[0]]
        with jg.device(WORKERS[0]):
            merged = merge_rows(local, [rows], layout=layout)
            (ones,) = split_rows(merged * 0 + 1, local, layout=layout)
        table[local[0]] = rows + ones
        with jg.device(WORKERS[0]):
            total: jax.Array = merged.sum()
        return total

    return planned(step, count)


def ordinary_program() -> Program:
    """The same without routing: ids as they are."""
    table = jg.Variable("table", jnp.zeros((SIZE, WIDTH)), device=PS)

    def step(ids: jax.Array) -> jax.Array:
        rows = table[ids]
        with jg.device(WORKERS[0]):
            ones = rows * 0 + 1
            total: jax.Array = rows.sum()
        table[ids] = rows + ones
        return total

    return planned(step)


def planned(step: Any, count: int = COUNT) -> Program:
    graph, _ = trace(step, jax.ShapeDtypeStruct((count,), jnp.int32))
    return plan(graph, tasks=[PS, *WORKERS], driver=WORKERS[0]).program


@pytest.fixture
def tasks() -> Tasks:
    tasks = Tasks(PS, *WORKERS)
    zeros = np.zeros((SIZE, WIDTH), np.float32)
    tasks.runtimes[PS].store.write([TABLE], [zeros])
    return tasks


@pytest.mark.parametrize("program", [routed_program(), ordinary_program()])
def test_two_workers_that_read_the_same_rows_before_either_writes_both_count(
    tasks: Tasks, program: Program
) -> None:
    for worker in WORKERS:
        renamed = program.rename_task(WORKERS[0], worker)
        handle = worker[-1]
        participants = [p.task for p in renamed.partitions]
        for task in participants:
            runtime = tasks.runtimes[task]
            loaded = runtime.load(renamed)
            runtime.register(handle, renamed, loaded, participants)
        feeds = {"ids": ids(1, 2, 3, 4, 5)}
        for task in participants:
            runtime = tasks.runtimes[task]
            given = feeds if task == worker else None
            runtime.start_step((handle, 1), lambda *_: None, feeds=given)
    tasks.deliver_all()  # in the order of sending: both read first
    table = tasks.runtimes[PS].store.read([TABLE])[0]
    assert table[1:6].tolist() == [[2.0] * WIDTH] * 5


def test_only_rows_that_are_there_travel(tasks: Tasks) -> None:
    tasks.register("rows", routed_program())
    tasks.start("rows", 1, {"ids": ids(7, 3, 7, 7, 3)})
    sizes = []
    while tasks.messages:
        _, _, _, values = tasks.messages[0]
        sizes.append([v.shape for v in values])
        tasks.deliver_one()
    assert sizes == [[(2,)], [(2, WIDTH)], [(2, WIDTH)]]


def test_an_update_is_compiled_for_a_few_numbers_of_rows(tasks: Tasks) -> None:
    tasks.register("rows", routed_program(SIZE))
    before, seen = tasks.cache.compilations, np.zeros(SIZE)
    for number, count in enumerate([1, 2, 30, 31, 50, 51, 57, 60, 99, SIZE], 1):
        chosen = np.random.default_rng(count).permutation(SIZE)[:count]
        seen[chosen] += 1
        tasks.start("rows", number, {"ids": np.resize(chosen, SIZE).astype(np.int32)})
        tasks.deliver_all()
    table = tasks.runtimes[PS].store.read([TABLE])[0]
    assert table.tolist() == np.repeat(seen[:, None], WIDTH, 1).tolist()
    assert tasks.cache.compilations == before + 1  # for at most 57


def test_rows_that_are_nearly_all_travel_with_their_padding(tasks: Tasks) -> None:
    """Who takes them padded then need not copy them."""
    tasks.register("rows", routed_program(SIZE))
    chosen = np.resize(np.arange(SIZE - 5), SIZE).astype(np.int32)
    tasks.start("rows", 1, {"ids": chosen})
    sizes = []
    while tasks.messages:
        _, _, _, values = tasks.messages[0]
        sizes.append([(v.shape, bool(v[SIZE - 5 :].any())) for v in values])
        tasks.deliver_one()
    asked, found, given = sizes
    assert asked == [((SIZE - 5,), False)]
    assert found == [((SIZE, WIDTH), False)]
    assert given == [((SIZE - 5, WIDTH), False)]  # its padding is ones, not zeros
    table = tasks.runtimes[PS].store.read([TABLE])[0]
    assert table.sum(1).tolist() == [WIDTH] * (SIZE - 5) + [0] * 5


def test_id_out_of_range_ends_the_step_and_changes_nothing(tasks: Tasks) -> None:
    tasks.register("rows", routed_program())
    step = tasks.start("rows", 1, {"ids": ids(7, 3, SIZE, 7, 3)})
    tasks.deliver_all()
    outcome = tasks.outcomes[WORKERS[0], step]
    assert isinstance(outcome, RowIdError)
    assert "feature 'colour' has the id 100 at position 2" in str(outcome)
    assert float(tasks.runtimes[PS].store.read([TABLE])[0].sum()) == 0.0


def test_rows_that_no_route_gave_are_refused(tasks: Tasks) -> None:
    tasks.register("rows", routed_program())
    step = tasks.start("rows", 1, {"ids": ids(7, 3, 1, 7, 3)})
    dst, key, name, _ = tasks.messages.popleft()
    tasks.runtimes[dst].deliver(key, name, [ids(1, SIZE)])
    assert isinstance(tasks.outcomes[PS, step], MalformedMessageError)


def test_variables_given_one_value_do_not_share_its_memory() -> None:
    tasks = Tasks(PS)
    a, b, c = (jg.Variable(n, jnp.zeros((SIZE, WIDTH)), device=PS) for n in "abc")

    def step(x: jax.Array) -> jax.Array:
        value = jnp.zeros((SIZE, WIDTH)) + x
        a[...] = value
        b[...] = value
        c[...] = jnp.zeros((SIZE, WIDTH)) + x
        return x

    graph, _ = trace(step, jax.ShapeDtypeStruct((), jnp.float32))
    tasks.register("init", plan(graph, tasks=[PS], driver=PS).program)
    tasks.run("init", 1, {"x": np.float32(2)})
    stored = [StoredVariable(n, TABLE.type) for n in "abc"]
    store = tasks.runtimes[PS].store
    run = jax.jit(lambda rows: [rows + 1])
    store.update([], [], run, [RowsOf(stored[0], ids(1), ROWS)])
    assert [float(v[1, 0]) for v in store.read(stored)] == [3.0, 2.0, 2.0]


def test_value_that_two_variables_get_is_nobodys_own() -> None:
    code = bytes(jax.export.export(jax.jit(lambda: [jnp.ones(3)]))().serialize())
    digest = hashlib.sha256(code).hexdigest()
    type_ = ValueType((3,), "float32")
    once, twice = (
        load_partition(
            Partition(
                PS,
                (type_,),
                (StoredVariable("a", type_), StoredVariable("b", type_)),
                (
                    SegmentNode(digest, (), (), (), (0,)),
                    WriteNode(tuple(range(n)), (0,) * n),
                ),
            ),
            [SegmentCode(digest, code, ("cpu",), "ones")],
            CompileCache(),
        )
        for n in (1, 2)
    )
    assert (set(once.owned), set(twice.owned)) == ({0}, set())
