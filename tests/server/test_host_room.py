"""How much room a host has left, with containers and disks that are imagined."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from jgraph.graph.device import TaskName
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.server.host_room import certificate_ends_s, disk_free, memory_free


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


def test_the_end_of_a_certificate_is_known_where_there_is_one(tmp_path: Path) -> None:
    task = TaskName("/job:ps/task:0")
    make_certificates(tmp_path, [task], days=12)
    files = TLS.of(tmp_path, task)
    begins = files.cert.stat().st_mtime
    assert certificate_ends_s(files) == pytest.approx(begins + 12 * 86_400, abs=60)
    assert certificate_ends_s(None) == 0
    files.cert.write_text("no certificate")
    assert certificate_ends_s(files) == 0
