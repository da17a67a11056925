"""Row 17 of docs/reliability.md where the frozen process is out of reach.

Nobody can kill it: its task is started again elsewhere and gets its address, as a pod
does, and some time later it wakes.
"""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

import pytest

from jgraph.cluster.client import Cluster, connect
from jgraph.cluster.processes import TaskProcess
from jgraph.cluster.records import RECORDS_DIR
from jgraph.cluster.spec import ClusterSpec
from jgraph.coordination.restarts import REPLACED
from jgraph.coordination.tenure import DOUBT_S
from jgraph.errors import FencedError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.token import NAME, TOKEN_FILE, Token
from jgraph.train.async_ps import AsyncPS
from jgraph.train.checkpoints import Checkpoints
from jgraph.train.kept_copies import Durability
from tests.faults.conftest import Fault, Stopwatch
from tests.faults.counting import (
    BATCH,
    IDS,
    Ledger,
    after,
    check_recovered,
    trainer,
)
from tests.faults.links import Link

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

EMPTY = frame(empty=pb.Empty())


@final
class Hosts:
    """Two ps and two workers, each a process; the address of one ps may move."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: list[TaskProcess] = []
        self.frozen = self._start("ps", 1, logs)
        others = [
            self._start(*which, logs)
            for which in [("ps", 0), ("worker", 0), ("worker", 1)]
        ]
        for process in self._started:
            process.wait_started()
        self.link = Link(self.frozen.address)
        self.spec = ClusterSpec(
            {
                "ps": [others[0].address, self.link.address],
                "worker": [process.address for process in others[1:]],
            }
        )
        for process in self._started:
            process.join(self.spec)
        self.target = f"jgraph://{others[1].address}"

    def _start(self, job: str, index: int, logs: Path) -> TaskProcess:
        process = TaskProcess(job, index, logs, {"JAX_PLATFORMS": "cpu"}, "grpc")
        self._started.append(process)
        return process

    def freeze(self) -> None:
        """Stops the ps."""
        os.kill(self.frozen.process.pid, signal.SIGSTOP)

    def replace(self) -> None:
        """Starts its task again elsewhere, under its address."""
        elsewhere = self._logs / "elsewhere"
        elsewhere.mkdir()
        new = self._start("ps", 1, elsewhere)
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
def hosts(fault: Fault, secrets: Path) -> Iterator[tuple[Hosts, Cluster]]:
    """Starts processes, and connects to them."""
    fault.logs.mkdir()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(TOKEN_FILE, str(Token.make(secrets / NAME).path))
        there = Hosts(fault.logs)
        stack.callback(there.close)
        yield there, stack.enter_context(connect(there.target, timeout_s=30))


def files_in(directory: Path) -> dict[str, tuple[int, int]]:
    """Returns when each file was written last, and its size."""
    found = {path: path.stat() for path in directory.rglob("*")}
    return {str(path): (s.st_mtime_ns, s.st_size) for path, s in found.items()}


@pytest.mark.parametrize(
    "durability",
    [
        "replica",
        *(pytest.param(d, marks=pytest.mark.chaos) for d in ("log", "checkpoint")),
    ],
)
def test_row_17_a_frozen_ps_that_was_replaced_says_so_and_ends_when_it_wakes(
    fault: Fault,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    durability: Durability,
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setenv(RECORDS_DIR, str(kept))
    with (
        hosts(fault, tmp_path) as (there, cluster),
        ThreadPoolExecutor(1) as elsewhere,
    ):
        ledger, clocks, moved = Ledger(), list[Stopwatch](), list[Future[None]]()
        training = trainer(cluster, AsyncPS(durability=durability))
        old = there.frozen.address

        def ask() -> pb.TaskStatus:
            reply = cluster.call("TaskStatus", EMPTY, timeout_s=60, to=old)
            status: pb.TaskStatus = body_of(reply)
            return status

        assert ask().task == there.frozen.task  # a connection of before

        def freeze() -> None:
            there.freeze()
            clocks.append(Stopwatch())
            moved.append(elsewhere.submit(there.replace))

        run = training.fit(
            IDS,
            steps=800,
            batch_size=BATCH,
            checkpoint=Checkpoints(fault.path, every=50),
            callbacks=[after(200, freeze, saved_in=fault.path)],
            progress=False,
        )
        moved[0].result(0)
        assert (run.state, run.steps) == ("done", 800)
        (recovery,) = run.recoveries()
        assert recovery.lost == (there.frozen.task,)
        before = files_in(kept), files_in(fault.path)
        if durability == "checkpoint":
            check_recovered(training, run)
        else:
            ledger.add(run)
            ledger.check(training, lost=2)
        threading.Event().wait(max(0.0, DOUBT_S + 1 - clocks[0].seconds))
        asked = elsewhere.submit(ask)
        assert there.wake() == REPLACED
        with pytest.raises(FencedError, match="was started again while this process"):
            asked.result(5)
        assert (files_in(kept), files_in(fault.path)) == before
        fault.names += ["does nothing more, and ends", f"{there.frozen.task} was lost"]
        training.close()
