"""A detached run that loses a ps: its master goes back to a checkpoint."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jgraph.client.cluster import connect
from jgraph.cluster.options import RECORDS_DIR
from jgraph.errors import ClusterError
from jgraph.failpoints import armed, fail
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.runtime.files.step_files import our_steps
from jgraph.server.runs import rollback
from jgraph.train.checkpoint.checkpoints import Checkpoints, put_aside_in
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, check_recovered, trainer
from tests.support.detached_client import until, until_further
from tests.support.saved_steps import damage
from tests.support.servers import Servers

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS, MASTER = ("/job:ps/task:0", "/job:ps/task:1"), "/job:worker/task:0"
STRATEGIES: list[Any] = [
    AsyncPS(),
    AsyncPS(gradient_dtype="int8", max_staleness=8),
    SyncPS(),
]


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=2)
    yield servers
    servers.stop()


class Losing:
    """A callback that loses a ps once there are so many checkpoints."""

    def __init__(self, servers: Servers, task: str, directory: Path) -> None:
        self.servers, self.task, self.directory = servers, task, directory
        self.saved: list[int] = []
        self.comes_back = True
        self.damages = False
        self.before: Callable[[], None] = lambda: None
        self._threads: list[threading.Thread] = []

    def __call__(self, run: Run, report: Report) -> None:
        if len(our_steps(self.directory)) >= 4 and not self.saved:
            self.saved = our_steps(self.directory)
            self._threads = [threading.Thread(target=self._lose)]
            self._threads[0].start()
        elif run.recoveries() and report.step > self.saved[-1] + 60:
            run.stop()

    def _lose(self) -> None:
        self.before()
        if self.damages:
            damage(self.directory / str(self.saved[-1]))
        self.servers.lose(self.task)
        if self.comes_back:
            self.servers.start_again(self.task)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)


def fit(there: Any, losing: Losing, **options: Any) -> Run:
    try:
        run: Run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            checkpoint=Checkpoints(losing.directory, every=20, keep=1000),
            callbacks=[losing],
            progress=False,
            **{"detached": True, **options},
        )
        return run
    finally:
        losing.join()


@pytest.mark.combined
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(one, marks=pytest.mark.nightly if one.gradient_dtype else ())
        for one in STRATEGIES
    ],
    ids=["async", "int8", "sync"],
)
@pytest.mark.parametrize("task", PS)
@pytest.mark.row(12)
def test_client_of_a_detached_run_sees_it_go_back_and_go_on(
    servers: Servers, strategy: Strategy, task: str, tmp_path: Path
) -> None:
    losing = Losing(servers, task, tmp_path / "c")
    with connect(servers.server(MASTER).target, timeout_s=20) as cluster:
        there = trainer(cluster, strategy)
        run = fit(there, losing)
        assert run.state == "stopped"
        (recovery,) = run.recoveries()
        assert recovery.lost == (task,)
        assert recovery.back_to >= losing.saved[-1]
        steps = run.metrics("loss")["step"]
        assert sorted(steps) == [*range(1, len(steps) + 1)]
        share = 2 if isinstance(strategy, SyncPS) else 1
        check_recovered(there, run, losing.directory / str(recovery.back_to), share)
        (info,) = [one for one in cluster.runs() if one.state == "stopped"]
        assert info.step <= run.steps
        there.close()


@pytest.mark.parametrize(
    ("strategy", "leaves", "attaches"),
    [
        (AsyncPS(), "before", "while it is away"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in [
                (SyncPS(), "while it is away", "afterwards"),
                (SyncPS(), "before", "while it is away"),
                (AsyncPS(), "while it is away", "afterwards"),
            ]
        ),
    ],
)
@pytest.mark.row(30, 36, 37)
def test_client_that_was_gone_finds_a_run_that_lost_a_ps_and_all_that_it_told(
    servers: Servers,
    strategy: Strategy,
    leaves: str,
    attaches: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another one, in the middle of the restore or after it; the first was closed."""
    caplog.set_level("INFO", logger="jgraph.run")
    target = servers.server("/job:worker/task:1").target
    with (
        connect(target, timeout_s=20) as cluster,
        ThreadPoolExecutor(1) as elsewhere,
    ):
        with connect(servers.server(MASTER).target, timeout_s=20) as first:
            trainer(first, strategy).fit(
                IDS,
                steps=10**6,
                batch_size=BATCH,
                checkpoint=Checkpoints(tmp_path, every=20, keep=1000),
                progress=False,
                detached=True,
                block=False,
            )
            until(cluster, lambda run: len(our_steps(tmp_path)) >= 3)
            if leaves == "while it is away":
                servers.lose(PS[0])
        if leaves == "before":
            servers.lose(PS[0])
        there = trainer(cluster, strategy)
        if attaches == "while it is away":
            attached = elsewhere.submit(there.attach)
            until(cluster, lambda run: "is waited for" in caplog.text)
            servers.start_again(PS[0])
            run = attached.result(30)
        else:
            servers.start_again(PS[0])
            until_further(cluster)
            run = there.attach()
        until_further(cluster)
        run.stop()
        run.wait(30)
        # Its arbiter ends within this process, and may say first that ps:1 is lost.
        recovery = run.recoveries()[-1]
        assert recovery.lost == (PS[0],)
        steps = run.metrics("loss")["step"]
        assert sorted(steps) == [*range(1, len(steps) + 1)]
        share = 2 if isinstance(strategy, SyncPS) else 1
        check_recovered(there, run, tmp_path / str(recovery.back_to), share)
        there.close()


@pytest.mark.row(20)
@pytest.mark.nightly  # half a minute
def test_master_that_was_replaced_takes_no_run_back(
    servers: Servers, tmp_path: Path
) -> None:
    losing = Losing(servers, PS[1], tmp_path / "c")
    target = servers.server("/job:worker/task:1").target
    with (
        connect(servers.server(MASTER).target, timeout_s=20) as cluster,
        connect(target, timeout_s=20) as other,
    ):

        def replace_master() -> None:
            """A worker has heard of the next one."""
            (info,) = [run for run in other.runs() if run.state == "running"]
            order = pb.StopLoop(task=MASTER, run=info.name, term=2)
            other.call("Master.StopLoop", frame(stop_loop=order))

        losing.before = replace_master
        there = trainer(cluster, AsyncPS())
        run = fit(there, losing)
        # The next master is lost, it seems: a standby is the one after it.
        (recovery,) = run.recoveries()
        assert recovery.lost == (PS[1],)
        (info,) = other.runs()
        assert info.term > 2
        assert info.master != MASTER
        there.close()


@pytest.mark.row(27)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(
    servers: Servers, tmp_path: Path
) -> None:
    losing = Losing(servers, PS[1], tmp_path / "c")
    losing.damages = True

    def fail_the_fifth() -> None:
        """Nothing is saved between the damage and the loss."""
        if len(our_steps(losing.directory)) >= 4:
            fail()

    server = servers.server(MASTER)
    with (
        armed("handed.on_disk", fail_the_fifth),
        connect(server.target, timeout_s=20) as cluster,
    ):
        there = trainer(cluster, AsyncPS())
        run = fit(there, losing)
        (recovery,) = run.recoveries()
        assert recovery.back_to < losing.saved[-1]
        assert put_aside_in(losing.directory)
        check_recovered(there, run, losing.directory / str(recovery.back_to))
        there.close()


KEPT = [
    pytest.param(AsyncPS(durability="replica"), id="replica"),
    pytest.param(
        SyncPS(durability="replica"), id="sync-replica", marks=pytest.mark.nightly
    ),
    pytest.param(AsyncPS(durability="log"), id="log", marks=pytest.mark.nightly),
    pytest.param(SyncPS(durability="log"), id="sync-log"),
    pytest.param(
        AsyncPS(durability="replica", gradient_dtype="int8"),
        id="int8",
        marks=pytest.mark.nightly,
    ),
]


# Two steps of each of two workers may be on one ps and not on the other, at each loss.
_TORN = 2 * 2 * 2


@pytest.mark.combined
@pytest.mark.row(13, 14)
@pytest.mark.parametrize("is_planned", [False, True], ids=["", "told"])
@pytest.mark.parametrize("strategy", KEPT)
@pytest.mark.parametrize("task", PS)
def test_detached_run_goes_on_from_the_copy_or_the_log_of_a_ps_and_loses_no_update(
    strategy: Strategy,
    task: str,
    is_planned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RECORDS_DIR, str(tmp_path))
    servers, lost = Servers(ps=2, worker=2), list[threading.Thread]()

    def lose() -> None:
        if is_planned:
            servers.server(task).stop(grace_s=30.0)
        else:
            servers.lose(task)
        servers.start_again(task)

    def lose_twice(run: Run, report: Report) -> None:
        recovered = len(run.recoveries())
        if recovered == len(lost) and report.step > 80 * (recovered + 1):
            if recovered == 2:
                run.stop()
                return
            lost.append(threading.Thread(target=lose))
            lost[-1].start()

    try:
        with connect(servers.server(MASTER).target, timeout_s=20) as cluster:
            there = trainer(cluster, strategy)
            run = there.fit(
                IDS,
                steps=10**6,
                batch_size=BATCH,
                callbacks=[lose_twice],
                progress=False,
                detached=True,
            )
            for thread in lost:
                thread.join(30)
            assert run.state == "stopped"
            assert [one.lost for one in run.recoveries()] == [(task,)] * 2
            share = 2 if isinstance(strategy, SyncPS) else 1
            torn = _TORN if share == 1 and not is_planned else 0
            check_recovered(there, run, None, share, torn)
            there.close()
    finally:
        servers.stop()


@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_run_whose_ps_stays_away_ends_and_says_what_to_do(
    servers: Servers, strategy: Strategy, tmp_path: Path
) -> None:
    losing = Losing(servers, PS[1], tmp_path / "c")
    losing.comes_back = False
    with connect(servers.server(MASTER).target, timeout_s=20) as cluster:
        there = trainer(cluster, strategy)
        said = f"{PS[1]} did not come back in 1 s; the newest .* trainer.restore"
        with pytest.raises(ClusterError, match=said):
            fit(there, losing, wait_s=1)


def test_run_that_is_stopped_waits_little_for_a_ps_and_says_where_to_go_on(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollback, "STOPPED_WAIT_S", 1.0)
    losing = Losing(servers, PS[1], tmp_path / "c")
    losing.comes_back = False
    with connect(servers.server(MASTER).target, timeout_s=20) as cluster:
        there = trainer(cluster, AsyncPS())

        def stop() -> None:
            """Asked while the run waits for the ps."""
            assert there.run is not None
            there.run.stop()

        monkeypatch.setattr(cluster, "check_startable", stop)
        said = (
            f"{PS[1]} did not come back in 1 s after the run was told to stop; the "
            r"newest checkpoint is step \d+; go on from there with trainer.restore"
        )
        with pytest.raises(ClusterError, match=said):
            fit(there, losing, detached=False, wait_s=600)
        assert there.run is not None
        assert there.run.state == "failed"
        there.close()
