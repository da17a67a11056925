"""A task is lost while a run is prepared: before that nobody looks after it."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.client.session import Session
from jgraph.errors import TaskLostError
from jgraph.launch.local.cluster import LocalCluster
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.data.source import Source
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.federated import Federated
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.counting import BATCH, IDS, check_recovered, trainer
from tests.support.fault import Fault
from tests.support.servers import Servers

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

PS: Final = "/job:ps/task:1"
WORKER: Final = "/job:worker/task:0"
STEPS: Final = 40
SAID: Final = "The run has not begun; it waits up to 300 s until all tasks answer"


def act_once(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    act: Callable[[], Any],
    *,
    before: bool,
) -> list[str]:
    """Acts when a session first does something; returns what tells how often it did."""
    does, acted = getattr(Session, method), list[str]()

    def doing(session: Session, *args: Any, **options: Any) -> Any:
        is_first = not acted
        acted.append(method)
        if is_first and before:
            act()
        result = does(session, *args, **options)
        if is_first and not before:
            act()
        return result

    monkeypatch.setattr(Session, method, doing)
    return acted


def fit(there: Trainer, checkpoint: Checkpoints | None = None) -> Run:
    return there.fit(
        IDS, steps=STEPS, batch_size=BATCH, progress=False, checkpoint=checkpoint
    )


def trained(cluster: Cluster) -> int:
    """Returns how many programs of a training step the first worker has."""
    names = [p.partition("-")[0] for p in cluster.status().tasks[2].programs]
    return names.count("train_step") + names.count("contribute")


def check_done(run: Run) -> None:
    """Fails unless a run did all, and nothing again."""
    assert (run.state, run.steps, run.recoveries()) == ("done", STEPS, [])


def share_of(strategy: Strategy) -> int:
    """Returns how many batches an update is the average of."""
    return 2 if isinstance(strategy, SyncPS) else 1


def dies_and_is_back(cluster: LocalCluster, task: str = PS) -> None:
    cluster.kill(task)
    cluster.wait_for_tasks(30)


@pytest.mark.row(61)
@pytest.mark.parametrize(
    ("strategy", "method", "when"),
    [
        pytest.param(SyncPS(), "register_all", "back", marks=pytest.mark.nightly),
        pytest.param(AsyncPS(), "initialize", "first", marks=pytest.mark.nightly),
        pytest.param(SyncPS(), "initialize", "first", marks=pytest.mark.chaos),
        pytest.param(AsyncPS(), "register_all", "away", marks=pytest.mark.chaos),
        pytest.param(SyncPS(), "register_all", "away", marks=pytest.mark.chaos),
        pytest.param(AsyncPS(), "register_all", "back", marks=pytest.mark.chaos),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, AsyncPS | SyncPS) else one,
)
def test_a_ps_that_is_killed_while_a_run_is_prepared_is_waited_for(
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    strategy: Strategy,
    method: str,
    when: str,
) -> None:
    """Also if it is back before anybody has asked it for something."""
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    there = trainer(cluster, strategy)
    dies = lambda: dies_and_is_back(cluster) if when == "back" else cluster.kill(PS)
    acted = act_once(monkeypatch, method, dies, before=when == "first")
    run = fit(there)
    assert len(acted) > 1
    check_done(run)
    assert trained(cluster) == 1  # what was given for the first try is taken back
    check_recovered(there, run, share=share_of(strategy))
    fault.names += [SAID, "SIGKILL"]
    there.close()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """Servers of this process, of which who connects starts lost ones again."""
    monkeypatch.setattr(Cluster, "starts_again", True)
    servers = Servers(ps=2, worker=2)
    yield servers
    servers.stop()


def lose(servers: Servers) -> None:
    servers.lose(PS)
    servers.start_again(PS)


@pytest.mark.row(61)
@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_a_run_whose_ps_is_killed_before_its_first_step_has_the_values_of_the_last(
    fault: Fault,
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    strategy: Strategy,
) -> None:
    """They are in a checkpoint, of exactly these updates."""
    with connect(servers.server(WORKER).target, timeout_s=20) as cluster:
        there, saves = trainer(cluster, strategy), Checkpoints(fault.path, every=1000)
        fit(there, saves)
        acted = act_once(monkeypatch, "lacking", partial(lose, servers), before=True)
        run = fit(there, saves)
        assert len(acted) > 1
        assert (run.state, run.steps, run.recoveries()) == ("done", 2 * STEPS, [])
        saved = fault.path / str(STEPS)
        check_recovered(there, run, saved, share=share_of(strategy))
        there.close()
    fault.names += [SAID, f"it goes on from step {STEPS} in {fault.path}"]


@pytest.mark.row(61)
def test_values_that_nothing_has_are_not_begun_anew(
    fault: Fault, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run says so, and leaves the other ps as it was."""
    with connect(servers.server(WORKER).target, timeout_s=20) as cluster:
        there = trainer(cluster, AsyncPS())
        fit(there)
        acted = act_once(monkeypatch, "lacking", partial(lose, servers), before=True)
        with pytest.raises(TaskLostError, match="did not go on by itself") as caught:
            fit(there)
        assert len(acted) > 1
        what = f"{PS} lost what it held before the run began; there is no checkpoint"
        assert what in str(caught.value)
        assert trained(cluster) == 1  # of the run before
        there.close()
    fault.names += [SAID]


def source_in(directory: Path) -> Source:
    directory.mkdir(parents=True, exist_ok=True)
    np.savez(directory / "examples.npz", id=IDS)
    return Source.npz(str(directory / "examples.npz"))


@pytest.mark.row(63)
@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        (AsyncPS(), ""),
        pytest.param(SyncPS(), "initialize", marks=pytest.mark.nightly),
        pytest.param(AsyncPS(elastic=Elastic()), "", marks=pytest.mark.chaos),
        pytest.param(Federated(), "", marks=pytest.mark.chaos),
        pytest.param(Federated(), "initialize", marks=pytest.mark.chaos),
        pytest.param(AsyncPS(), "initialize", marks=pytest.mark.chaos),
        pytest.param(SyncPS(), "register_all", marks=pytest.mark.chaos),
    ],
    ids=lambda one: one or "open" if isinstance(one, str) else type(one).__name__,
)
def test_a_worker_that_is_killed_while_a_run_is_prepared_has_its_data_again(
    fault: Fault, monkeypatch: pytest.MonkeyPatch, strategy: Strategy, method: str
) -> None:
    """Whether it dies before it opens the source, or after."""
    cluster = fault.cluster(
        ps=2, workers=2, restarts=3, allow_sources=[str(fault.path)], elastic=True
    )
    there, source = trainer(cluster, strategy), source_in(fault.path)
    if method:
        dies = lambda: dies_and_is_back(cluster, WORKER)
        act_once(monkeypatch, method, dies, before=method == "initialize")
    else:
        cluster.kill(WORKER)
    run = there.fit(source, steps=STEPS, batch_size=BATCH, progress=False)
    check_done(run)
    if not isinstance(strategy, Federated):
        check_recovered(there, run, share=share_of(strategy))
    fault.names += ["SIGKILL"]
    there.close()


@pytest.mark.row(63)
@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        pytest.param(AsyncPS(), "put_data", marks=pytest.mark.nightly),
        pytest.param(SyncPS(), "put_data", marks=pytest.mark.chaos),
        pytest.param(SyncPS(), "initialize", marks=pytest.mark.chaos),
        pytest.param(AsyncPS(), "register_all", marks=pytest.mark.chaos),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
@pytest.mark.parametrize("fed", [False, True], ids=["arrays", "fed"])
def test_a_worker_that_is_killed_once_it_has_arrays_is_given_them_again(
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    strategy: Strategy,
    method: str,
    fed: bool,
) -> None:
    """Also where this process reads the data and feeds the workers."""
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    there = trainer(cluster, strategy)
    dies = lambda: dies_and_is_back(cluster, WORKER)
    acted = act_once(monkeypatch, "initialize" if fed else method, dies, before=fed)
    data = batches if fed else IDS
    size = None if fed else BATCH
    run = there.fit(data, steps=STEPS, batch_size=size, progress=False)
    assert acted
    check_done(run)
    if not fed:
        check_recovered(there, run, share=share_of(strategy))
    fault.names += ["SIGKILL"]
    there.close()


def batches() -> Iterator[Any]:
    """Yields batches without end."""
    while True:
        yield from np.split(IDS, len(IDS) // BATCH)
