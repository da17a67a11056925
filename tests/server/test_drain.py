"""Tasks that are told to end while a run uses them, in this process."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.clock import SystemClock
from jgraph.cluster.drain import DrainHolders
from jgraph.errors import TaskLeavingError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.counting import BATCH, IDS, after, counted, trainer
from tests.support.ledger import examples_counted, examples_due
from tests.support.servers import Servers
from tests.support.stopping import once

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS, WORKER, MASTER = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"
EMPTY = frame(empty=pb.Empty())


class Ending:
    """Tells servers to end, in other threads."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.threads: list[threading.Thread] = []

    def __call__(self, task: str, *, restart: bool = False) -> None:
        def end() -> None:
            self.servers.server(task).stop(30.0)
            if restart:
                self.servers.start_again(task)

        self.threads.append(threading.Thread(target=end))
        self.threads[-1].start()

    def is_over(self, run: Run) -> bool:
        """Whether one was told to end, and did, while the run goes on."""
        return bool(self.threads) and not any(t.is_alive() for t in self.threads)

    def join(self) -> None:
        """Waits until they have ended, long before their grace is over."""
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def ending() -> Iterator[Ending]:
    servers = Servers(ps=2, worker=2)
    yield Ending(servers)
    servers.stop()


@pytest.fixture
def client(ending: Ending) -> Iterator[Cluster]:
    target = ending.servers.server(MASTER).target
    with connect(target, timeout_s=20) as cluster:
        yield cluster


def check_exact(there: Trainer, run: Run) -> None:
    """Each batch that counts as done is applied once, as was told."""
    told = run.metrics("seen")["value"].sum(0)
    is_sync = "contributions" in run.metric_names
    applied = examples_counted(run) if is_sync else told
    np.testing.assert_array_equal(applied, examples_due(there.current_position()))
    for count in counted(there):
        np.testing.assert_allclose(count, told, rtol=1e-6)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what a client was warned of; the servers are in this process, too."""
    of_client = [r for r in caplog.records if r.name != "jgraph.events"]
    return [r.getMessage() for r in of_client if r.levelno > logging.INFO]


async def hang_up(held: AsyncIterator[Frame]) -> None:
    assert isinstance(held, AsyncGenerator)
    await held.aclose()


def test_task_waits_for_those_who_hold_it_but_not_for_ever() -> None:
    async def main() -> None:
        holders, clock = DrainHolders(), SystemClock()
        first, second = holders.hold(EMPTY), holders.hold(EMPTY)
        assert [await anext(held) for held in (first, second)] == [EMPTY, EMPTY]
        told = [asyncio.ensure_future(anext(held)) for held in (first, second)]
        await asyncio.sleep(0)
        began = clock.now()
        await holders.announce(0.05)
        assert clock.now() - began >= 0.05
        assert await asyncio.gather(*told) == [EMPTY, EMPTY]
        last = asyncio.ensure_future(holders.announce(60.0))
        await hang_up(first)
        assert not last.done()
        await hang_up(second)
        await asyncio.wait_for(last, 1)

    asyncio.run(main())


def test_task_that_nobody_holds_does_not_wait() -> None:
    async def main() -> None:
        await asyncio.wait_for(DrainHolders().announce(60.0), 1)

    asyncio.run(main())


@pytest.mark.combined
@pytest.mark.row(29)
@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("task", "detached"), [(WORKER, False), (MASTER, False), (MASTER, True)]
)
def test_a_worker_or_master_that_is_told_to_end_hands_over_all_it_has(
    ending: Ending,
    client: Cluster,
    strategy: Strategy,
    task: str,
    detached: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = trainer(client, strategy)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[after(50, lambda: ending(task)), once(ending.is_over)],
        progress=False,
        detached=detached,
    )
    assert run.state == "stopped"
    ending.join()
    assert run.recoveries() == []
    assert run.repeated() == 0
    check_exact(there, run)
    assert not warnings_in(caplog)
    assert client.master != MASTER or task != MASTER


@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_master_that_is_told_to_end_with_the_last_step_waits_until_the_run_is_read(
    ending: Ending, client: Cluster, strategy: Strategy
) -> None:
    def end() -> None:
        ending(MASTER)
        while all(task.state == "ready" for task in client.status().tasks):
            pass  # each look is a call

    there = trainer(client, strategy)
    run = there.fit(
        IDS, steps=50, batch_size=BATCH, callbacks=[after(50, end)], progress=False
    )
    assert (run.state, run.steps) == ("done", 50)
    ending.join()
    assert client.master != MASTER
    check_exact(there, run)


@pytest.mark.combined
@pytest.mark.row(29)
@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
@pytest.mark.parametrize("detached", [False, True], ids=["", "detached"])
def test_a_ps_that_is_told_to_end_costs_a_pause_and_no_step(
    ending: Ending,
    client: Cluster,
    strategy: Strategy,
    detached: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = trainer(client, strategy)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=Checkpoints(tmp_path, every=10**6),
        callbacks=[
            after(50, lambda: ending(PS, restart=True)),
            once(lambda run: run.recoveries()),
        ],
        progress=False,
        detached=detached,
    )
    assert run.state == "stopped"
    ending.join()
    (recovery,) = run.recoveries()
    assert (recovery.lost, recovery.again) == ((PS,), 0)
    first = [0] if detached else []  # its master makes all others like that one
    assert steps_in(tmp_path) == [*first, recovery.back_to, run.steps]
    assert run.repeated() == 0
    check_exact(there, run)
    assert warnings_in(caplog) == []  # it was asked for


def test_ps_that_is_told_to_end_ends_a_run_that_has_nothing_to_go_on_from(
    ending: Ending, client: Cluster
) -> None:
    there = trainer(client, AsyncPS())
    with pytest.raises(TaskLeavingError, match=f"{PS} was told to end, and .* fit"):
        there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[after(50, lambda: ending(PS))],
            progress=False,
        )
    ending.join()
