"""Another server becomes the master of a run whose own is lost."""

from collections.abc import Iterator

import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.errors import FencedError, TaskLostError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, Ledger, after, counted, trainer
from tests.support.servers import Servers
from tests.support.stopping import once

pytestmark = pytest.mark.usefixtures("nothing_is_left")

MASTER, WORKER = "/job:worker/task:1", "/job:worker/task:0"


@pytest.fixture
def own_servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=2)
    yield servers
    servers.stop()


@pytest.fixture
def client(own_servers: Servers) -> Iterator[Cluster]:
    with connect(own_servers.server(MASTER).target, timeout_s=20) as cluster:
        yield cluster


def test_run_goes_on_with_a_ps_as_master_and_loses_nothing(
    own_servers: Servers, client: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    there, ledger = trainer(client, AsyncPS()), Ledger()
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(100, lambda: own_servers.lose(MASTER)),
            once(lambda run: client.master != MASTER),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    ledger.add(run)
    ledger.check(there, lost=1)
    assert client.master == "/job:ps/task:0"
    assert client.address == client.spec.address(client.master)
    told = [r.getMessage() for r in caplog.records if r.name == "jgraph.loops"]
    assert f"{MASTER}, the master, was lost" in told[0]
    assert told[0].endswith("/job:ps/task:0 is the master from here on")


@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_run_whose_master_is_lost_with_the_last_step_is_done(
    own_servers: Servers, client: Cluster, strategy: Strategy
) -> None:
    there = trainer(client, strategy)
    lose = after(50, lambda: own_servers.lose(MASTER))
    run = there.fit(IDS, steps=50, batch_size=BATCH, callbacks=[lose], progress=False)
    assert (run.state, run.steps) == ("done", 50)
    assert client.master == "/job:ps/task:0"
    assert [count.sum() for count in counted(there)] == [50 * BATCH] * 2


def stop_order(term: int, task: str = WORKER, *, account: bool = False) -> Frame:
    return frame(
        stop_loop=pb.StopLoop(
            loop="loop", task=task, run="run", term=term, account=account, timeout_s=1
        )
    )


@pytest.mark.row(20)
@pytest.mark.parametrize("task", [WORKER, "/job:ps/task:0"])
def test_order_of_a_master_that_was_replaced_is_refused_by_every_task(
    client: Cluster, task: str
) -> None:
    client.call("Master.StopLoop", stop_order(2, task))
    with pytest.raises(FencedError, match="master 1 of run 'run' came after master 2"):
        client.call("Master.StopLoop", stop_order(1, task))
    loop = pb.RunLoop(loop="loop", task=task, run="run", term=1)
    with pytest.raises(FencedError):
        client.call("RunLoop", frame(run_loop=loop), to=client.find(TaskName(task)))
    gate = pb.OpenGate(gate="gate", shards=[task], run="run", term=1)
    with pytest.raises(FencedError):
        client.call("Master.OpenGate", frame(open_gate=gate))


def test_worker_that_knows_a_loop_no_more_says_so(client: Cluster) -> None:
    with pytest.raises(
        TaskLostError, match="knows of no loop 'loop': it was never"
    ) as lost:
        client.call("Master.StopLoop", stop_order(1, account=True))
    assert lost.value.details["task"] == WORKER
