"""Every task is told to end and started again, while a run goes on."""

import logging
import threading
from typing import Any

import numpy as np
import pytest

from jgraph.launch.local.cluster import LocalCluster
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, counted, trainer
from tests.support.fault import Fault, Stopwatch
from tests.support.ledger import examples_counted, examples_due

pytestmark = [pytest.mark.procs, pytest.mark.chaos, pytest.mark.timeout(180)]

WORKERS = 2


def steps_of_all(run: Run, since: int) -> int:
    """Returns how many steps each worker did, or both together, since then."""
    if "contributions" in run.metric_names:
        made = run.metrics("contributions")["value"][since:]
        return int((made == WORKERS).sum())
    replicas = run.metrics("loss")["replica"][since:].astype(np.int64)
    return int(np.bincount(replicas, minlength=WORKERS).min())


class RollingRestart:
    """A callback that restarts all tasks in turn, and then stops the run.

    Attributes:
      codes: with which their processes ended.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self.codes: list[int] = []
        self.seconds: list[float] = []
        self._cluster = cluster
        self._left = list(cluster.tasks())
        self._restarting: threading.Thread | None = None
        self._since = 0

    def __call__(self, run: Run, report: Any) -> None:
        if self._restarting is not None:
            if self._restarting.is_alive():
                return
            self._restarting, self._since = None, run.steps
        if steps_of_all(run, self._since) < 20:
            return
        if not self._left:
            run.stop()
            return
        self._restarting = threading.Thread(target=self._restart)
        self._restarting.start()

    def _restart(self) -> None:
        clock = Stopwatch()
        self.codes.append(self._cluster.restart(self._left.pop(0)))
        self.seconds.append(clock.seconds)


@pytest.mark.row(29)
@pytest.mark.parametrize(
    ("strategy", "saves"),
    [
        (AsyncPS(), True),
        (SyncPS(), True),
        (AsyncPS(durability="replica"), False),
        (SyncPS(durability="log", gradient_dtype="int8"), False),
    ],
    ids=["async", "sync", "async-replica", "sync-log"],
)
def test_all_tasks_are_restarted_in_turn_and_no_step_is_lost_or_repeated(
    fault: Fault,
    strategy: Strategy,
    saves: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = fault.cluster(ps=2, workers=WORKERS)
    master = cluster.master
    there = trainer(cluster, strategy)
    restarts = RollingRestart(cluster)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=Checkpoints(fault.path, every=10**6) if saves else None,
        callbacks=[restarts],
        progress=False,
    )
    assert run.state == "stopped"
    assert restarts.codes == [0, 0, 0, 0]
    assert max(restarts.seconds) < 30
    assert run.repeated() == 0
    assert [r.lost for r in run.recoveries()] == [(t,) for t in cluster.tasks("ps")]
    assert [r.again for r in run.recoveries()] == [0, 0]
    steps = run.metrics("loss")["step"]
    np.testing.assert_array_equal(np.sort(steps), np.arange(1, run.steps + 1))
    position = there.current_position()
    assert position is not None
    is_sync = "contributions" in run.metric_names
    told = run.metrics("seen")["value"].sum(0)
    applied = examples_counted(run) if is_sync else told
    np.testing.assert_array_equal(applied, examples_due(position))
    for count in counted(there):
        np.testing.assert_allclose(count, told, rtol=1e-6)
    # Each is told of once when it is back, and nothing else is worth a warning.
    told_of = [r.getMessage() for r in caplog.records if r.name == "jgraph.recover"]
    for task in cluster.tasks():
        ends = "the run goes on from step", "takes part in the run"
        back = [t for t in told_of if t.startswith(task) and any(e in t for e in ends)]
        # The next master may find the worker that was the master back already.
        assert len(back) == 1 or (task == master and not back), told_of
    warned = [r for r in caplog.records if r.levelno > logging.INFO]
    assert WORKERS - 1 <= len(warned) <= WORKERS, warned
    fault.names += [f"{task} was told to end" for task in cluster.tasks()]
    there.close()
