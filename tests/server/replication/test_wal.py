"""Logs of records: what is kept is read again, what is torn is not; damage is told."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.errors import CopyLostError, FencedError, JGError
from jgraph.failpoints import armed
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import Admission, Column, HashSpec
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.replay import NodeRan, Record
from jgraph.rpc.wire.record_codec import record_from, record_to
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.store.store import VariableStore
from jgraph.server.replication.wal import LogWriter, read_log, remove_logs
from jgraph.server.replication.wal_thread import WalThread

pytestmark = pytest.mark.usefixtures("nothing_is_left")

STREAM = "train-1.ps0"


def written(directory: Path, count: int) -> Path:
    """Writes a log of so many records; returns its file."""
    writer = LogWriter(directory, STREAM)
    writer.begin()
    for number in range(1, count + 1):
        taken = np.arange(number, dtype=np.float32)
        writer.write(record_to(STREAM, Record(number, NodeRan(0, number), [taken])))
    writer.sync()
    writer.close()
    (path,) = directory.iterdir()
    return path


def read(directory: Path) -> list[int]:
    """Returns the numbers of the records, whose arrays are what was written."""
    records = [record_from(frame) for frame in read_log(directory, STREAM)]
    for record in records:
        np.testing.assert_array_equal(record.arrays[0], np.arange(record.number))
    return [record.number for record in records]


def starts(directory: Path, count: int) -> list[int]:
    """Returns where each record begins, and where the last one ends."""
    with TemporaryDirectory() as other:
        return [written(Path(other), n).stat().st_size for n in range(count + 1)]


@pytest.mark.row(15)
@given(st.integers(0, 10**6))
def test_what_was_torn_is_left_out_and_all_before_is_there(cut: int) -> None:
    with TemporaryDirectory() as there:
        directory = Path(there)
        path, at = written(directory, 5), starts(directory, 5)
        end = cut % (at[-1] + 1)
        path.write_bytes(path.read_bytes()[:end])
        assert read(directory) == list(range(1, 6))[: sum(a <= end for a in at[1:])]


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_no_flipped_bit_gives_other_records(place: int, bit: int) -> None:
    with TemporaryDirectory() as there:
        directory = Path(there)
        path, at = written(directory, 5), starts(directory, 5)
        data = bytearray(path.read_bytes())
        place %= len(data)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        whole = sum(a <= place for a in at[1:])
        if whole == 4 and place >= at[4] + 16:
            assert read(directory) == [1, 2, 3, 4]  # as if the last had been torn
        else:
            with pytest.raises(CopyLostError, match=f"damaged at byte {at[whole]}"):
                read(directory)


@given(st.binary(max_size=200))
def test_any_bytes_as_a_log_are_records_or_one_error(data: bytes) -> None:
    with TemporaryDirectory() as there:
        directory = Path(there)
        (directory / f"{STREAM}.1.log").write_bytes(data)
        with suppress(CopyLostError):
            assert list(read_log(directory, STREAM)) == []


def test_room_that_the_file_system_made_and_nobody_wrote_is_no_damage(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert read(tmp_path) == [1, 2, 3]


def test_next_file_takes_the_place_of_the_one_before_when_it_is_complete(
    tmp_path: Path,
) -> None:
    def put(number: int) -> None:
        what = NodeRan(0, number)
        taken = np.arange(number, dtype=np.float32)
        writer.write(record_to(STREAM, Record(number, what, [taken])))

    writer = LogWriter(tmp_path, STREAM)
    writer.begin()
    put(1)
    writer.sync()
    writer.begin()
    put(2)
    assert read(tmp_path) == [1]  # a crash now would find that
    writer.sync()
    assert read(tmp_path) == [2]
    writer.close()
    assert len(list(tmp_path.iterdir())) == 1
    remove_logs(tmp_path, STREAM)
    assert not list(tmp_path.iterdir())


@pytest.mark.row(16)
@pytest.mark.parametrize(
    ("point", "there"), [("log.begun", [1]), ("log.replaced", [2])]
)
def test_a_crash_between_two_files_of_a_log_leaves_one_that_is_whole(
    tmp_path: Path, point: str, there: list[int]
) -> None:
    writer, found = LogWriter(tmp_path, STREAM), list[list[int]]()
    for number in (1, 2):
        writer.begin()
        taken = np.arange(number, dtype=np.float32)
        writer.write(record_to(STREAM, Record(number, NodeRan(0, number), [taken])))
        if number == 1:
            writer.sync()
    with armed(point, lambda: found.append(read(tmp_path))):
        writer.sync()
    writer.close()
    assert found == [there]


@pytest.mark.parametrize("stream", ["", "../x", "a/b", ".x", "a\0b", "x" * 200])
def test_name_that_would_lead_elsewhere_is_refused(tmp_path: Path, stream: str) -> None:
    with pytest.raises(CopyLostError, match="no name of a stream"):
        LogWriter(tmp_path, stream)
    with pytest.raises(CopyLostError, match="no name of a stream"):
        list(read_log(tmp_path, stream))


def test_log_that_cannot_be_written_says_where_and_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store, told = VariableStore(TaskName("/job:ps/task:0")), list[JGError | None]()
    w = StoredVariable("w", ValueType((), "float32"))
    store.write([w], [np.float32(1)])
    thread = WalThread(
        *(tmp_path / "file", STREAM, "", store),
        soon=lambda call: call(),
        base=("", 0),
        check_place=lambda: None,
    )
    thread.recorder.when_kept(("", 1), told.append)
    thread.start()
    thread._thread.join(10)
    thread.recorder.when_kept(("", 0), told.append)
    assert told[0] is None
    assert "cannot write its log" in str(told[1])
    assert "/job:ps/task:0" in str(told[1])


@pytest.mark.row(17)
def test_process_that_was_replaced_writes_nothing_to_its_log(
    tmp_path: Path,
) -> None:
    store, told = VariableStore(TaskName("/job:ps/task:0")), list[JGError | None]()
    error = FencedError("another process has its place")
    is_replaced, asked = threading.Event(), list[bool]()

    def check_place() -> None:
        asked.append(True)
        if is_replaced.is_set():
            raise error

    thread = WalThread(
        *(tmp_path, STREAM, "", store),
        soon=lambda call: call(),
        base=("", 0),
        check_place=check_place,
    )
    kept = threading.Event()
    thread.recorder.put("w", [np.full(1, 1, np.float32)], ("step", 1))
    thread.recorder.when_kept(("step", 1), lambda error: kept.set())
    thread.start()
    assert kept.wait(10)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    is_replaced.set()
    thread.recorder.put("w", [np.full(1, 2, np.float32)], ("step", 2))
    thread.recorder.when_kept(("step", 2), told.append)
    thread._thread.join(10)
    assert told == [error]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len([*read_log(tmp_path, STREAM)]) == 1
    assert len(asked) == 3  # before it writes, and before that counts as on the disk


def test_log_begins_anew_when_it_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then all that is there, and what changes after that."""
    monkeypatch.setattr("jgraph.server.replication.wal._LEAST_BYTES", 2000)
    store = VariableStore(TaskName("/job:ps/task:0"))
    w = StoredVariable("w", ValueType((8,), "float32"))
    store.write([w], [np.zeros(8, np.float32)])
    calls = SimpleQueue[Callable[[], None]]()  # the event loop is this thread
    thread = WalThread(
        *(tmp_path, STREAM, "", store),
        soon=calls.put,
        base=("", 0),
        check_place=lambda: None,
    )
    thread.start()

    def wait_for(step: StepKey) -> None:
        kept = list[JGError | None]()
        thread.recorder.when_kept(step, kept.append)
        while not kept:
            calls.get(timeout=60)()

    wait_for(("", 0))  # or what comes meanwhile counts as its beginning
    for n in range(200):
        value = np.full(8, n, np.float32)
        told = partial(thread.recorder.put, "w", [value], ("step", n))
        store.write([w], [value], record=told)
        if n in {99, 199}:  # it has grown with the first
            wait_for(("step", n))
    thread.end(remove=False)
    thread._thread.join(10)
    records = [record_from(frame) for frame in read_log(tmp_path, STREAM)]
    first, last = records[0].number, records[-1].number
    assert 1 < first <= last
    assert [record.number for record in records] == list(range(first, last + 1))
    assert records[-1].arrays[0].tolist() == [199] * 8


def test_a_log_that_goes_on_within_an_update_leaves_hash_tables_as_they_are(
    tmp_path: Path,
) -> None:
    """What is counted for admission is forgotten by those of a new log alone."""
    store = VariableStore(TaskName("/job:ps/task:0"))
    admission = Admission(sightings=2)
    spec = HashSpec("ads", (Column("rows", 2),), 1 << 16, admission=admission)
    shard = store.hash_table("", spec).shard
    shard.lookup(np.array([5]))
    shard.updated(np.array([5]))
    thread = WalThread(
        *(tmp_path, STREAM, "", store),
        soon=lambda call: call(),
        base=("", 0),
        check_place=lambda: None,
    )
    thread.recorder.begins(frozenset({1, 2}))
    thread.recorder.put(NodeRan(0, 1), [], ("step", 1), update=True)
    before = shard.ends()
    assert thread._tell(None) == 0
    for now, then in zip(shard.ends(), before, strict=True):
        np.testing.assert_array_equal(now, then)
