"""The account of privacy of a run that loses a ps, its master, or its client."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.client.runs.runs import wait_saved
from jgraph.coordination.run.privacy_account import Spent
from jgraph.errors import JGError
from jgraph.runtime.files.step_files import steps_in
from jgraph.train import trainer as trainers
from jgraph.train.checkpoint.checkpoint import restore_position
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.privacy.accounting import epsilon_of
from jgraph.train.trainer import Trainer
from tests.support.fault import Stopwatch
from tests.support.models import NnxMLP, data, nnx_loss
from tests.support.servers import Servers

pytestmark = pytest.mark.usefixtures("nothing_is_left")

FIRST, SECOND = "/job:ps/task:0", "/job:ps/task:1"
MASTER = "/job:worker/task:0"
EXAMPLES = 40
ALLOWED = 250
TARGET = epsilon_of([Spent("example", 1.0, 8 / EXAMPLES, ALLOWED)], 1e-5)


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=2)
    yield servers
    servers.stop()


@pytest.fixture
def cluster(servers: Servers) -> Iterator[Cluster]:
    with connect(servers.server(MASTER).target, timeout_s=20) as cluster:
        yield cluster


def private(cluster: Cluster, **options: Any) -> Trainer:
    privacy = jg.Privacy(noise_multiplier=1.0, clip=0.05, delta=1e-5, **options)
    return Trainer(
        *(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1)),
        cluster=cluster,
        strategy=jg.SyncPS(privacy=privacy),
    )


def spent(directory: Path) -> int:
    """How many updates the newest checkpoint says that its data had a part in."""
    newest = directory / str(steps_in(directory)[-1])
    position = restore_position(newest)
    assert position is not None
    ((unit, noise, rate, updates),) = position["privacy"]
    assert (unit, noise, rate) == ("example", 1.0, 8 / EXAMPLES)
    return int(updates)


class Losing:
    """A callback that loses tasks once a checkpoint is behind, and stops the run."""

    def __init__(self, servers: Servers, directory: Path, *tasks: str) -> None:
        self.servers, self.directory, self.tasks = servers, directory, tasks
        self.stops = True
        self._threads: list[threading.Thread] = []

    def __call__(self, run: Any, report: Any) -> None:
        if not self._threads and any(
            report.step > saved for saved in steps_in(self.directory)
        ):
            self._threads = [
                threading.Thread(target=self.lose, args=(t,)) for t in self.tasks
            ]
            for thread in self._threads:
                thread.start()
        elif (
            self.stops
            and run.recoveries()
            and report.step > run.recoveries()[-1].step + 20
        ):
            run.stop()

    def lose(self, task: str) -> None:
        self.servers.lose(task)
        self.servers.start_again(task)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)


def fit(
    there: Trainer,
    directory: Path,
    *callbacks: Any,
    every: int = 20,
    **options: Any,
) -> Any:
    return there.fit(
        data(EXAMPLES),
        **{"steps": 10**6, "progress": False, **options},
        batch_size=4,
        checkpoint=Checkpoints(directory, every=every),
        callbacks=callbacks,
    )


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param((SECOND,), marks=pytest.mark.nightly),
        (MASTER, SECOND),
        pytest.param((MASTER, FIRST), marks=pytest.mark.nightly),
    ],
    ids=["ps", "master and ps", "master and who decides"],
)
def test_updates_that_are_made_again_after_a_loss_count_again(
    servers: Servers, cluster: Cluster, tmp_path: Path, lost: tuple[str, ...]
) -> None:
    with private(cluster) as there:
        losing = Losing(servers, tmp_path, *lost)
        run = fit(there, tmp_path, losing)
        losing.join()
        recoveries = run.recoveries()
        assert recoveries
        again = sum(one.again for one in recoveries)
        assert run.steps > recoveries[-1].step
        assert spent(tmp_path) >= run.steps + again


@pytest.mark.nightly  # smaller: the one before, test_accounting.py
def test_a_run_that_goes_back_ends_before_its_target_is_passed(
    servers: Servers, cluster: Cluster, tmp_path: Path
) -> None:
    """Some of those that it may make are lost with the ps.

    There is one checkpoint on the way, half-way, and the ps is lost after it: a run
    lost at the step of a checkpoint makes nothing again.
    """
    with private(cluster, target_epsilon=TARGET) as there:
        losing = Losing(servers, tmp_path, SECOND)
        losing.stops = False
        run = fit(there, tmp_path, losing, every=ALLOWED // 2 + 1, steps=ALLOWED)
        losing.join()
        (recovery,) = run.recoveries()
        assert run.state == "stopped"
        assert run.steps + recovery.again == ALLOWED == spent(tmp_path)
        assert run.epsilon <= TARGET


@pytest.mark.parametrize(
    "loses",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["alone", "with a ps"],
)
def test_the_master_keeps_the_account_of_a_run_whose_client_is_gone(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: bool
) -> None:
    monkeypatch.setattr(trainers, "CLIENT_S", 1.0)
    saved = threading.Event()
    target = servers.server(MASTER).target
    with connect(target, timeout_s=20) as cluster:
        with connect(target, timeout_s=20) as closed:
            tell: Callable[..., Any] = lambda run, report: (
                saved.set() if steps_in(tmp_path) else None
            )
            run = fit(private(closed), tmp_path, tell, block=False)
            assert saved.wait(20)
            if loses:
                losing = Losing(servers, tmp_path, SECOND)
                losing.lose(SECOND)
                while not run.recoveries():
                    assert run.state == "running"
            again = sum(one.again for one in run.recoveries())
        with pytest.raises(JGError, match="closed"):
            run.wait(20)
        clock = Stopwatch()
        while (info := cluster.runs()[0]).state == "running":
            assert clock.seconds < 60
        wait_saved(cluster, str(tmp_path), 60)
        assert spent(tmp_path) == info.step + again
        with private(cluster) as there:
            there.restore(tmp_path)
            fit(there, tmp_path / "on", steps=5)
            assert spent(tmp_path / "on") == info.step + again + 5
