"""One writer per directory: refused, taken over, fenced."""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from jgraph.errors import CheckpointWriterError
from jgraph.failpoints import armed, fail
from jgraph.runtime.files.writer_lease import Holder, WriterLease, newest

NOW = 1000.0
AWAY = Holder(3, "away", 0, 77, 0.0, renewed=NOW, released=False)


class Hand:
    """A clock that stands where it was put."""

    def __init__(self, now: float = NOW) -> None:
        self.time = now

    def now(self) -> float:
        return self.time


def lease(directory: Path, clock: Hand | None = None) -> WriterLease:
    return WriterLease(directory, clock=clock or Hand())


def put(directory: Path, holder: Holder) -> None:
    fields = {name: getattr(holder, name) for name in Holder.__dataclass_fields__}
    file = directory / f"jgraph_writer.{holder.generation}.json"
    file.write_text(json.dumps(fields))


def test_the_second_of_two_writers_is_refused_with_host_process_and_age(
    tmp_path: Path,
) -> None:
    first, second = lease(tmp_path), lease(tmp_path, Hand(NOW + 5))
    first.acquire()
    with pytest.raises(CheckpointWriterError) as caught:
        second.acquire()
    assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)
    assert "5 s ago" in str(caught.value)
    assert caught.value.code == "JG-303"
    first.release()
    second.acquire()
    assert second.generation == 2
    second.release()


def test_a_writer_on_another_host_is_taken_over_after_its_time(tmp_path: Path) -> None:
    put(tmp_path, AWAY)
    clock = Hand(NOW + 59)
    mine = lease(tmp_path, clock)
    with pytest.raises(CheckpointWriterError, match="process 77 on away"):
        mine.acquire()
    clock.time = NOW + 61
    mine.acquire()
    assert mine.generation == 4
    assert [path.name for path in tmp_path.iterdir()] == ["jgraph_writer.4.json"]
    mine.release()


def test_a_writer_that_ended_on_this_host_is_taken_over_at_once(tmp_path: Path) -> None:
    mine = lease(tmp_path)
    mine.acquire()
    held = newest(tmp_path)
    mine.release()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    put(tmp_path, replace(held, generation=2, pid=ended.pid))
    mine.acquire()
    assert mine.generation == 3
    mine.release()


def test_another_process_of_the_same_id_is_not_the_writer() -> None:
    own = psutil.Process()
    here = replace(AWAY, host="here", pid=own.pid, began=own.create_time())
    assert not here.is_gone(NOW + 1e6, 60, "here", 0)
    assert replace(here, began=here.began - 100).is_gone(NOW, 60, "here", 0)
    # The same name and number in another container says nothing.
    assert not replace(here, began=0.0).is_gone(NOW, 60, "here", 1)


def test_a_writer_that_comes_back_after_another_took_over_is_stopped(
    tmp_path: Path,
) -> None:
    old = lease(tmp_path)
    old.acquire()
    old.check()
    put(tmp_path, replace(AWAY, generation=2))
    with pytest.raises(CheckpointWriterError, match="generation 1, must not"):
        old.check()
    old.release()
    assert newest(tmp_path).generation == 2
    assert not newest(tmp_path).released


@pytest.mark.parametrize("text", ["{", "[" * 100_000], ids=["cut", "nested"])
def test_a_damaged_lease_does_not_lock_a_directory_for_ever(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "jgraph_writer.6.json").write_text(text)
    mine = lease(tmp_path)
    mine.acquire()
    assert mine.generation == 7
    mine.release()


@pytest.mark.parametrize("point", ["lease.renewing", "lease.renewed"])
def test_a_lease_outlives_a_disk_that_fails_when_it_is_renewed(
    tmp_path: Path, point: str
) -> None:
    again, times, clock = threading.Event(), itertools.count(), Hand()

    def fail_once() -> None:
        if next(times) == 0:
            clock.time += 5
            fail()
        again.set()

    mine = WriterLease(tmp_path, lease_s=0.06, clock=clock)
    with armed(point, fail_once):
        mine.acquire()
        assert again.wait(10)
    mine.check()
    mine.release()
    assert newest(tmp_path).released


def test_a_lease_that_could_not_be_taken_to_the_end_is_nobodys(tmp_path: Path) -> None:
    mine = lease(tmp_path)
    with armed("lease.file_created", fail), pytest.raises(OSError, match="failpoint"):
        mine.acquire()
    assert newest(tmp_path).released
    lease(tmp_path).acquire()
