"""Reports of a run, and what its master asks meanwhile."""

import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jgraph.client.connection import Connection
from jgraph.client.runs.follower import Inbox, RunFollower
from jgraph.client.runs.runs import RunInfo
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame

WORKER = "/job:worker/task:1"
YEAR_S = 365 * 86_400.0


def told(state: str, loop: str, handle: str = "") -> Frame:
    task = WORKER if handle or state == "lost" else ""
    body = pb.LoopReport(state=state, loop=loop, replica=1, task=task, handle=handle)
    body.number = 0 if task else 1
    return frame(loop_report=body, tensors=[np.zeros(0, np.int64), np.zeros(0)])


def test_another_process_at_the_index_of_a_worker_that_left_has_joined(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def reports(*_: Any, timeout_s: float) -> AsyncIterator[Frame]:
        assert timeout_s > YEAR_S  # some runs go on for months
        yield told("running", "r-1", "p-1")
        yield told("left", "r-1")
        yield told("running", "r-1~1.5", "r-join.1.4~1.5")
        yield told("lost", "r-1~1.5")
        yield told("running", "r-1~1.7", "r-join.1.4~1.7")

    there = SimpleNamespace(
        find=lambda task: task, transport=SimpleNamespace(call=reports)
    )
    info = cast("RunInfo", SimpleNamespace(name="r", master="/job:ps/task:0", term=1))
    with caplog.at_level("WARNING", logger="jgraph"):
        follower = RunFollower(cast("Connection", there), info, threading.Event())
        assert len(list(follower)) == 5
    assert caplog.messages == [
        f"{WORKER} joined and takes part in the run",
        f"{WORKER} was lost; the other workers go on",
        f"{WORKER} answers again and takes part in the run",
    ]


def test_a_run_that_is_saved_again_and_again_still_tells_how_far_it_is() -> None:
    inbox = Inbox[int | str]()
    for report in range(20):
        inbox.put(report)
    inbox.put("halted", urgent=True)
    reports = list[int | str]()
    for item in inbox:
        if item == "halted":  # the loops halt again while the run is being saved
            inbox.put(len(reports) + 20)
            inbox.put("halted", urgent=True)
        else:
            reports.append(item)
        if len(reports) == 30:
            break
    assert reports[:21] == list(range(21))


def test_loops_that_stand_still_wait_for_no_report() -> None:
    inbox = Inbox[int | str]()
    for report in range(20):
        inbox.put(report)
    inbox.put("halted", urgent=True)
    assert next(iter(inbox)) == "halted"
