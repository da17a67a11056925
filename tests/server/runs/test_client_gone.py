"""A run whose client is gone: what it came to is saved by its master, if that can."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.client.runs.runs import wait_saved
from jgraph.errors import JGError
from jgraph.runtime.files.step_files import steps_in
from jgraph.train import trainer as trainers
from jgraph.train.checkpoint.checkpoints import Checkpoints
from tests.support.counting import BATCH, IDS, after, counted, trainer
from tests.support.detached_client import STRATEGIES
from tests.support.fault import Stopwatch
from tests.support.fit_forever import fit_and_kill, fitting
from tests.support.servers import Servers

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS = "/job:ps/task:1"


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


def check_saved(cluster: Cluster, strategy: str, directory: Path) -> None:
    """What a run came to that was stopped is in its newest checkpoint."""
    state, step = until_it_is_over(cluster)
    wait_saved(cluster, str(directory), 60)
    assert (state, steps_in(directory)[-1]) == ("stopped", step)
    there = trainer(cluster, STRATEGIES[strategy])
    there.restore(directory)
    position = there.current_position()
    assert position is not None
    assert position["done"] == step * (1 if strategy == "async" else 2)
    assert position["again"] == 0
    assert [round(count.sum() / BATCH) for count in counted(there)] == [step] * 2
    there.close()


@pytest.mark.row(30)
@pytest.mark.parametrize(
    "strategy", ["async", pytest.param("sync", marks=pytest.mark.nightly)]
)
def test_what_a_run_came_to_whose_client_is_gone_is_saved(
    servers: Servers, strategy: str, tmp_path: Path
) -> None:
    target = servers.server("/job:worker/task:0").target
    fit_and_kill(target, tmp_path, strategy, lease_s=1.0)
    with connect(target, timeout_s=20) as cluster:
        check_saved(cluster, strategy, tmp_path)


@pytest.mark.row(30)
@pytest.mark.parametrize(
    "strategy", ["async", pytest.param("sync", marks=pytest.mark.nightly)]
)
def test_what_a_run_came_to_whose_client_was_closed_is_saved(
    servers: Servers, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, and its loops train on until the lease of the client is over."""
    monkeypatch.setattr(trainers, "CLIENT_S", 1.0)
    target = servers.server("/job:worker/task:0").target
    saved = threading.Event()
    with connect(target, timeout_s=20) as cluster:
        with connect(target, timeout_s=20) as closed:
            run = trainer(closed, STRATEGIES[strategy]).fit(
                IDS,
                steps=10**6,
                batch_size=BATCH,
                checkpoint=Checkpoints(tmp_path, every=50),
                callbacks=[after(0, saved.set, tmp_path)],
                progress=False,
                block=False,
            )
            assert saved.wait(20)
        with pytest.raises(JGError, match="closed"):
            run.wait(20)
        check_saved(cluster, strategy, tmp_path)


@pytest.mark.nightly
@pytest.mark.row(36)
def test_a_run_whose_client_is_gone_before_a_lost_ps_is_back_is_taken_back_all_the_same(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = servers.server("/job:worker/task:0").target
    with fitting(target, tmp_path, lease_s=1.0):
        servers.lose(PS)
        until_said(caplog, "until all ps answer")
    until_said(caplog, "is gone for 1 s; the run ends")
    servers.start_again(PS)
    with connect(target, timeout_s=20) as cluster:
        assert until_it_is_over(cluster) == ("stopped", steps_in(tmp_path)[-1])


def until_said(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Waits until the master of the run, which is here, has logged so."""
    clock = Stopwatch()
    while words not in caplog.text:
        assert clock.seconds < 30


@pytest.mark.row(30)
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
