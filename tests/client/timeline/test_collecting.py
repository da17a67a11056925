"""The timeline of a real cluster: before now, and from now on."""

import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph import cli
from jgraph.client.cluster import Cluster, connect
from jgraph.client.session import Session
from jgraph.errors import ConfigError
from tests.support.cli import run
from tests.support.servers import Servers, cluster, servers, session

__all__ = ["cluster", "servers", "session"]
X = np.ones((2, 4), np.float32)


def ran(session: Session, steps: int) -> None:
    w = jg.Variable("w", jnp.ones((4, 4)), device="/job:ps/task:0")

    def step(x: jnp.ndarray) -> jnp.ndarray:
        with jg.device("/job:worker/task:0"):
            return jnp.tanh(x @ w[...]).sum()

    for _ in range(steps):
        session.run(step, X)


def test_what_ran_before_is_told_by_all_tasks_on_one_clock(
    session: Session, cluster: Cluster
) -> None:
    ran(session, 5)
    trace = cluster.trace(last=30)
    assert trace.tasks == cluster.tasks()
    # Other tests of this file had steps on these tasks, too.
    newest = [part for part in trace.parts if part.program == "step"][-1].handle
    mine = [part for part in trace.parts if part.handle == newest]
    assert len({part.step for part in mine}) == 5
    assert {part.task for part in mine} >= {"/job:ps/task:0", "/job:worker/task:0"}
    # Tasks of one machine have one clock: what is sent comes later, to the microsecond.
    assert max(trace.clock_error_s.values()) <= 50e-6
    for step in {part.step for part in mine}:
        nodes = [node for p in mine if p.step == step for node in p.nodes]
        sent = {node.key: node.start_s for node in nodes if node.kind == "send"}
        came = {node.key: node.start_s for node in nodes if node.kind == "recv"}
        assert came.keys() == sent.keys()
        assert all(came[key] >= sent[key] for key in sent)
    assert trace.critical_path().steps >= 5
    spans = {span.name: span for span in trace.spans()}
    order = ("client trace step", "client plan and lower step", "register step")
    began = [spans[name].start_s for name in order]
    assert began == sorted(began)


def test_what_runs_from_now_on_is_told_and_nothing_before(
    session: Session, cluster: Cluster
) -> None:
    ran(session, 2)
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            ran(session, 1)

    thread = threading.Thread(target=go_on)
    thread.start()
    trace = cluster.trace(seconds=0.5)
    stop.set()
    thread.join()
    assert trace.steps
    first = min(part.over_s for part in trace.parts)
    assert first >= 0
    assert trace.seconds < 5


def test_a_task_that_is_lost_is_named_and_the_others_are_told() -> None:
    servers = Servers(ps=1, worker=2)
    with connect(servers.servers[-1].target, timeout_s=20) as cluster:
        ran(cluster.session(), 2)
        servers.lose("/job:ps/task:0")
        trace = cluster.trace(last=30)
        assert trace.missing == ("/job:ps/task:0",)
        assert trace.tasks == cluster.tasks("worker")
    servers.stop()


@pytest.mark.parametrize(
    "asked", [{}, {"seconds": 1, "last": 1}, {"last": 0}, {"seconds": float("nan")}]
)
def test_a_time_that_is_none_is_refused(
    cluster: Cluster, asked: dict[str, float]
) -> None:
    with pytest.raises(ConfigError, match="a trace is of"):
        cluster.trace(**asked)


def test_the_command_writes_a_file_and_says_what_steps_wait_for(
    session: Session,
    cluster: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran(session, 3)
    path = tmp_path / "cluster.pftrace"
    typed = ("trace", cluster.target, "--last", "30", "-o", str(path))
    code, out, _ = run(capsys, *typed)
    assert code == cli.OK
    assert "a step takes" in out
    assert f"wrote {path}" in out
    assert path.stat().st_size > 1000
    profiled = ("--seconds", "0.1", "--xprof", "worker:0")
    code, out, _ = run(capsys, "trace", cluster.target, *profiled, "-o", str(path))
    assert code == cli.OK
    assert f"wrote {path}" in out
    profiles = list(path.with_suffix(".xprof").rglob("*.xplane.pb"))
    assert len(profiles) == 1
    code, _, err = run(capsys, "trace", cluster.target, "-o", "cluster.txt")
    assert code == cli.FAILURE
    assert "cluster.pftrace" in err
