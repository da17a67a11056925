"""Records are in the order of the changes, and repeat them bit by bit."""

import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.coordination.run.same_version import HeldBack
from jgraph.errors import CopyLostError, JGError
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import Admission, Column, HashSpec
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.replay import NodeRan, Record
from jgraph.runtime.store.change_log import Recorder, Recording
from jgraph.runtime.store.entry import RowsOf
from jgraph.runtime.store.store import VariableStore

pytestmark = pytest.mark.usefixtures("nothing_is_left")

STEP = ("train", 1)


def test_records_of_one_variable_are_in_the_order_of_its_versions() -> None:
    """Threads update side by side; doing what is recorded again gives the same."""
    store, recorder = VariableStore(TaskName("/job:ps/task:0")), Recorder(lambda: None)
    w = StoredVariable("w", ValueType((), "float32"))
    store.write([w], [np.float32(1)])
    update = jax.jit(lambda value, by: [value * 1.25 + by])

    def work(first: int) -> None:
        for n in range(first, first + 50):
            by = np.array(n, np.float32)
            told = partial(recorder.put, NodeRan(0, 0), [by], STEP)
            store.update([w], [], partial(update, by=by), record=told)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = recorder.take()
    assert [record.number for record in records] == list(range(1, 201))
    again = jnp.float32(1)
    for record in records:
        (again,) = update(again, record.arrays[0])
    np.testing.assert_array_equal(store.read([w])[0], again)


def test_steps_wait_for_their_records_and_others_do_not() -> None:
    woken: list[int] = []
    recorder = Recorder(lambda: woken.append(1))
    recording, told = Recording(recorder, program=2), list[Any]()
    recorder.when_kept(("read", 1), told.append)
    assert told == [None]
    for node in (3, 4):
        recording.note(STEP, node, [np.zeros(2)])
    assert woken == [1]  # once, until they are taken
    assert [record.what for record in recorder.take()] == [NodeRan(2, 3), NodeRan(2, 4)]
    recorder.when_kept(STEP, told.append)
    recorder.commit(1)
    assert told == [None]
    recorder.commit(2)
    assert told == [None, None]


def test_steps_fail_when_nobody_keeps_their_records_any_more() -> None:
    recorder, told = Recorder(lambda: None), list[JGError | None]()
    recording = Recording(recorder, 0)
    recording.note(STEP, 0, [])
    recorder.when_kept(STEP, told.append)
    lost = CopyLostError("gone")
    recorder.fail(lost)
    recording.note(("train", 2), 0, [])
    recorder.when_kept(("train", 2), told.append)
    recorder.when_kept(("read", 1), told.append)  # changed nothing
    recorder.fail(CopyLostError("gone as well"))
    assert told == [lost, lost, None]
    assert not recorder.take()


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_table_made_of_what_is_told_behaves_as_the_first_one(eviction: Any) -> None:
    """It admits, evicts and updates the same keys, bit by bit."""
    spec = HashSpec(
        "ads",
        (Column("rows", 2),),
        1 << 14,
        admission=Admission(sightings=2),
        eviction=eviction,
    )
    ids = ValueType((8, 2), "float32", ragged=True)
    stores = [VariableStore(TaskName(f"/job:ps/task:{n}")) for n in range(2)]
    rng = np.random.default_rng(0)

    def work(store: VariableStore, container: str, keys: Any) -> Any:
        stored = StoredVariable("rows", ValueType((8, 2), "float32"), container, spec)
        rows = RowsOf(stored, keys, ids)
        found = store.lookup([rows])
        store.update([], [], lambda r: [jnp.asarray(r) * 1.5 + 1], [rows])
        return found

    def keys() -> Any:
        return np.unique(rng.zipf(1.2, 8).astype(np.int64) % 3000)

    for _ in range(300):
        work(stores[0], "", keys())
    told: list[Any] = []
    stores[0].whole("", lambda what, arrays: told.append((what, arrays)))
    ((what, arrays),) = told
    assert what == spec
    shard = stores[1].hash_table("copy", spec).shard
    names = ("keys", "age", "uses", "rows")
    shard.restore(dict(zip(names, arrays, strict=True)))
    for _ in range(400):
        looked_up = keys()
        own = work(stores[0], "", looked_up)
        np.testing.assert_array_equal(own, work(stores[1], "copy", looked_up))
    first = stores[0].hash_table("", spec).shard
    assert first.counts.evicted > 0
    for name, value in first.state().items():
        np.testing.assert_array_equal(shard.state()[name], value, err_msg=name)


def test_nothing_of_an_update_changes_once_a_task_has_told_its_version() -> None:
    """Others take its place from there; an update under way is waited for."""
    recorder = Recorder(lambda: None)
    recording = Recording(recorder, 1, due=frozenset({2, 3}))
    begun, may_end, done = threading.Event(), threading.Event(), list[int]()

    def work(node: int) -> list[Any]:
        begun.set()
        assert may_end.wait(10)
        recording.note(STEP, node, [])
        done.append(node)
        return []

    recording.begins()
    last = recording.work(3, partial(work, 3))
    first = threading.Thread(target=recording.work(2, partial(work, 2)))
    first.start()
    assert begun.wait(10)
    threading.Timer(0.05, may_end.set).start()
    assert not recorder.hold()  # made in part
    assert done == [2]
    with pytest.raises(CopyLostError, match="has taken the place"):
        last()
    assert done == [2]
    first.join()


@pytest.mark.row(13)
@pytest.mark.parametrize("order", [(0, 2), (2, 0)], ids=str)
def test_records_have_the_number_of_their_update(order: tuple[int, int]) -> None:
    """Also of what is averaged, node 0, after all that makes the update whole."""
    recorder, copy = Recorder(lambda: None), HeldBack[Record]()
    due = frozenset({2})
    recording = Recording(recorder, 1, due=due)
    for update in (1, 2, 3):
        recording.begins()
        for node in order:
            recording.note(STEP, node, [])
        for record in recorder.take():
            assert isinstance(record.what, NodeRan)
            copy.update(record, record.version, record.what.node, due)
            assert record.version == update
        assert copy.versions == range(update - 1, update + 1)
    Recording(recorder, 0).note(STEP, 5, [])
    recorder.put("w", [np.zeros(2)])
    assert [r.version for r in recorder.take()] == [0, 3]
    assert recorder.hold() == range(3, 4)


@pytest.mark.row(13)
def test_newest_update_is_undone_bit_by_bit_also_if_it_is_made_in_part() -> None:
    """Whole variables, those that are written, and rows of tables."""
    store = VariableStore(TaskName("/job:ps/task:0"))
    w, b, t = (
        StoredVariable(name, ValueType(shape, "float32"))
        for name, shape in [("w", (3,)), ("b", (2,)), ("t", (9, 2))]
    )
    rng = np.random.default_rng(0)
    store.write([w, b, t], [rng.normal(size=v.type.shape) for v in (w, b, t)])
    recorder = Recorder(lambda: None, undoes=True)
    ids = ValueType((4, 2), "float32", ragged=True)

    def change(due: frozenset[int]) -> None:
        recorder.begins(frozenset({1, 2}))
        for node in sorted(due):
            told = partial(recorder.put, NodeRan(0, node), [], STEP, update=True)
            if node == 1:
                rows = RowsOf(t, np.array([2, 7], np.int32), ids)
                run = jax.jit(lambda w, r: [w * 3, r + 1], donate_argnums=0)
                store.update([w], [], run, [rows], record=told, undo=recorder.undo)
            else:
                store.write([b], [np.zeros(2)], record=told, undo=recorder.undo)

    def values() -> list[Any]:
        return [np.array(value) for value in store.read([w, b, t])]

    change(frozenset({1, 2}))
    before = values()
    for due in (frozenset({1, 2}), frozenset({1})):
        change(due)
        assert recorder.hold() == range(1, 2 + (len(due) == 2))
        recorder.end(1)
        for value, due_value in zip(values(), before, strict=True):
            np.testing.assert_array_equal(value, due_value)
    assert recorder.hold() == range(1, 2), "nothing is left to go back further"


def test_records_of_a_task_that_averages_and_changes_nothing_are_of_no_update() -> None:
    """Its copy would wait for an update to be whole, and keep them all."""
    recorder = Recorder(lambda: None)
    recording = Recording(recorder, 1, due=frozenset())
    for _ in range(2):
        recording.begins()
        recording.note(STEP, 0, [])
    assert [r.version for r in recorder.take()] == [0, 0]


def test_an_update_that_stays_cannot_be_undone_later() -> None:
    recorder = Recorder(lambda: None, undoes=True)
    recording = Recording(recorder, 1, due=frozenset({2}))
    for _ in range(2):
        recording.begins()
        recording.note(STEP, 2, [])
    assert recorder.hold() == range(1, 3)
    recorder.end(2)
    with pytest.raises(CopyLostError, match="cannot be of version 1"):
        recorder.end(1)


@pytest.mark.parametrize("ends", ["kept", "lost"])
def test_who_waits_for_a_record_goes_on_when_it_is_kept_or_never_will_be(
    ends: str,
) -> None:
    recorder = Recorder(lambda: None)
    number = recorder.put("w", [np.ones(2)], STEP)
    recorder.wait_kept(number - 1, timeout_s=60.0)  # of those before there are none
    waiting = threading.Thread(target=recorder.wait_kept, args=(number, 60.0))
    waiting.start()
    if ends == "kept":
        recorder.commit(number)
    else:
        recorder.fail(CopyLostError("the backup is gone"))
    waiting.join(30.0)
    assert not waiting.is_alive()
