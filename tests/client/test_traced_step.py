from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client.session import Session
from jgraph.errors import ConfigError
from jgraph.graph.device import device
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import Variable


def test_traced_step_tells_when_each_node_ran_on_every_task(session: Session) -> None:
    w = Variable("w", jnp.ones((4, 4)), device="/job:ps/task:0")

    @function
    def step(x: Any) -> Any:
        with device("/job:worker/task:0"):
            h = jnp.tanh(x @ w[...])
        w[...] = w[...] + 1
        return h.sum()

    x = np.ones((2, 4), np.float32)
    assert session.run(step, x, trace=True) == pytest.approx(8 * np.tanh(4), rel=1e-6)
    told = session.run_metadata
    partitions = session.plan(step, x).program.partitions
    assert set(told.tasks) == {p.task for p in partitions}
    assert len(told.nodes) == sum(len(p.nodes) for p in partitions)
    for node in told.nodes:
        assert node.ready_s <= node.start_s <= node.end_s
    sends = [n for n in told.nodes if n.kind == "send"]
    recvs = {n.key: n for n in told.nodes if n.kind == "recv"}
    assert {n.key for n in sends} == set(recvs)
    for send in sends:
        assert recvs[send.key].start_s >= send.start_s
        assert recvs[send.key].nbytes == send.nbytes
    (computed,) = [n for n in told.of("/job:worker/task:0") if n.kind == "segment"]
    assert "dot_general" in computed.label
    assert computed.seconds > 0


def test_step_that_was_not_traced_leaves_no_times(session: Session) -> None:
    session.run(lambda x: x + 1, 1.0)
    with pytest.raises(ConfigError, match="trace=True"):
        _ = session.run_metadata
