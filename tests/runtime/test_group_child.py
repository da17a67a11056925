"""The child process that takes part in XLA's collectives, without any others."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, strategies as st

from jgraph.runtime.group_child import BUCKET_BYTES, Layout, stamp, sum_in_buckets
from tests.support.collective_children import MODULE
from tests.support.waiting import wait_until

SETUP = {"rank": 0, "members": 2, "elements": 8, "loopback": True, "host": "127.0.0.1"}


@given(st.integers(1, 64), st.integers(1, 20_000_000))
def test_buckets_hold_all_and_the_stamp_and_none_is_too_large(
    members: int, elements: int
) -> None:
    layout = Layout(members, elements)
    assert layout.width > elements
    assert 4 * layout.bucket * members <= BUCKET_BYTES + 64 * members
    assert layout.width - elements <= 16 * layout.buckets + 16
    assert layout.nbytes == 4 * layout.width * (members + 1)


def filled(versions: list[int], elements: int = 5_000_000) -> list[Any]:
    """Returns the memory of each member."""
    layout, rows = Layout(len(versions), elements), []
    for number, version in enumerate(versions):
        one, mean = layout.rows(np.zeros(layout.nbytes, np.uint8))
        one[:] = number + 1
        one[:, -1] = stamp(version)
        rows.append((one, mean))
    return [layout, *rows]


def summed(versions: list[int]) -> Any:
    """Returns the mean of part 1, as its owner has it."""
    layout, *members = filled(versions)
    starts = iter(range(0, layout.width, layout.bucket))

    def add(own: Any) -> Any:
        start = next(starts)
        piece = slice(start, start + layout.bucket)
        np.testing.assert_array_equal(own, members[1][0][:, piece])
        return np.mean([rows[1, piece] for rows, _ in members], axis=0)

    sum_in_buckets(add, layout, *members[1])
    return members[1][1]


def test_each_bucket_of_the_own_part_is_averaged() -> None:
    mean = summed([4095, 4095, 4095])
    assert (mean[:-1] == 2).all()


@pytest.mark.parametrize("versions", [[4095, 4095, 4096], [5, 6, 5], [7, 6, 7]])
def test_a_sum_of_two_versions_is_none(versions: list[int]) -> None:
    with pytest.raises(ValueError, match="summed other versions"):
        summed(versions)


def begun(parent: int) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    memory = {"memory": 0, "address": "127.0.0.1:1", "parent": parent}
    child.stdin.write(json.dumps({**SETUP, **memory}) + "\n")
    child.stdin.flush()
    return child


@pytest.mark.procs
def test_a_child_of_another_server_ends_at_once() -> None:
    with begun(parent=1) as child:
        assert child.wait(20) == 0


@pytest.mark.procs
def test_a_child_says_what_it_cannot_do() -> None:
    """Its memory is none."""
    with begun(parent=os.getpid()) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("failed ")
        assert child.wait(20) == 3


SERVER = f"""
import json, os, subprocess, sys
memory = os.memfd_create("a server")
os.ftruncate(memory, 1 << 16)
child = subprocess.Popen(
    [sys.executable, "-m", "{MODULE}"], stdin=subprocess.PIPE, pass_fds=[memory]
)
child.stdin.write(json.dumps({{**{SETUP!r}, "rank": 1, "parent": os.getpid(),
    "memory": memory, "address": "127.0.0.1:1"}}).encode() + b"\\n")
child.stdin.flush()
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.procs
@pytest.mark.parametrize("frozen", [False, True])
def test_a_child_ends_with_its_server_however_that_ends(frozen: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        # It has begun JAX, and waits for another one, that never comes.
        wait_until(lambda: child.num_threads() > 4, 60)
        if frozen:
            child.suspend()
        server.send_signal(signal.SIGKILL)
        server.wait(20)
    with suppress(psutil.NoSuchProcess):
        wait_until(lambda: not child.is_running() or child.status() == "zombie", 20)
