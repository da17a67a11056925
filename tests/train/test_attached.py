"""Runs that go on when their client is gone, and are found again."""

import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from jgraph.cli import main
from jgraph.cluster.client import Cluster, connect
from jgraph.cluster.local import LocalCluster
from jgraph.errors import ConfigError
from jgraph.train.async_ps import AsyncPS
from jgraph.train.local import Local
from jgraph.train.strategies import Strategy
from jgraph.train.sync_ps import SyncPS
from tests.cluster.conftest import connected
from tests.train import detach
from tests.train.detach import make
from tests.train.models import data


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=2) as cluster:
        yield cluster


@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_detached_run_is_found_with_all_that_it_told(
    cluster: Cluster, strategy: Strategy
) -> None:
    there = make(cluster, strategy)
    run = there.fit(data(), steps=60, batch_size=8, progress=False, detached=True)
    info = cluster.runs()[-1]
    assert (info.state, info.step, info.steps) == ("done", 60, 60)
    found = make(cluster, strategy).attach(info.name).wait(30)
    assert (found.state, found.steps) == ("done", 60)
    for mine, theirs in zip(
        *(r.metrics("loss").values() for r in (run, found)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    kernels = [r.model().layers[0].kernel[...] for r in (run, found)]
    np.testing.assert_array_equal(*kernels)
    assert found.repeated() == run.repeated() == 0
    assert found.metric_names == run.metric_names
    there.close()


def test_run_that_does_not_go_on_is_not_found(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="does not have the run 'yesterday'"):
        make(cluster).attach("yesterday")
    with pytest.raises(ConfigError, match="does not have one run that goes on"):
        make(cluster).attach()


def test_run_that_cannot_outlive_its_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs a cluster, and Local\(\) trains in"):
        make(None, Local()).fit(data(), steps=1, batch_size=8, detached=True)


@pytest.mark.procs
@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_row_30_run_goes_on_when_its_client_is_killed_and_another_finds_it(
    capsys: pytest.CaptureFixture[str], strategy: Strategy
) -> None:
    with LocalCluster(ps=1, workers=2) as servers:
        command = [sys.executable, "-m", detach.__name__, servers.target]
        command.append(type(strategy).__name__)
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        assert client.stdout.readline() == "trains\n"
        client.kill()
        client.wait(10)
        client.stdout.close()
        with connect(servers.target, timeout_s=20) as cluster:
            there = make(cluster, strategy)
            run = there.attach()
            before = cluster.runs()[0].step
            while cluster.runs()[0].step < before + 200:
                cluster.session().run(lambda x: x + 1, 1.0)
            with pytest.raises(SystemExit) as ended:
                main(["runs", servers.target, "--json"])
            assert ended.value.code == 0
            (told,) = json.loads(capsys.readouterr().out)
            assert (told["state"], told["steps"]) == ("running", 10**6)
            run.stop()
            run.wait(30)
            assert run.state == "stopped"
            assert cluster.runs()[0].state == "stopped"
            loss = run.metrics("loss")
            assert loss["step"].tolist() == [*range(1, run.steps + 1)]
            replicas = {0, 1} if isinstance(strategy, AsyncPS) else {0}
            assert set(loss["replica"]) == replicas
            assert loss["value"][-100:].mean() < loss["value"][:20].mean()
            done = run.steps
            run = there.fit(data(), steps=20, batch_size=8, progress=False)
            assert run.steps == done + 20
            there.close()
