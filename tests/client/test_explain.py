"""A cluster says who waits for whom while a step is under way."""

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.clock import SystemClock
from jgraph.errors import DeadlineError
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import Variable
from jgraph.rpc.frames import frame, kind_of
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.transport import Frame

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"


def test_step_whose_value_never_comes_is_explained(
    session: Session, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Variable("w", jnp.array(4.0), device=PS)

    @function
    def double() -> object:
        with device(WORKER):
            return w[...] * 2

    assert session.run(double) == 8.0
    assert cluster.explain() == "No step is under way, and all tasks answer."
    whole = GrpcTransport.post

    def lose_values(self: GrpcTransport, dst: TaskName, sent: Frame) -> None:
        if kind_of(sent) != "values":
            whole(self, dst, sent)
        elif sent.header.values.HasField("done"):
            whole(self, dst, frame(step_done=sent.header.values.done))

    monkeypatch.setattr(GrpcTransport, "post", lose_values)
    with ThreadPoolExecutor() as pool:
        clock = SystemClock()
        until = clock.now() + 20
        running = pool.submit(session.run, double, timeout_s=2)
        said = ""
        while f"from {PS}" not in said and clock.now() < until and not running.done():
            said = cluster.explain()
        assert "of 'double', driven by" in said
        assert f"{WORKER}, which waits for message m0 from {PS}." in said
        with pytest.raises(DeadlineError, match=f"not finished: {WORKER}"):
            running.result()
