"""Frames of the steps that a loop drives, counted by the servers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import jgraph as jg
from tests.support.counting import trainer

WORKER, PS = "/job:worker/task:0", "/job:ps/task:0"
STEPS = 300


@contextmanager
def one_core() -> Iterator[None]:
    """Gives this process, and those that it starts meanwhile, a single core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def frames(cluster: jg.LocalCluster) -> tuple[int, int]:
    """Returns how many a worker has sent to a ps, and received from it."""
    [task] = [one for one in cluster.status().tasks if one.task == WORKER]
    [traffic] = [one for one in task.traffic if one.peer == PS]
    return traffic.frames_sent, traffic.frames_received


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system ties no process to a core"
)
def test_an_asynchronous_step_takes_one_frame_each_way_where_tasks_share_a_core() -> (
    None
):
    """Gradients with the order of the next step, parameters with the last report."""
    with one_core():
        cluster = jg.LocalCluster(ps=1, workers=1)
    with cluster:
        there = trainer(cluster, jg.AsyncPS())
        there.fit(np.arange(64), steps=50, batch_size=4, progress=False)
        before = frames(cluster)
        there.fit(np.arange(64), steps=STEPS, batch_size=4, progress=False)
        after = frames(cluster)
        there.close()
    a_step = [(b - a) / STEPS for a, b in zip(before, after, strict=True)]
    assert max(a_step) < 1.2, a_step
