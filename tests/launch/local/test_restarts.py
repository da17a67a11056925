"""Tasks that die and are started again, as processes."""

import threading
from typing import Any

import jax.numpy as jnp
import psutil
import pytest

from jgraph.clock import SystemClock
from jgraph.errors import ConfigError, JGError, TaskMissingError
from jgraph.graph.device import device
from jgraph.graph.variable import Variable
from jgraph.launch.local.cluster import LocalCluster

pytestmark = pytest.mark.procs

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"


def incarnations(cluster: LocalCluster) -> dict[str, str]:
    return {task.task: task.incarnation for task in cluster.status().tasks}


def step(value: float) -> Any:
    """A step of both tasks, with a variable of its own."""
    v = Variable(f"v{value}", jnp.full(2, value), device=PS)

    def read() -> Any:
        with device(WORKER):
            return v[...] * 2

    return read


def test_killed_task_comes_back_empty_and_is_taken_back_until_it_dies_too_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(ps=1, workers=1, restarts=1) as cluster:
        session = cluster.session()
        assert session.run(step(1.0)).tolist() == [2, 2]
        before, pid = incarnations(cluster), cluster.pid(PS)
        cluster.kill(PS)
        assert cluster.wait_for_tasks(30)
        after = incarnations(cluster)
        assert (after[PS] != before[PS], after[WORKER] == before[WORKER]) == (
            True,
            True,
        )
        assert cluster.pid(PS) != pid
        # The address is the old one, and what it held is gone: nobody pretends else.
        with pytest.raises(JGError):
            session.run(step(1.0))
        assert cluster.session(container="new").run(step(3.0)).tolist() == [6, 6]

        cluster.kill(PS)
        clock = SystemClock()
        began = clock.now()
        with pytest.raises(TaskMissingError, match=f"{PS} died 2 times in 60 s"):
            cluster.wait_for_tasks(30)
        assert clock.now() - began < 10  # at once: it would be waited for in vain
        told = [r for r in caplog.records if r.levelname == "ERROR"]
        assert len(told) == 1
        assert "SIGKILL, and is not started again" in told[0].getMessage()
        assert "listens on" in told[0].getMessage()  # the end of its log
        did = [event.kind for event in cluster.events() if event.by == "launcher"]
        assert did == ["died", "restarted", "abandoned"]
        cluster.restart(PS)  # by hand, however often it died
        assert cluster.wait_for_tasks(30)
        processes = [psutil.Process(cluster.pid(WORKER))]
    assert not psutil.wait_procs(processes, timeout=5)[1]
    assert not [t for t in threading.enumerate() if t.name.startswith("jgraph-/job")]


@pytest.mark.nightly
def test_master_that_died_is_waited_for_too() -> None:
    with LocalCluster(ps=1, workers=1, restarts=1) as cluster:
        assert cluster.master == WORKER
        cluster.kill(WORKER)
        assert cluster.wait_for_tasks(30)
        assert cluster.session().run(step(1.0)).tolist() == [2, 2]
        cluster.kill(WORKER)  # and closing does not wait for another start


def test_without_restarts_a_lost_task_is_not_waited_for() -> None:
    with LocalCluster(ps=0, workers=1) as cluster:
        assert cluster.wait_for_tasks(30)
        cluster.kill(WORKER)
        with pytest.raises(TaskMissingError, match="restarts=5"):
            cluster.wait_for_tasks(30)
        stop = threading.Event()
        stop.set()
        assert not cluster.wait_for_tasks(30, stop=stop)


def test_what_is_no_number_of_restarts_is_refused() -> None:
    for restarts in (-1, 1.5):
        with pytest.raises(ConfigError, match=f"restarts is {restarts}"):
            LocalCluster(restarts=restarts)  # type: ignore[arg-type]


def test_what_is_no_time_to_be_frozen_is_refused() -> None:
    for frozen_s in (0, -1.0, "ten", float("nan")):
        with pytest.raises(ConfigError, match=f"frozen_s is '?{frozen_s}"):
            LocalCluster(restarts=1, frozen_s=frozen_s)  # type: ignore[arg-type]
