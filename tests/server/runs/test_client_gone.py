"""A run whose client is gone: what it came to is saved by its master, if that can."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.client.runs.runs import wait_saved
from jgraph.runtime.files.step_files import steps_in
from tests.support.counting import BATCH, counted, trainer
from tests.support.detached_client import STRATEGIES
from tests.support.fault import Stopwatch
from tests.support.fit_forever import fit_and_kill
from tests.support.servers import Servers

pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.row(30)]


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=2)
    yield servers
    servers.stop()


def until_it_is_over(cluster: Cluster) -> tuple[str, int]:
    """Waits until the run has ended; returns how, and with how many updates."""
    clock = Stopwatch()
    while True:
        (run,) = cluster.runs()
        if run.state != "running":
            return run.state, run.step
        assert clock.seconds < 60


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_what_a_run_came_to_whose_client_is_gone_is_saved(
    servers: Servers, strategy: str, tmp_path: Path
) -> None:
    target = servers.server("/job:worker/task:0").target
    fit_and_kill(target, tmp_path, strategy, lease_s=1.0)
    with connect(target, timeout_s=20) as cluster:
        state, step = until_it_is_over(cluster)
        wait_saved(cluster, str(tmp_path), 60)
        assert (state, steps_in(tmp_path)[-1]) == ("stopped", step)
        there = trainer(cluster, STRATEGIES[strategy])
        there.restore(tmp_path)
        position = there.current_position()
        assert position is not None
        assert position["done"] == step * (1 if strategy == "async" else 2)
        assert position["again"] == 0
        assert [round(count.sum() / BATCH) for count in counted(there)] == [step] * 2
        there.close()


def test_why_a_run_whose_client_is_gone_is_not_saved_is_said(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = servers.server("/job:worker/task:0").target
    fit_and_kill(target, tmp_path, lease_s=1.0)
    shutil.rmtree(tmp_path)
    with connect(target, timeout_s=20) as cluster:
        assert until_it_is_over(cluster)[0] == "stopped"
        (why,) = [
            record.getMessage()
            for record in caplog.records
            if "is not saved any more, as its client is gone" in record.getMessage()
        ]
        assert str(tmp_path) in why
