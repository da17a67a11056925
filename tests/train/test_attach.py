"""Runs that go on when their client is gone, and are found again."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as orbax
import pytest
from orbax.checkpoint import checkpoint_managers as managers

from jgraph.cli import main
from jgraph.client.cluster import Cluster, connect
from jgraph.client.runs.runs import wait_saved
from jgraph.cluster.options import RECORDS_DIR
from jgraph.errors import (
    ClusterBusyError,
    ConfigError,
    DeadlineError,
    NonFiniteError,
    TaskLostError,
)
from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.files.step_files import TEMPORARY, steps_in
from jgraph.runtime.files.writer_lease import newest
from jgraph.train.checkpoint.checkpoint import verify
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.state.durability import Durability
from jgraph.train.strategies import remote_runs
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support import detach
from tests.support.detach import make
from tests.support.models import data
from tests.support.servers import Servers, connected
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=2) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
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


def test_run_goes_on_when_a_client_that_is_attached_to_it_fails(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, left_at = make(cluster), list[int]()

    def attach_once(run: Run, report: Report) -> None:
        if not left_at:
            with monkeypatch.context() as patched:
                patched.setattr(Run, "report", fail_to_report)
                with pytest.raises(ZeroDivisionError):
                    make(cluster).attach().wait(30)
            left_at.append(cluster.runs()[-1].step)
        elif report.step > left_at[0] + 20:
            run.stop()

    def fail_to_report(run: Run, report: Report) -> None:
        raise ZeroDivisionError

    run = there.fit(
        data(),
        steps=10**6,
        batch_size=8,
        callbacks=[attach_once],
        progress=False,
        detached=True,
    )
    assert run.state == "stopped"
    assert run.steps > left_at[0] + 20
    there.close()


def test_trainer_that_is_attached_trains_nothing_beside_the_run_and_leaves_it(
    cluster: Cluster,
) -> None:
    there, begun = make(cluster), threading.Event()
    fit = partial(there.fit, data(), batch_size=8, progress=False, block=False)
    run = fit(steps=10**6, detached=True, callbacks=lambda run, report: begun.set())
    assert begun.wait(60)
    with make(cluster) as other:
        attached = other.attach()
        with pytest.raises(ClusterBusyError):
            other.fit(data(), steps=1, batch_size=8, progress=False)
    with pytest.raises(ClusterBusyError, match="drop the run's variables"):
        there.close()
    assert run.state == attached.state == "running"
    assert attached.repeated() == 0  # as its master says, which deals its data out
    run.stop()
    assert attached.wait(30).steps == run.wait(30).steps > 0
    there.close()


@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_detached_run_that_a_batch_ends_tells_all_that_was_applied(
    cluster: Cluster, strategy: Strategy
) -> None:
    x, y = data()
    x[17] = 3e38  # finite, and its loss is not
    there = make(cluster, strategy, check_finite=True)
    with pytest.raises(NonFiniteError):
        there.fit((x, y), steps=60, batch_size=8, progress=False, detached=True)
    told = cluster.runs()[-1]
    applied = dict(zip(there.names, there.current_values(), strict=True))["global_step"]
    assert (told.state, told.step) == ("failed", applied)
    there.close()


def begin_and_kill(
    target: str, strategy: Strategy, directory: Path, wait_s: float = 60
) -> None:
    """Lets a client begin a detached run, and kills it when there is a checkpoint."""
    command = [sys.executable, "-m", detach.__name__, target]
    command += [type(strategy).__name__, str(directory), str(wait_s)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "saved\n"
    client.kill()
    client.wait(10)
    client.stdout.close()


def test_run_that_does_not_go_on_is_not_found(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="does not have the run 'yesterday'"):
        make(cluster).attach("yesterday")
    with pytest.raises(ConfigError, match="does not have one run that goes on"):
        make(cluster).attach()


def test_run_that_cannot_outlive_its_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs a cluster, and Local\(\) trains in"):
        make(None, Local()).fit(data(), steps=1, batch_size=8, detached=True)
    with pytest.raises(ConfigError, match="attach finds a run on a cluster"):
        make(None, Local()).attach()


@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_a_detached_run_is_at_its_master_when_fit_returns(
    cluster: Cluster, strategy: Strategy
) -> None:
    """A script that ends there would take with it what has not begun."""
    before = {info.name for info in cluster.runs()}
    options: dict[str, Any] = {"batch_size": 8, "detached": True, "progress": False}
    run = make(cluster, strategy).fit(data(), steps=60, block=False, **options)
    assert len({info.name for info in cluster.runs()} - before) == 1
    assert run.wait(30).steps == 60


@pytest.mark.nightly  # smaller: the last one of this file
@pytest.mark.parametrize("durability", ["replica", "log"])
@pytest.mark.parametrize("strategy", [AsyncPS, SyncPS], ids=["async", "sync"])
def test_who_attached_to_a_run_with_copies_goes_on_with_copies_of_its_own(
    strategy: Any,
    durability: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RECORDS_DIR, str(tmp_path))
    options: dict[str, Any] = {"steps": 20, "batch_size": 8, "progress": False}
    with connected(ps=2, worker=1) as cluster:
        there = make(cluster, strategy(durability=durability))
        there.fit(data(), detached=True, **options)
        found = make(cluster, strategy(durability=durability))
        assert found.attach(cluster.runs()[-1].name).wait(30).steps == 20
        assert found.fit(data(), **options).steps == 40


def test_a_detached_run_that_does_not_begin_says_so_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise ClusterBusyError("no room for another run")

    monkeypatch.setattr(remote_runs, "submit_run", refuse)
    options: dict[str, Any] = {"detached": True, "block": False}
    with pytest.raises(ClusterBusyError, match="no room"):
        make(cluster).fit(data(), steps=9, batch_size=8, progress=False, **options)


@pytest.mark.row(30)
@pytest.mark.nightly  # smaller: tests/server/runs/test_client_gone.py
@pytest.mark.procs
@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_run_goes_on_when_its_client_is_killed_and_another_finds_it(
    capsys: pytest.CaptureFixture[str], strategy: Strategy, tmp_path: Path
) -> None:
    with LocalCluster(ps=1, workers=2, restarts=3) as servers:
        begin_and_kill(servers.target, strategy, tmp_path)
        with connect(servers.target, timeout_s=20) as cluster:
            there = make(cluster, strategy)
            run = there.attach()
            before, saved = cluster.runs()[0].step, steps_in(tmp_path)[-1]
            while (
                cluster.runs()[0].step < before + 200 or steps_in(tmp_path)[-1] <= saved
            ):
                cluster.session().run(lambda x: x + 1, 1.0)
            with pytest.raises(SystemExit) as ended:
                main(["runs", servers.target, "--json"])
            assert ended.value.code == 0
            (told,) = json.loads(capsys.readouterr().out)
            assert (told["state"], told["steps"]) == ("running", 10**6)
            with pytest.raises(DeadlineError, match="RunSaved"):
                wait_saved(cluster, str(tmp_path), 0.1)
            run.stop()
            run.wait(30)
            wait_saved(cluster, str(tmp_path), 30.0)
            assert newest(tmp_path).released
            assert steps_in(tmp_path)[-1] == run.steps
            assert run.state == "stopped"
            assert cluster.runs()[0].state == "stopped"
            loss = run.metrics("loss")
            assert loss["step"].tolist() == [*range(1, run.steps + 1)]
            replicas = {0, 1} if isinstance(strategy, AsyncPS) else {0}
            assert set(loss["replica"]) == replicas
            assert loss["value"][-100:].mean() < loss["value"][:20].mean()
            done, position = run.steps, there.current_position()
            assert position is not None
            assert position["done"] > before
            # Who has started the tasks may follow it as well.
            assert make(servers, strategy).attach(told["name"]).wait(30).steps == done
            run = there.fit(data(), steps=20, batch_size=8, progress=False)
            assert run.steps == done + 20
            there.close()


@pytest.mark.row(12, 30)
@pytest.mark.nightly
@pytest.mark.procs
def test_a_detached_run_that_does_not_wait_for_a_ps_says_where_to_go_on(
    tmp_path: Path,
) -> None:
    with LocalCluster(ps=2, workers=1, restarts=3) as servers:
        begin_and_kill(servers.target, AsyncPS(), tmp_path, wait_s=0)
        servers.kill("/job:ps/task:1")
        assert servers.wait_for_tasks(30)
        with connect(servers.target, timeout_s=20) as cluster:
            (info,) = cluster.runs()
            assert info.state == "failed"
            there = make(cluster)
            text = rf"lost what it held.*trainer\.restore\('{tmp_path}'\)"
            with pytest.raises(TaskLostError, match=text):
                there.attach(info.name)
            there.restore(tmp_path)
            saved = steps_in(tmp_path)[-1]
            assert saved >= 50
            run = there.fit(data(), steps=20, batch_size=8, progress=False)
            assert run.steps == saved + 20
            there.close()


@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_master_saves_a_detached_run_and_any_client_goes_on_from_there(
    cluster: Cluster, strategy: Strategy, tmp_path: Path
) -> None:
    where = Checkpoints(tmp_path, every=20, keep=2)
    there = make(cluster, strategy)
    options: Any = {"batch_size": 8, "progress": False}
    run = there.fit(data(), steps=90, detached=True, checkpoint=where, **options)
    assert steps_in(tmp_path)[-1] == run.steps == 90
    assert len(steps_in(tmp_path)) == 2
    manifest = verify(tmp_path / "90")
    assert manifest.position == there.current_position()
    assert not [path for path in tmp_path.iterdir() if TEMPORARY in path.name]
    again = make(cluster, strategy).restore(tmp_path)
    for mine, theirs in zip(
        again.current_values(), there.current_values(), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    plain = orbax.StandardCheckpointer().restore(tmp_path / "90")
    kernel = run.model().layers[0].kernel[...]
    np.testing.assert_array_equal(plain["params"]["layers"]["0"]["kernel"], kernel)
    run = again.fit(data(), steps=10, checkpoint=where, **options)
    assert steps_in(tmp_path)[-1] == run.steps == 100
    for trainer in (there, again):
        trainer.close()


@pytest.mark.row(26)
def test_a_detached_run_whose_disk_is_full_goes_on_and_says_where(
    cluster: Cluster,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is room again after the second save that failed."""
    text = f"not saved in {tmp_path}: JG-304 the next checkpoint in {tmp_path} needs"
    full = threading.Event()

    def levels() -> list[str]:
        return [r.levelname for r in caplog.records if text in r.getMessage()]

    def usage(path: Path) -> Any:
        there = disk_usage(path)
        return there._replace(free=0) if full.is_set() else there

    def fill_then_make_room(run: Run, report: Report) -> None:
        full.set() if len(levels()) < 2 else full.clear()
        if "ERROR" in levels() and len(steps_in(tmp_path)) > 1:
            run.stop()

    disk_usage = shutil.disk_usage
    monkeypatch.setattr("jgraph.runtime.files.step_files.shutil.disk_usage", usage)
    there = make(cluster)
    run = there.fit(
        data(),
        steps=10**6,
        batch_size=8,
        detached=True,
        callbacks=[fill_then_make_room],
        checkpoint=Checkpoints(tmp_path, every=10),
        progress=False,
    )
    assert run.state == "stopped"
    assert levels()[:2] == ["WARNING", "ERROR"]
    assert steps_in(tmp_path)[-1] == run.steps
    verify(tmp_path / str(run.steps))
    there.close()


def test_what_a_master_cannot_save_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    every = managers.EveryNSteps(10)
    with pytest.raises(ConfigError, match=r"saves its checkpoints: keep=EveryNSteps"):
        make(cluster).fit(
            data(),
            steps=1,
            batch_size=8,
            detached=True,
            checkpoint=Checkpoints(tmp_path, keep=every),
        )


@pytest.mark.parametrize(
    "durability", ["log", pytest.param("replica", marks=pytest.mark.nightly)]
)
def test_what_is_kept_of_a_run_goes_with_it_whoever_trains_next(
    durability: Durability, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORDS_DIR, str(tmp_path))
    options: dict[str, Any] = {"steps": 4, "batch_size": 8, "progress": False}
    servers = Servers(ps=2, worker=1)
    tasks = [server._server for server in servers.servers]

    def streams() -> list[str]:
        kept = [one.service.records for one in tasks if one is not None]
        return [stream for one in kept for stream in (*one._sources, *one._copies)]

    try:
        with connect(servers.servers[0].target, timeout_s=20) as cluster:
            there = make(cluster, AsyncPS(durability=durability))
            for _ in range(2):
                there.fit(data(), **options)
                wait_until(lambda: not streams())
            there.fit(data(), detached=True, **options)
            found = make(cluster, AsyncPS(durability=durability))
            found.attach(cluster.runs()[-1].name).wait(30)
            assert found.fit(data(), **options).steps == 16
            wait_until(lambda: not streams())
        assert not list(tmp_path.rglob("*.log"))
    finally:
        servers.stop()
