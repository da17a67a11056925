"""Rows 8 and 17 of docs/reliability.md where the frozen process is out of reach.

Nobody can kill it: its task is started again elsewhere and gets its address, as a pod
does, and some time later it wakes.
"""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.cluster.spec import ClusterSpec
from jgraph.coordination.liveness.restarts import REPLACED
from jgraph.coordination.liveness.self_fencing import DOUBT_S
from jgraph.errors import FencedError, JGError
from jgraph.launch.local.processes import TaskProcess
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.security.token import NAME, TOKEN_FILE, Token
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.run import Run
from jgraph.train.state.durability import Durability
from jgraph.train.strategies.async_runner import AsyncPS
from tests.support.counting import (
    BATCH,
    IDS,
    Ledger,
    after,
    check_recovered,
    counted,
    gone_back_to,
    trainer,
)
from tests.support.fault import Fault, Stopwatch
from tests.support.links import Link
from tests.support.stopping import once_both_took_part

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

EMPTY = frame(empty=pb.Empty())


@final
class Hosts:
    """Two ps and two workers, each a process; the address of one may move.

    Args:
      logs: where they write.
      job: of which the second task is that one.
    """

    def __init__(self, logs: Path, job: str) -> None:
        self._logs = logs
        self._started: list[TaskProcess] = []
        tasks = [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]
        by_task = {which: self._start(*which, logs) for which in tasks}
        for process in self._started:
            process.wait_started()
        self._job, self.frozen = job, by_task[job, 1]
        self.link = Link(self.frozen.address)
        addresses = {which: one.address for which, one in by_task.items()}
        addresses[job, 1] = self.link.address
        self.spec = ClusterSpec(
            {job: [addresses[job, n] for n in (0, 1)] for job in ("ps", "worker")}
        )
        for process in self._started:
            process.join(self.spec)
        self.target = f"jgraph://{addresses['worker', 0]}"

    def _start(self, job: str, index: int, logs: Path) -> TaskProcess:
        process = TaskProcess(job, index, logs, {"JAX_PLATFORMS": "cpu"}, "grpc")
        self._started.append(process)
        return process

    def freeze(self) -> None:
        """Stops that process."""
        os.kill(self.frozen.process.pid, signal.SIGSTOP)

    def replace(self) -> None:
        """Starts its task again elsewhere, under its address."""
        elsewhere = self._logs / "elsewhere"
        elsewhere.mkdir()
        new = self._start(self._job, 1, elsewhere)
        new.wait_started()
        self.link.lead_to(new.address)
        self.link.cut()
        new.join(self.spec)

    def wake(self) -> int:
        """Lets the frozen process go on; returns how it ended, within 5 s."""
        os.kill(self.frozen.process.pid, signal.SIGCONT)
        return self.frozen.process.wait(5)

    def close(self) -> None:
        for process in self._started:
            process.process.send_signal(signal.SIGCONT)
            process.end()
        for process in self._started:
            process.wait_ended(10)
        self.link.close()


@contextmanager
def hosts(
    fault: Fault, secrets: Path, job: str = "ps"
) -> Iterator[tuple[Hosts, Cluster]]:
    """Starts processes, and connects to them."""
    fault.logs.mkdir()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(TOKEN_FILE, str(Token.make(secrets / NAME).path))
        there = Hosts(fault.logs, job)
        stack.callback(there.close)
        yield there, stack.enter_context(connect(there.target, timeout_s=30))


def asked(cluster: Cluster, address: str) -> str:
    """Returns which task a process says it is."""
    reply = cluster.call("TaskStatus", EMPTY, timeout_s=60, to=address)
    status: pb.TaskStatus = body_of(reply)
    return status.task


def files_in(directory: Path) -> dict[str, tuple[int, int]]:
    """Returns when each file was written last, and its size."""
    found = {path: path.stat() for path in directory.rglob("*")}
    return {str(path): (s.st_mtime_ns, s.st_size) for path, s in found.items()}


@pytest.mark.row(17)
@pytest.mark.parametrize(
    "durability",
    [
        pytest.param("replica", marks=pytest.mark.nightly),
        *(pytest.param(d, marks=pytest.mark.chaos) for d in ("log", "checkpoint")),
    ],
)
def test_a_frozen_ps_that_was_replaced_says_so_and_ends_when_it_wakes(
    fault: Fault,
    tmp_path: Path,
    durability: Durability,
) -> None:
    with (
        hosts(fault, tmp_path) as (there, cluster),
        ThreadPoolExecutor(1) as elsewhere,
    ):
        ledger, clocks, moved = Ledger(), list[Stopwatch](), list[Future[None]]()
        training = trainer(cluster, AsyncPS(durability=durability))
        ask = partial(asked, cluster, there.frozen.address)
        assert ask() == there.frozen.task  # a connection of before

        def freeze() -> None:
            there.freeze()
            clocks.append(Stopwatch())
            moved.append(elsewhere.submit(there.replace))

        run = training.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            checkpoint=Checkpoints(fault.path, every=50, keep=1000),
            callbacks=[
                after(200, freeze, saved_in=fault.path),
                fault.stop_after("the run goes on from"),
            ],
            progress=False,
        )
        moved[0].result(0)
        assert run.state == "stopped"
        (recovery,) = run.recoveries()
        assert recovery.lost == (there.frozen.task,)
        before = files_in(fault.records), files_in(fault.path)
        if durability == "checkpoint":
            check_recovered(training, run, gone_back_to(fault.path, run))
        else:
            ledger.add(run)
            ledger.check(training, lost=2)
        threading.Event().wait(max(0.0, DOUBT_S + 1 - clocks[0].seconds))
        late = elsewhere.submit(ask)
        assert there.wake() == REPLACED
        with pytest.raises(FencedError, match="was started again"):
            late.result(5)
        assert (files_in(fault.records), files_in(fault.path)) == before
        fault.names += [
            f"{there.frozen.task} ends: JG-139",
            f"{there.frozen.task} was lost",
        ]
        training.close()


@pytest.mark.row(8)
@pytest.mark.chaos
def test_a_frozen_worker_that_was_replaced_says_so_and_ends_when_it_wakes(
    fault: Fault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process has its place and takes part in the run."""
    with (
        hosts(fault, tmp_path, "worker") as (there, cluster),
        ThreadPoolExecutor(1) as elsewhere,
    ):
        ledger, clocks, moved = Ledger(), list[Stopwatch](), list[Future[None]]()
        training, worker = trainer(cluster, AsyncPS()), there.frozen.task
        ask = partial(asked, cluster, there.frozen.address)
        assert ask() == worker  # a connection of before

        def freeze_and_stop_when_another_has_its_place(run: Run, report: Any) -> None:
            if report.step >= 200 and not clocks:
                there.freeze()
                clocks.append(Stopwatch())
                moved.append(elsewhere.submit(there.replace))
            if any(f"{worker} answers again" in text for text in caplog.messages):
                run.stop()

        fit = partial(training.fit, IDS, batch_size=BATCH, progress=False)
        stop = freeze_and_stop_when_another_has_its_place
        run = fit(steps=10**6, callbacks=[stop])
        moved[0].result(0)
        assert (run.state, run.recoveries()) == ("stopped", [])
        ledger.add(run)
        ledger.check(training, lost=1)
        before = counted(training)
        threading.Event().wait(max(0.0, DOUBT_S + 1 - clocks[0].seconds))
        late = elsewhere.submit(ask)
        assert there.wake() == REPLACED
        with pytest.raises(FencedError, match="was started again"):
            late.result(5)
        assert [c.tolist() for c in counted(training)] == [c.tolist() for c in before]
        stop = once_both_took_part(steps=run.steps + 100)
        run = fit(steps=10**6, callbacks=[stop])
        assert set(run.metrics("loss")["replica"]) == {0, 1}
        ledger.add(run)
        ledger.check(training, lost=1)
        fault.names += [f"{worker} ends: JG-139", f"{worker} was lost"]
        training.close()


@pytest.mark.row(8, 17)
@pytest.mark.chaos
@pytest.mark.parametrize("task", ["/job:ps/task:1", "/job:worker/task:0"])
def test_a_client_that_looks_while_a_task_is_frozen_is_answered_and_told_which(
    fault: Fault, task: str
) -> None:
    """Worker 0 is the master: nobody but it is asked."""
    cluster = fault.cluster(ps=2, workers=2, elastic=True)
    fault.is_noticed = False
    os.kill(cluster.pid(task), signal.SIGSTOP)
    stopwatch, told = Stopwatch(), list[str]()
    try:
        cluster.refresh()
        told += cluster.status().missing
    except JGError as error:
        told.append(str(error.details["task"]))
    finally:
        took_s = stopwatch.seconds
        os.kill(cluster.pid(task), signal.SIGCONT)
    assert told == [task]
    assert took_s < 20.0  # two looks of five seconds, or one of fifteen
    assert len(cluster.tasks()) == 4
