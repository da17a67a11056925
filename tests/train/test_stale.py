"""Steps that would be too old: refused at a ps, and computed anew by their worker."""

import asyncio
from typing import Any

import optax
import pytest
from flax import nnx

from jgraph.client.cluster import connect
from jgraph.cluster import event_loop
from jgraph.errors import InvalidProgramError, JGError, StaleGradientError
from jgraph.graph.ir import TaskName
from jgraph.runtime.gate import aggregator
from jgraph.server.gates.stale_gate import StaleGate
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, data, nnx_loss
from tests.support.servers import Servers

STEP = ("w0", 7)


def test_a_program_that_averages_is_refused_at_a_gate_that_takes_nothing() -> None:
    for gate in (StaleGate(), None):
        with pytest.raises(InvalidProgramError, match="its gate takes none"):
            aggregator(gate)


def test_step_that_was_let_in_and_never_came_is_refused_when_it_does() -> None:
    ended: list[Any] = []
    shard = StaleGate(ask=lambda step: None, end=ended.append)
    shard.let_in(STEP)
    shard.replica_lost("w0")
    assert ended == [STEP]  # nobody waits for it
    refused: list[JGError] = []
    shard.ask(STEP, lambda: None, refused.append)
    assert isinstance(refused[0], StaleGradientError)
    entered: list[int] = []
    shard.ask(STEP, lambda: entered.append(1), refused.append)
    shard.let_in(STEP)
    assert (entered, len(refused)) == ([1], 1)


@pytest.mark.bad_input_row(14)
@pytest.mark.parametrize("prefetch", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_refused_step_is_computed_anew_and_every_batch_counts_once(
    prefetch: int,
) -> None:
    servers = Servers(ps=2, worker=2)
    worker = TaskName("/job:worker/task:0")
    driver = servers.server(worker)._server.service.driver  # type: ignore[union-attr]
    gates = servers.server("/job:ps/task:1")._server.service.gates  # type: ignore[union-attr]
    refused: list[Any] = []

    async def revoke_a_later_step() -> None:
        (handle,) = (h for h, task in gates._driver_of.items() if task == worker)
        (gate,) = (g for g in gates._opened.values() if isinstance(g, StaleGate))
        step = handle, next(driver._ids) + 3
        gate._revoke(step)
        refused.append((gate, step))
        await asyncio.sleep(0)

    def once(run: Any, report: Any) -> None:
        if not refused:
            event_loop.run(revoke_a_later_step())
        ((gate, step),) = refused
        if step not in gate._revoked and run.dropped():
            run.stop()

    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        there = Trainer(
            NnxMLP(rngs=nnx.Rngs(0)),
            nnx_loss,
            optax.sgd(0.1),
            cluster=cluster,
            strategy=AsyncPS(max_staleness=3, prefetch=prefetch),
        )
        run = there.fit(
            data(), steps=10**6, batch_size=8, progress=False, callbacks=[once]
        )
        assert run.state == "stopped"  # it came, and was sent away
        assert run.steps == len(run.metrics("loss")["value"])
        assert run.dropped() == {worker: 1}
        for ages in run.staleness().values():
            assert max(max(counts) for counts in ages.values()) <= 3
        there.close()
    servers.stop()
