"""Groups of variables: found once, and each variable still goes its own way."""

import gc
import threading
import weakref
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from jgraph.errors import InternalError, UninitializedError, VariableMismatchError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.runtime.store.groups import VariableGroup
from jgraph.runtime.store.store import VariableStore

KINDS = ("float32", "bfloat16", "int32", "float64", "bool", "int4", "uint8")
MANY = [StoredVariable(f"v{n}", ValueType((n + 1,), k)) for n, k in enumerate(KINDS)]
NOTHING = VariableGroup([])


@pytest.fixture
def store() -> VariableStore:
    store = VariableStore(TaskName("/job:ps/task:0"))
    store.write(MANY, [np.ones(v.type.shape, v.type.np_dtype) for v in MANY])
    return store


def doubled(*values: jax.Array) -> Sequence[jax.Array]:
    return [jax.numpy.logical_or(v, v) if v.dtype == bool else v + v for v in values]


def test_variables_of_a_group_are_read_and_written_alone(store: VariableStore) -> None:
    group = VariableGroup(MANY)
    before = [np.array(value) for value in store.read(group)]
    store.write([MANY[2]], [np.full(3, 9, np.int32)])
    after = store.read(group)
    assert after[2].tolist() == [9, 9, 9]
    for n in (0, 1, 3, 4, 5, 6):
        assert after[n].tobytes() == before[n].tobytes()
        assert store.read([MANY[n]])[0].tobytes() == before[n].tobytes()


def test_each_variable_of_a_group_counts_its_own_versions(store: VariableStore) -> None:
    group = VariableGroup(MANY[:3])
    store.update(group, NOTHING, doubled)
    store.update(group, NOTHING, doubled)
    store.update([MANY[1]], [], doubled)
    versions = {row.name: row.version for row in store.table()}
    assert [versions[v.name] for v in MANY[:4]] == [2, 3, 2, 0]
    assert [v.tolist() for v in store.read(VariableGroup(MANY[:2]))] == [[4], [8, 8]]


def test_group_finds_variables_that_were_dropped_and_made_again(
    store: VariableStore,
) -> None:
    group = VariableGroup(MANY[:1])
    store.update(group, NOTHING, doubled)
    store.drop()
    with pytest.raises(UninitializedError, match="'v0'"):
        store.read(group)
    store.write(MANY[:1], [np.full(1, 5, np.float32)])
    store.update(group, NOTHING, doubled)
    assert store.read(MANY[:1])[0].tolist() == [10]


def test_group_finds_what_took_the_place_of_its_container(store: VariableStore) -> None:
    group = VariableGroup(MANY[:1])
    assert store.read(group)[0].tolist() == [1]
    other = StoredVariable("v0", MANY[0].type, container="restored")
    store.write([other], [np.full(1, 7, np.float32)])
    store.move("restored", "")
    store.update(group, NOTHING, doubled)
    assert store.read(MANY[:1])[0].tolist() == [14]


def test_group_of_a_variable_that_an_update_lost_says_so(store: VariableStore) -> None:
    group = VariableGroup(MANY[:2])

    def fail(*values: jax.Array) -> Sequence[jax.Array]:
        values[0].delete()
        raise FloatingPointError

    with pytest.raises(InternalError, match="v0 lost the value"):
        store.update(group, NOTHING, fail)
    with pytest.raises(UninitializedError, match="'v0'"):
        store.read(group)
    assert store.read(MANY[1:2])[0].tolist() == [1, 1]


def test_group_keeps_no_memory_of_what_was_dropped(store: VariableStore) -> None:
    group = VariableGroup(MANY[:1])
    (array,) = store.update(NOTHING, group, lambda value: [value])
    kept = weakref.ref(array)
    del array
    gc.collect()
    assert kept() is not None, "the store has it"
    store.drop()
    gc.collect()
    assert kept() is None


def test_group_of_another_type_is_refused_beside_one_that_fits(
    store: VariableStore,
) -> None:
    store.read(VariableGroup(MANY[:1]))
    other = StoredVariable("v0", ValueType((2,), "float32"))
    with pytest.raises(VariableMismatchError, match=r"is float32\[1\]"):
        store.read(VariableGroup([other]))


def test_groups_that_overlap_lose_no_update_and_never_lock_up(
    store: VariableStore,
) -> None:
    variables = [StoredVariable(f"w{n}", ValueType((), "int32")) for n in range(6)]
    store.write(variables, [np.int32(0)] * 6)
    bump = jax.jit(lambda *values: [v + 1 for v in values], donate_argnums=(0, 1, 2))
    orders = [(0, 1, 2), (2, 1, 3), (4, 0, 5), (3, 5, 2)]

    def work(order: tuple[int, ...]) -> None:
        group = VariableGroup([variables[n] for n in order])
        for _ in range(50):
            store.update(group, NOTHING, bump)

    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    counts = [int(value) for value in store.read(VariableGroup(variables))]
    assert counts == [50 * sum(n in order for order in orders) for n in range(6)]
