"""A computation that does not end: its task can, and says what it was."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest

import jgraph as jg
from jgraph.cluster import event_loop
from jgraph.coordination.liveness.restarts import OVERDUE
from jgraph.errors import DeadlineError
from jgraph.graph.variable import Variable
from jgraph.launch.local.cluster import LocalCluster
from jgraph.server.overdue import OverdueWatch
from tests.support.servers import Servers

PS = "/job:ps/task:0"


def endless(variable: Variable) -> Callable[[], Any]:
    """A step that updates a variable on the ps for ever, if that is 0."""

    def spin() -> Any:
        variable[...] = jax.lax.while_loop(
            lambda x: x[0] < 1, lambda x: x * 2, variable[...]
        )
        return variable[...].sum()

    return jg.function(spin)


def wedge(cluster: LocalCluster) -> None:
    """Begins such a step, and waits until its time is up."""
    w = Variable("w", jnp.zeros(2), device=PS)
    session = cluster.session()
    session.initialize([w])
    with pytest.raises(DeadlineError):
        session.run(endless(w), timeout_s=1)


@pytest.mark.procs
def test_task_whose_step_does_not_end_is_started_again_and_says_which_it_was() -> None:
    with LocalCluster(ps=1, workers=1, restarts=1, frozen_s=0.5) as cluster:
        process = cluster._processes[PS].process
        wedge(cluster)
        assert process.wait(60) == OVERDUE
        assert cluster.wait_for_tasks(60)
        said = cluster.logs(PS, tail=100)
        assert "segment 'while x1, reduce_sum x1' of 'spin' still runs" in said
        w = Variable("w", jnp.ones(2), device=PS)
        session = cluster.session()
        session.initialize([w])
        assert float(session.run(endless(w), timeout_s=60)) == 2.0


@pytest.mark.procs
@pytest.mark.parametrize(
    "ended_by",
    ["SIGTERM", pytest.param("its client", marks=pytest.mark.nightly)],
)
def test_task_whose_step_does_not_end_ends_when_it_is_told_to(ended_by: str) -> None:
    with LocalCluster(ps=1, workers=1) as cluster:
        tasks = cluster._processes[PS]
        process = psutil.Process(tasks.process.pid)
        wedge(cluster)
        if ended_by == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            tasks.end()  # closes its input, as the end of this process would
        assert tasks.process.wait(60) == 0


def test_event_loop_that_computes_for_half_a_minute_is_overdue() -> None:
    servers = Servers(ps=1)
    server = servers.server(PS)._server
    assert server is not None
    service = server.service

    async def looked() -> list[str]:
        watch = OverdueWatch(service.runtime, service.shell, limit_s=10.0)
        await asyncio.to_thread(watch.close)  # this test looks itself
        assert watch.overdue() == ""
        service.shell.computes_at_once = True
        while not (why := watch.overdue()):
            pass
        await asyncio.sleep(0)
        return [why, watch.overdue()]

    try:
        why, later = event_loop.run(looked())
        assert why == "a computation blocks the event loop for over 30 s"
        assert later == ""
    finally:
        servers.stop()
