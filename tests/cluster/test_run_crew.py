"""A run whose master looks after its workers, as long as it is the master."""

import pytest

from jgraph.cluster.client import connect
from jgraph.errors import FencedError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.train.async_ps import AsyncPS
from tests.cluster.conftest import Servers
from tests.faults.counting import BATCH, IDS, after, trainer

PS, WORKERS = "/job:ps/task:0", ("/job:worker/task:0", "/job:worker/task:1")


def test_row_20_master_that_was_replaced_takes_no_worker_back(
    servers: Servers,
) -> None:
    """A worker ends in order, and answers; another one has heard of the next master."""
    here, there = (servers.server(task).target for task in (WORKERS[0], PS))
    with connect(here) as cluster, connect(there) as other:

        def replace_master() -> None:
            (info,) = [run for run in other.runs() if run.state == "running"]
            for order in (
                pb.StopLoop(task=WORKERS[0], run=info.name, epoch=2),
                pb.StopLoop(task=WORKERS[1], loop=f"{info.name}-1"),
            ):
                other.call("Master.StopLoop", frame(stop_loop=order))

        counting = trainer(cluster, AsyncPS())
        with pytest.raises(FencedError, match="after master 2 had taken over"):
            counting.fit(
                IDS,
                steps=3000,
                batch_size=BATCH,
                callbacks=[after(20, replace_master)],
                progress=False,
                detached=True,
            )
        assert other.runs()[-1].state == "failed"
        counting.close()
