"""What a busy task refused is tried again, until the step's own time is over."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client import retry
from jgraph.client.retry import backoff_s
from jgraph.client.session import Session
from jgraph.errors import ClusterBusyError
from jgraph.graph.device import device
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import Variable
from jgraph.rpc.calls import answering

pytestmark = pytest.mark.usefixtures("nothing_is_left")

CALLERS, RUNS = 16, 160


def counting() -> tuple[Variable, Any]:
    """Returns a variable and a step over two tasks that counts in it."""
    count = Variable("count", jnp.zeros((), jnp.int32), device="/job:ps/task:0")

    @function
    def step(x: Any) -> Any:
        with device("/job:worker/task:0"):
            one = x.max().astype(jnp.int32)
        count[...] = count[...] + one

    return count, step


@pytest.mark.row(28)
def test_each_step_of_too_many_callers_is_made_once(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task refuses all but three at a time; nobody sees it."""
    count, step = counting()
    x, pauses = np.ones(1000, np.float32), []

    def noted(tries: int, jitter: float) -> float:
        pauses.append(tries)
        return backoff_s(tries, jitter)

    session.run(step, x)
    monkeypatch.setattr(retry, "backoff_s", noted)
    monkeypatch.setattr(answering, "MAX_UNANSWERED", 3)
    together = threading.Barrier(CALLERS)

    def push(n: int) -> None:
        if n < CALLERS:
            together.wait(10)
        session.run(step, x)

    with ThreadPoolExecutor(CALLERS) as callers:
        list(callers.map(push, range(RUNS)))
    assert pauses
    assert int(session.read([count])["count"]) == RUNS + 1


def test_task_that_stays_busy_is_told_when_the_time_of_the_step_is_over(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, step = counting()
    session.run(step, np.ones(3, np.float32))
    with monkeypatch.context() as patched:
        patched.setattr(answering, "MAX_UNANSWERED", 0)
        with pytest.raises(ClusterBusyError, match="refused 'RunStep'"):
            session.run(step, np.ones(3, np.float32), timeout_s=0.2)
    assert int(session.read([count])["count"]) == 1


def test_pauses_double_up_to_two_seconds_and_differ_by_luck() -> None:
    assert [backoff_s(n, jitter=1.0) for n in (1, 2, 3)] == [0.02, 0.04, 0.08]
    assert backoff_s(10**6, jitter=1.0) == 2.0
    assert all(backoff_s(n, 0.0) == backoff_s(n, 1.0) / 2 for n in range(1, 20))
