"""A task's process gets the memory of a step again without asking the kernel."""

import subprocess
import sys

import pytest

from jgraph.cluster.allocator import keep_memory

PROGRAM = """
import resource, sys
import numpy as np
from jgraph.cluster.allocator import keep_memory

assert keep_memory()

def step():
    np.ones(64 << 20, np.uint8)

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_freed_block_is_used_again_without_new_pages() -> None:
    if not sys.platform.startswith("linux"):
        return
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) < 100  # 16,384 pages if the kernel had to be asked


def test_who_sets_variables_of_glibc_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert not keep_memory()
