"""Workers that die during a run: they are waited for, and take part in it once more.

As ``tests/faults/test_rows.py`` has it, with gradients that carry an error on.
"""

import threading
from collections.abc import Sequence

import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import connect
from jgraph.client.session import Session
from jgraph.clock import SystemClock
from jgraph.errors import TaskLostError
from jgraph.launch.local.cluster import LocalCluster
from jgraph.plan.program.program import Program
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.detach import make
from tests.support.models import NnxMLP, data, nnx_loss
from tests.support.servers import Servers

pytestmark = pytest.mark.usefixtures("nothing_is_left")

WORKER = "/job:worker/task:1"


@pytest.mark.row(1, 3)
@pytest.mark.procs
@pytest.mark.nightly
def test_killed_worker_is_back_in_the_same_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    back = threading.Event()

    def kill_once_and_stop_when_it_is_back(run: Run, report: Report) -> None:
        said = [r.getMessage() for r in caplog.records if r.name == "jgraph.recover"]
        if not killed:
            killed.append(run.steps)
            cluster.kill(WORKER)
        elif any(f"{WORKER} answers again" in line for line in said):
            by = run.metrics("loss")["replica"]
            steps_back.append(int((by == 1).sum()))
            if steps_back[-1] > steps_back[0]:
                back.set()
                run.stop()

    killed: list[int] = []
    steps_back: list[int] = []
    with LocalCluster(ps=1, workers=2, restarts=3) as cluster:
        strategy = AsyncPS(max_staleness=4, gradient_dtype="int8")
        model, tx = NnxMLP(rngs=nnx.Rngs(0)), optax.adam(1e-2)
        trainer = Trainer(model, nnx_loss, tx, cluster=cluster, strategy=strategy)
        run = trainer.fit(
            data(),
            steps=10**6,
            batch_size=8,
            callbacks=[kill_once_and_stop_when_it_is_back],
            progress=False,
        )
        assert back.is_set()
        assert run.state == "stopped"
        assert run.recoveries() == []  # nothing was done again
        loss = run.metrics("loss")
        assert len(np.unique(loss["step"])) == len(loss["step"])
        assert WORKER in run.staleness()
        run = trainer.fit(data(), steps=20, batch_size=8, progress=False)
        assert run.state == "done"
        trainer.close()


@pytest.mark.procs
@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_a_worker_that_is_killed_as_a_run_begins_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    register, calls = Session.register_all, list[int]()

    def killing(session: Session, programs: Sequence[Program]) -> list[str]:
        calls.append(len(programs))
        if len(calls) == 1:
            cluster.kill(WORKER)
        return register(session, programs)

    monkeypatch.setattr(Session, "register_all", killing)
    with LocalCluster(ps=1, workers=2, restarts=1) as cluster:
        trainer = make(cluster, strategy)
        run = trainer.fit(data(), steps=20, batch_size=8, progress=False)
        assert run.state == "done"
        assert {m.task for m in run.members()} == set(cluster.tasks("worker"))
        trainer.close()
    assert len(calls) > 1


@pytest.mark.row(9)
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(AsyncPS(), marks=pytest.mark.nightly), SyncPS()],
    ids=["async", "sync"],
)
def test_a_run_whose_workers_all_stay_away_ends_and_says_so(
    caplog: pytest.LogCaptureFixture,
    strategy: Strategy,
) -> None:
    servers, clock = Servers(ps=1, worker=2), SystemClock()
    ended: list[float] = []

    def lose_all(run: Run, report: Report) -> None:
        if not ended:
            ended.append(clock.now())
            for number in range(2):
                servers.lose(f"/job:worker/task:{number}")

    try:
        target = servers.server("/job:ps/task:0").target
        with connect(target, timeout_s=20) as cluster:
            trainer = make(cluster, strategy)
            with pytest.raises(TaskLostError, match="/job:worker/task:"):
                trainer.fit(
                    data(),
                    steps=10**6,
                    batch_size=8,
                    callbacks=[lose_all],
                    progress=False,
                    wait_s=1,
                )
            assert clock.now() - ended[0] > 1.0
            trainer.close()
    finally:
        servers.stop()
    said = [record.getMessage() for record in caplog.records]
    assert "no worker is left; the run waits up to 1 s for one" in said
