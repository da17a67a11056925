"""A task's process gets the memory of a step again without asking the kernel."""

import subprocess
import sys

import pytest

from jgraph.server.process_setup import keep_memory

PROGRAM = """
import resource, sys
import numpy as np
from jgraph.server.process_setup import keep_memory

assert keep_memory()

def step():
    np.ones(64 << 20, np.uint8)

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


BETWEEN = """
from pathlib import Path
import numpy as np
from jgraph.server.process_setup import give_back_memory, keep_memory

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

assert keep_memory()
block = np.ones(64 << 20, np.uint8)
behind = np.ones(1 << 20, np.uint8)
del block
before = pages()
give_back_memory()
print(before - pages())
"""

DROPPED = """
import gc
from pathlib import Path
import numpy as np
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.runtime.store.store import VariableStore
from jgraph.server.process_setup import give_back_memory, set_up_process

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

set_up_process()
gc.disable()
store = VariableStore(TaskName("/job:ps/task:0"))
table = StoredVariable("w", ValueType((1 << 20, 16), "float32"), "copy")
for first in range(0, 1 << 20, 1 << 18):
    ids = np.arange(first, first + (1 << 18), dtype=np.int32)
    store.put_rows(table, ids, np.ones((1 << 18, 16), np.float32))
before = pages()
store.drop(["copy"])
give_back_memory()
print(before - pages())
"""

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="glibc's malloc is Linux's"
)


def printed(program: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


@on_linux
def test_a_freed_block_is_used_again_without_new_pages() -> None:
    assert printed(PROGRAM) < 100  # 16,384 pages if the kernel had to be asked


@on_linux
def test_free_memory_between_what_is_used_is_given_back() -> None:
    # Of 16,384 pages; asking takes memory too, at times a huge page (512) or two of it.
    assert printed(BETWEEN) > 15_000


@on_linux
def test_a_variable_that_is_dropped_gives_its_memory_back_before_python_collects() -> (
    None
):
    assert printed(DROPPED) > 15_000  # of 16,384 pages


def test_who_sets_variables_of_glibc_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert not keep_memory()
