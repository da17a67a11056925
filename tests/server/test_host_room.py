"""How much room a host has left, with containers and disks that are imagined."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from jgraph.graph.device import TaskName
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.server.host_room import (
    LOOK_EVERY_S,
    DiskLooks,
    certificate_ends_s,
    disk_free,
    memory_free,
)
from tests.support.run_async import run_async
from tests.support.services import service_of


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=60, total=100)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def group(directory: Path, limit: str, used: int, stat: str) -> Path:
    (directory / "memory.max").write_text(limit)
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(stat)
    return directory


def test_memory_is_that_of_the_machine_where_no_container_has_less(
    tmp_path: Path,
) -> None:
    assert memory_free(tmp_path) == 0.6
    assert memory_free(group(tmp_path, "max\n", 9, "")) == 0.6
    assert memory_free(group(tmp_path, "1000\n", 100, "")) == 0.6


def test_files_that_nobody_uses_count_as_free_in_a_container(tmp_path: Path) -> None:
    stat = "anon 700\ninactive_file 150\nodd\n"
    assert memory_free(group(tmp_path, "1000\n", 950, stat)) == pytest.approx(0.2)
    assert memory_free(group(tmp_path, "1000\n", 2000, stat)) == 0


def test_the_fullest_disk_counts_and_one_that_is_not_there_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {tmp_path: 5}

    def usage(path: Path) -> SimpleNamespace:
        if path.name == "gone":
            raise FileNotFoundError
        of_path = free.get(path, 50)
        return SimpleNamespace(total=200, used=100 - of_path, free=of_path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert disk_free() == disk_free(None) == disk_free(Path("/gone")) == 0.5
    assert disk_free(None, tmp_path) == 0.05


class Hand:
    """A clock that somebody sets."""

    time = 0.0

    def now(self) -> float:
        return self.time


class Disks:
    """Disks of which one may not answer."""

    def __init__(self) -> None:
        self.free = 50
        self.asked = threading.Semaphore(0)
        self.answers = threading.Event()
        self.answers.set()
        self.looks = 0

    def usage(self, path: Path) -> SimpleNamespace:
        self.looks += path.name == "records"
        free = self.free
        if path.name == "records":
            self.asked.release()
            assert self.answers.wait(30)
        return SimpleNamespace(total=100, used=100 - free, free=free)

    @contextmanager
    def hung(self) -> Iterator[None]:
        self.answers.clear()
        try:
            yield
        finally:
            self.answers.set()


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Disks:
    found = Disks()
    monkeypatch.setattr(shutil, "disk_usage", found.usage)
    return found


def test_a_disk_that_is_well_has_answered_when_the_look_returns(disks: Disks) -> None:
    clock = Hand()
    looks = DiskLooks(clock, Path("/records"))
    run_async(looks.look())
    assert looks.free == 0.5
    disks.free = 3
    clock.time = LOOK_EVERY_S - 1
    run_async(looks.look())
    assert looks.free == 0.5  # it is not asked at every question
    clock.time = LOOK_EVERY_S
    run_async(looks.look())
    assert looks.free == 0.03
    assert disks.looks == 2


def test_a_disk_that_hangs_is_not_waited_for_and_its_last_answer_stays(
    disks: Disks,
) -> None:
    clock = Hand()
    looks = DiskLooks(clock, Path("/records"))

    async def run() -> None:
        await looks.look()
        disks.free = 3
        with disks.hung():
            for _ in range(4):
                clock.time += LOOK_EVERY_S
                await asyncio.wait_for(looks.look(), 10)
                assert looks.free == 0.5
            assert disks.looks == 2  # one look at a time, however long it lasts

    run_async(run())
    for thread in threading.enumerate():
        if thread.name == "jgraph-disk":
            thread.join(30)
    assert looks.free == 0.03


def test_a_task_tells_of_itself_while_its_disk_hangs(disks: Disks) -> None:
    task = TaskName("/job:ps/task:0")

    async def run() -> None:
        async with service_of(task, Path("/records")) as (service, _):
            with disks.hung():
                first = await asyncio.wait_for(service.status(), 10)
                assert not first.HasField("disk_free")  # nobody knows it yet
                assert first.memory_free == 0.6

    run_async(run())


def test_the_end_of_a_certificate_is_known_where_there_is_one(tmp_path: Path) -> None:
    task = TaskName("/job:ps/task:0")
    make_certificates(tmp_path, [task], days=12)
    files = TLS.of(tmp_path, task)
    begins = files.cert.stat().st_mtime
    assert certificate_ends_s(files) == pytest.approx(begins + 12 * 86_400, abs=60)
    assert certificate_ends_s(None) == 0
    files.cert.write_text("no certificate")
    assert certificate_ends_s(files) == 0
