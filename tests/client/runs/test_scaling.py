"""What cannot be asked of the number of workers is refused, and nothing changes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph import Variable, function
from jgraph.client.cluster import Cluster, connect, connect_as_is
from jgraph.client.connection import Connection
from jgraph.client.runs.scaling import wanted_tasks
from jgraph.cluster.options import RECORDS_DIR
from jgraph.errors import (
    ConfigError,
    DeadlineError,
    JGError,
    RescaleError,
    TaskMissingError,
)
from jgraph.graph.device import TaskName
from jgraph.server import server
from jgraph.server.members.joining import join_cluster
from jgraph.server.server import Server
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, after, trainer
from tests.support.servers import *  # noqa: F403  # fixtures
from tests.support.servers import Servers
from tests.support.waiting import wait_until

ASYNC, SYNC = AsyncPS(elastic=Elastic()), SyncPS(elastic=Elastic())

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.bad_input_row(27)
@pytest.mark.parametrize("workers", [0, -1, "-2", "x", "+x", "2", 1.5, True, None, ""])
def test_a_count_of_workers_is_a_whole_number_above_0_or_a_change(workers: Any) -> None:
    with pytest.raises(ConfigError, match="scale\\(workers="):
        wanted_tasks("worker", workers, 2)


@pytest.mark.bad_input_row(27)
@pytest.mark.parametrize("count", [10_001, 10**20, "+10000"])
def test_more_tasks_than_any_cluster_has_are_refused(count: Any) -> None:
    with pytest.raises(RescaleError, match="more than 10,000 workers"):
        wanted_tasks("worker", count, 2)


@pytest.mark.bad_input_row(27)
def test_a_ps_whose_variables_no_run_moves_stays(cluster: Cluster) -> None:
    refused: list[JGError] = []

    def scale() -> None:
        for ps in (1, 3):
            try:
                cluster.scale(ps=ps)
            except RescaleError as error:
                refused.append(error)

    with pytest.raises(ConfigError, match="timeout_s"):
        cluster.scale(workers=2, timeout_s=-1)
    there = trainer(cluster, AsyncPS())
    run = there.fit(
        IDS, steps=200, batch_size=BATCH, callbacks=after(1, scale), progress=False
    )
    assert run.state == "done"
    assert "keeps its variables where they are" in refused[0].message
    assert "jgraph server --job ps --join" in refused[1].message
    with pytest.raises(RescaleError, match="that no run moves, 'params/"):
        cluster.scale(ps=1)
    assert cluster.tasks("ps") == ["/job:ps/task:0", "/job:ps/task:1"]
    there.close()


@pytest.mark.bad_input_row(27)
def test_a_worker_that_holds_a_stage_of_a_pipeline_stays(cluster: Cluster) -> None:
    stage = Variable("stage", np.ones(3, np.float32), device="/job:worker/task:1")

    @function
    def read() -> Any:
        return stage[...]

    with cluster.session() as session:
        session.run(read)
        with pytest.raises(RescaleError, match="Stages of a pipeline do not move"):
            cluster.scale(workers=1)
        assert len(cluster.tasks("worker")) == 2


def test_a_worker_that_is_lost_is_the_first_that_leaves() -> None:
    servers = Servers(ps=2, worker=4)
    try:
        with connect(servers.servers[0].target, timeout_s=20) as cluster:
            for task in ("/job:worker/task:1", "/job:ps/task:1"):
                servers.lose(task)
            assert cluster.scale(workers="-1") == [
                f"/job:worker/task:{index}" for index in (0, 2, 3)
            ]
            servers.lose("/job:worker/task:3")
            with connect_as_is(cluster.target, timeout_s=20) as late:
                assert late.scale(workers=2) == [
                    f"/job:worker/task:{index}" for index in (0, 2)
                ]
            assert cluster.scale(ps=1) == ["/job:ps/task:0"]  # no run has used it
    finally:
        servers.stop()


def test_workers_that_ended_and_that_nobody_starts_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They stay tasks of the cluster, which somebody may start again."""
    servers = Servers(ps=1, worker=2)
    workers = [TaskName(f"/job:worker/task:{index}") for index in range(2)]

    def check() -> None:
        raise TaskMissingError("nothing starts them again", missing=workers)

    try:
        with connect(servers.server("/job:ps/task:0").target, timeout_s=20) as cluster:
            monkeypatch.setattr(cluster, "check_startable", check)
            assert cluster.scale(workers=2) == workers
            for task in workers:
                cluster.drain(task, grace_s=0.0)
                servers.lose(task)
            with pytest.raises(RescaleError, match=r"task:1 is one of the 2 workers"):
                cluster.scale(workers=2)
    finally:
        servers.stop()


def test_a_client_whose_master_is_lost_scales_through_another() -> None:
    servers = Servers(ps=1, worker=3)
    master = "/job:worker/task:2"
    try:
        with connect(servers.server(master).target, timeout_s=20) as cluster:
            servers.lose(master)
            assert cluster.scale(workers="-1") == [
                "/job:worker/task:0",
                "/job:worker/task:1",
            ]
            assert cluster.master == "/job:ps/task:0"
    finally:
        servers.stop()


@pytest.mark.row(63)
@pytest.mark.combined
@pytest.mark.parametrize(
    "strategy",
    [
        ASYNC,
        SYNC,
        SyncPS(elastic=Elastic(workers=(1, 4), batch="global")),
    ],
    ids=["async", "sync", "global"],
)
@pytest.mark.parametrize(
    ("before", "master"),
    [
        ("RegisterProgram", "/job:ps/task:0"),
        ("RegisterProgram", "/job:worker/task:1"),
        ("OpenRun", "/job:ps/task:0"),
        ("RunLoop", "/job:ps/task:0"),
        ("BeginRun", "/job:ps/task:0"),
    ],
)
def test_a_worker_may_leave_before_a_run_begins(
    strategy: Strategy, before: str, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is prepared, or once it is and the master is told of it.

    Also if it is the master itself.
    """
    servers = Servers(ps=1, worker=2)
    call = Connection.call
    left: list[TaskName] = []

    def call_late(there: Connection, method: str, *args: Any, **options: Any) -> Any:
        if method == f"Master.{before}" and not left:
            left.append(TaskName("/job:worker/task:1"))
            other.leave(left[0])
            if master not in left:  # a master stays until another has its runs
                wait_until(lambda: len(other.renewed_tasks("worker")) == 1, 20)
        return call(there, method, *args, **options)

    try:
        with (
            connect(servers.server(master).target, timeout_s=20) as client,
            connect(servers.servers[0].target, timeout_s=20) as other,
        ):
            assert client.master == master
            there = trainer(client, strategy)
            monkeypatch.setattr(Connection, "call", call_late)
            run = there.fit(IDS, steps=4, batch_size=BATCH, progress=False)
            assert (run.state, run.steps) == ("done", 4)
            assert left
            there.close()
    finally:
        servers.stop()


@pytest.mark.row(61, 63)
@pytest.mark.combined
@pytest.mark.parametrize("acts", ["leave lose", "lose leave", "lose"])
@pytest.mark.parametrize(
    ("before", "lost", "strategy"),
    [
        ("OpenGate", "/job:ps/task:1", ASYNC),
        ("OpenGate", "/job:ps/task:1", SYNC),
        ("RunLoop", "/job:ps/task:0", SYNC),
        ("BeginRun", "/job:worker/task:2", ASYNC),
        ("BeginRun", "/job:ps/task:1", ASYNC),
        ("BeginRun", "/job:ps/task:1", SYNC),
    ],
    ids=["ps-async", "ps-sync", "master", "worker", "begun-async", "begun-sync"],
)
def test_a_worker_may_leave_while_another_task_is_lost_before_a_run_begins(
    before: str,
    lost: str,
    strategy: Strategy,
    acts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or none leaves: the run is prepared anew for who is there, with first values."""
    servers = Servers(ps=2, worker=3)
    call = Connection.call
    done: list[str] = []

    def lose() -> None:
        servers.lose(lost)
        servers.start_again(lost)

    def leave() -> None:
        other.leave(TaskName("/job:worker/task:1"))
        wait_until(lambda: len(other.renewed_tasks("worker")) == 2, 20)

    def call_late(there: Connection, method: str, *args: Any, **options: Any) -> Any:
        is_now = method in {f"Master.{before}", before} and there is client
        if is_now and not done:
            for act in acts.split():
                done.append(act)
                {"leave": leave, "lose": lose}[act]()
        return call(there, method, *args, **options)

    try:
        with (
            connect(servers.server("/job:ps/task:0").target, timeout_s=20) as client,
            connect(servers.server("/job:worker/task:0").target, timeout_s=20) as other,
        ):
            monkeypatch.setattr(Cluster, "starts_again", True)
            there = trainer(client, strategy)
            monkeypatch.setattr(Connection, "call", call_late)
            run = there.fit(IDS, steps=4, batch_size=BATCH, progress=False)
            assert (run.state, run.steps) == ("done", 4)
            assert done == acts.split()
            there.close()
    finally:
        servers.stop()


@pytest.mark.row(63)
@pytest.mark.parametrize(
    "before",
    [
        "KeepProgram",
        pytest.param("OpenDataRun", marks=pytest.mark.nightly),
        pytest.param("RunLoop", marks=pytest.mark.nightly),
        "BeginRun",
    ],
)
def test_a_master_without_values_may_be_started_again_before_a_run_begins(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(ps=1, worker=3)
    call = Connection.call
    lost: list[str] = []

    def call_late(there: Connection, method: str, *args: Any, **options: Any) -> Any:
        if method == f"Master.{before}" and not lost:
            lost.append("/job:worker/task:2")
            servers.lose(lost[0])
            servers.start_again(lost[0])
        return call(there, method, *args, **options)

    try:
        with connect(
            servers.server("/job:worker/task:2").target, timeout_s=20
        ) as client:
            monkeypatch.setattr(Cluster, "starts_again", True)
            there = trainer(client, AsyncPS())
            monkeypatch.setattr(Connection, "call", call_late)
            run = there.fit(IDS, steps=4, batch_size=BATCH, progress=False)
            assert (run.state, run.steps) == ("done", 4)
            assert lost
            there.close()
    finally:
        servers.stop()


def test_a_client_lets_its_own_master_leave() -> None:
    servers = Servers(ps=1, worker=2)
    try:
        with connect(servers.servers[-1].target, timeout_s=20) as cluster:
            assert cluster.master == "/job:worker/task:1"
            assert cluster.scale(workers=1) == ["/job:worker/task:0"]
            assert cluster.master == "/job:ps/task:0"
    finally:
        servers.stop()


def test_scaling_waits_for_who_numbers_the_tasks_to_be_started_again() -> None:
    """The first ps is the master of this client, too."""
    servers = Servers(ps=1, worker=2)
    registrar = "/job:ps/task:0"
    try:
        with (
            connect(servers.server(registrar).target, timeout_s=20) as cluster,
            ThreadPoolExecutor(1) as pool,
        ):
            servers.lose(registrar)
            scaling = pool.submit(cluster.scale, workers=1)
            wait_until(lambda: cluster.master != registrar)
            servers.start_again(registrar)
            assert scaling.result(30) == ["/job:worker/task:0"]
    finally:
        servers.stop()


@pytest.mark.parametrize("job", ["worker", "ps"])
def test_a_change_counts_from_what_was_asked_for_before(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last task was told to leave by another client, and has not yet."""
    monkeypatch.setattr(server, "_LEAVE_S", 600.0)  # only who scales ends it
    tasks = [TaskName(f"/job:{job}/task:{index}") for index in range(4)]
    jobs: dict[str, Any] = {"ps": 1, "worker": 1, job: 4}
    servers = Servers(**jobs)
    try:
        with connect(servers.server("/job:ps/task:0").target, timeout_s=20) as cluster:
            cluster.announce(tasks[3])
            change: dict[str, Any] = {"ps" if job == "ps" else "workers": "-1"}
            assert cluster.scale(**change) == tasks[:2]
    finally:
        servers.stop()


def test_as_many_are_started_as_are_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LEAVE_S", 600.0)
    servers = Servers(ps=1, worker=2)
    leaver, joiner = (TaskName(f"/job:worker/task:{index}") for index in (1, 2))

    def start(job: str, count: int) -> None:
        joined = [join_cluster(servers.servers[0].target, job) for _ in range(count)]
        servers.servers.extend(joined)

    try:
        with connect(servers.server("/job:ps/task:0").target, timeout_s=20) as cluster:
            monkeypatch.setattr(cluster, "_start_tasks", start)
            cluster.announce(leaver)
            assert joiner in cluster.scale(workers=2)
            cluster.leave(leaver)
            wait_until(lambda: leaver not in cluster.renewed_tasks("worker"))
    finally:
        servers.stop()


def test_a_ps_is_started_once_those_that_leave_have_left() -> None:
    """A run has its variables on the first ones, so that no index may be left out."""
    servers = Servers(ps=2, worker=1)
    leaver = TaskName("/job:ps/task:1")
    try:
        with connect(servers.server("/job:ps/task:0").target, timeout_s=20) as cluster:
            cluster.announce(leaver)
            with pytest.raises(DeadlineError, match=f"for {leaver} to leave"):
                cluster.scale(ps=2, timeout_s=0.2)
            cluster.leave(leaver)
            with pytest.raises(RescaleError, match="--job ps --join"):
                cluster.scale(ps=2)
    finally:
        servers.stop()


def test_two_that_scale_at_once_count_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads start two workers; who has left meanwhile may be told to leave."""
    servers = Servers(ps=1, worker=2)

    def start(job: str, count: int) -> None:
        joined = [join_cluster(servers.servers[0].target, job) for _ in range(count)]
        servers.servers.extend(joined)

    try:
        with (
            connect(servers.servers[0].target, timeout_s=20) as cluster,
            connect(servers.servers[0].target, timeout_s=20) as other,
            ThreadPoolExecutor(2) as pool,
        ):
            monkeypatch.setattr(cluster, "_start_tasks", start)
            both = [pool.submit(cluster.scale, workers=4) for _ in range(2)]
            assert [len(one.result(30)) for one in both] == [4, 4]
            other.refresh()
            cluster.scale(workers=2)
            for task in other.tasks("worker")[2:]:
                other.leave(task)
            assert other.renewed_tasks("worker") == cluster.tasks("worker")
            assert len(cluster.tasks("worker")) == 2
    finally:
        servers.stop()


def test_a_lost_ps_that_a_run_needs_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORDS_DIR, str(tmp_path))
    servers, lost = Servers(ps=2, worker=1), "/job:ps/task:1"
    try:
        with connect(servers.servers[0].target, timeout_s=20) as cluster:
            elastic = AsyncPS(elastic=Elastic(ps=(1, 2)), durability="log")
            there = trainer(cluster, elastic)
            run = there.fit(
                IDS, steps=10**6, batch_size=BATCH, block=False, progress=False
            )
            wait_until(lambda: run.steps > 0)
            servers.lose(lost)
            with pytest.raises(RescaleError, match="has variables there; start it"):
                cluster.scale(ps=1)
            assert len(cluster.tasks("ps")) == 2
            servers.start_again(lost)
            run.stop()
            run.wait(60)
    finally:
        servers.stop()


@pytest.mark.bad_input_row(27)
def test_who_did_not_start_a_cluster_is_told_how_a_worker_is_started(
    cluster: Cluster,
) -> None:
    with pytest.raises(RescaleError, match="jgraph server --job worker --join") as told:
        cluster.scale(workers="+1")
    assert cluster.target in told.value.message
    assert cluster.scale(workers=2) == cluster.tasks("worker")  # as it is


@pytest.mark.bad_input_row(27)
def test_a_run_keeps_the_number_of_workers_within_its_bounds(cluster: Cluster) -> None:
    refused: list[JGError] = []

    def scale() -> None:
        for workers in (1, 5):
            try:
                cluster.scale(workers=workers)
            except RescaleError as error:
                refused.append(error)

    there = trainer(cluster, AsyncPS(elastic=Elastic(workers=(2, 4))))
    run = there.fit(
        IDS,
        steps=300,
        batch_size=BATCH,
        callbacks=after(1, scale),
        progress=False,
    )
    assert run.state == "done"
    assert ["2 to 4 workers" in error.message for error in refused] == [True, True]
    assert [member.task for member in run.members()] == cluster.tasks("worker")
    assert sum(member.batches for member in run.members()) == 300
    there.close()


def test_scaling_waits_for_the_run_that_fit_begins(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a guide has it: fit(block=False), then scale."""
    started, joined = threading.Event(), list[Server]()

    class Late:
        def begin(self, run: Run) -> None:
            started.wait(20)

        def end(self, run: Run) -> None:
            del run

    def start(self: Cluster, job: str, count: int) -> None:
        joined.extend(join_cluster(self.target, job) for _ in range(count))
        started.set()

    monkeypatch.setattr(Cluster, "_start_tasks", start)
    there = trainer(cluster, AsyncPS(elastic=Elastic()))
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=Late(),
        block=False,
        progress=False,
    )
    tasks = cluster.scale(workers=3)
    info = cluster.runs()[-1]  # before it are those of other tests, which are over
    assert sorted(info.workers) == tasks == cluster.tasks("worker")
    run.stop()
    run.wait(30)
    there.close()
    for one in joined:
        one.stop(0.0)


@pytest.mark.bad_input_row(27)
def test_a_run_does_not_begin_with_fewer_workers_than_its_least(
    cluster: Cluster,
) -> None:
    there = trainer(cluster, AsyncPS(elastic=Elastic(workers=(3, None))))
    with pytest.raises(ConfigError, match="has 2 workers, and the run may have 3 or"):
        there.fit(IDS, steps=1, batch_size=BATCH, progress=False)
    there.close()
