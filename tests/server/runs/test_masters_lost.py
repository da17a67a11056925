"""A run that loses masters in turn, or an order to halt."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.errors import TaskLostError
from jgraph.rpc.frames import body_of
from jgraph.rpc.transport import Frame
from jgraph.server.master import Master
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, check_recovered, trainer
from tests.support.servers import Servers

pytestmark = pytest.mark.usefixtures("nothing_is_left")

MASTER, PS = "/job:worker/task:0", "/job:ps/task:0"
_TORN = 2 * 3 * 2
"""Two steps of each of three workers may be on one ps alone, at each loss."""


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=3)
    yield servers
    servers.stop()


class LosingMasters:
    """A callback that loses the master, and then the next one, and stops the run."""

    def __init__(self, servers: Servers, cluster: Cluster) -> None:
        self.servers, self.cluster = servers, cluster
        self.lost: list[str] = []
        self.lost_at = 0
        self._threads: list[threading.Thread] = []

    def __call__(self, run: Run, report: Report) -> None:
        wanted = [MASTER, PS]
        if len(self.lost) < 2 and self.cluster.master == wanted[len(self.lost)]:
            if report.step >= self.lost_at + 100:
                self.lose(self.cluster.master)
                self.lost_at = report.step
        elif run.recoveries() and report.step >= self.lost_at + 300:
            run.stop()

    def lose(self, task: str) -> None:
        self.lost.append(task)
        self._threads.append(threading.Thread(target=self._lose, args=(task,)))
        self._threads[-1].start()

    def _lose(self, task: str) -> None:
        self.servers.lose(task)
        if task == PS:  # the first one stays away: its standby is the second
            self.servers.start_again(task)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)


@pytest.mark.row(35)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(AsyncPS(durability="replica"), marks=pytest.mark.nightly),
        pytest.param(SyncPS(durability="replica"), marks=pytest.mark.nightly),
    ],
    ids=["async", "sync"],
)
def test_a_run_outlives_two_masters_that_are_lost_one_after_the_other(
    servers: Servers, strategy: Strategy
) -> None:
    """The second is a ps: whoever takes over goes on from its copy."""
    with connect(servers.server(MASTER).target, timeout_s=20) as cluster:
        there, losing = trainer(cluster, strategy), LosingMasters(servers, cluster)
        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[losing],
            progress=False,
        )
        losing.join()
        assert run.state == "stopped"
        assert losing.lost == [MASTER, PS]
        (info,) = cluster.runs()
        assert info.term >= 3
        assert info.master not in (MASTER, PS)
        (recovery,) = run.recoveries()
        assert recovery.lost == (PS,)
        share = 3 if isinstance(strategy, SyncPS) else 1
        check_recovered(there, run, None, share, _TORN if share == 1 else 0)
        there.close()


@pytest.mark.row(22)
def test_a_run_one_of_whose_loops_did_not_get_the_order_to_halt_goes_on_and_is_saved(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, lost = Master.call, list[str]()

    async def lose_first(
        self: Master, task: Any, method: str, request: Frame, **how: Any
    ) -> Frame:
        if method == "StopLoop" and body_of(request).halt and len(lost) < 3:
            lost.append(body_of(request).loop)
            if len(lost) == 2:  # the other loops have it
                raise TaskLostError(f"{task} did not get it", task=task)
        return await call(self, task, method, request, **how)

    monkeypatch.setattr(Master, "call", lose_first)
    with connect(servers.server(MASTER).target, timeout_s=20) as cluster:
        there = trainer(cluster, AsyncPS())
        run = there.fit(
            IDS,
            steps=300,
            batch_size=BATCH,
            checkpoint=Checkpoints(tmp_path, every=50, keep=100),
            progress=False,
        )
        assert (run.state, run.steps, len(lost)) == ("done", 300, 3)
        assert len([*tmp_path.glob("[0-9]*")]) > 2
        assert run.repeated() == 0
        there.close()
