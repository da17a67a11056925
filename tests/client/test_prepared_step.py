"""What a session is asked for beside the results of a function."""

import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client import programs
from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.cluster import event_loop
from jgraph.errors import (
    ConfigError,
    DeadlineError,
    FeedError,
    FetchError,
    InvalidProgramError,
    JGError,
    TaskLostError,
    UninitializedError,
)
from jgraph.graph.device import device
from jgraph.graph.tracing.function import function
from jgraph.graph.tracing.taps import tap
from jgraph.graph.variable import Variable
from tests.support.servers import Servers


def _two_layers() -> Any:
    @function
    def step(batch: dict[str, Any]) -> dict[str, Any]:
        with device("/job:worker/task:0"):
            hidden = tap("hidden", {"h": batch["x"] * 10})
        with device("/job:worker/task:1"):
            return {"out": (hidden["h"] + 1, [hidden["h"].sum()])}

    return step


def test_tapped_value_is_fetched_and_another_one_fed_in_its_place(
    session: Session,
) -> None:
    step, batch = _two_layers(), {"x": np.ones(2, np.float32)}
    name = "hidden['h']"
    assert session.run(step, batch, fetches={"h": [name]})["h"][0].tolist() == [10, 10]
    fed = session.run(step, batch, feeds={name: np.array([1, 2], np.float32)})
    assert fed["out"][0].tolist() == [2, 3]
    assert fed["out"][1] == [3.0]
    with pytest.raises(FeedError, match=r"hidden\['h'\] of 'step' is float32\[3\]"):
        session.run(step, batch, feeds={name: np.ones(3, np.float32)})
    with pytest.raises(FeedError, match=r"did you mean 'hidden\['h'\]'"):
        session.run(step, batch, feeds={"hidden": np.ones(2, np.float32)})


def test_targets_update_their_variables_and_fetch_nothing(session: Session) -> None:
    w = Variable("w", jnp.array(4.0), device="/job:ps/task:0")
    n = Variable("n", jnp.array(0), device="/job:ps/task:1")

    @function
    def step(x: Any) -> dict[str, Any]:
        loss = w[...] * x
        w[...] = w[...] - 1
        n[...] = n[...] + 1
        return {"loss": loss, "n": n[...]}

    assert session.run(step, 2.0, fetches="loss", targets=[]) == 8.0
    assert session.run(step, 2.0, targets=[w]) is None
    assert session.run(step, 2.0, targets=["n"], fetches=("loss", "n")) == (6.0, 1)
    assert session.run(step, 2.0, fetches=[]) == []
    values = session.read([w, n])
    assert (float(values["w"]), int(values["n"])) == (2.0, 2)
    with pytest.raises(FetchError, match="needs variable 'n' as it is after"):
        session.run(step, 2.0, fetches="n", targets=[w])
    with pytest.raises(ConfigError, match=r"targets=\['w'\]"):
        session.run(step, 2.0, targets="w")


def test_callable_only_runs_what_was_registered_when_it_was_made(
    session: Session, cluster: Cluster
) -> None:
    w = Variable("w", jnp.ones(2), device="/job:ps/task:0")

    @function
    def step(x: Any) -> dict[str, Any]:
        h = tap("h", x * 2)
        w[...] = w[...] + h
        return {"sum": w[...].sum()}

    struct = jax.ShapeDtypeStruct((2,), np.float32)
    call = session.make_callable(step, struct, fetches="sum", timeout_s=20)
    assert session.read([w])["w"].tolist() == [1, 1]
    before = [sorted(t.programs) for t in cluster.status().tasks]
    x = np.ones(2, np.float32)
    assert [float(call(x)), float(call(x))] == [6.0, 10.0]
    assert [sorted(t.programs) for t in cluster.status().tasks] == before
    with pytest.raises(FeedError, match=r"argument x of 'step' is float32\[3\]"):
        call(np.ones(3, np.float32))
    with pytest.raises(FeedError, match="make another callable"):
        call(x, x)
    fed = session.make_callable(step, struct, fetches="sum", feeds=["h"])
    with pytest.raises(FeedError, match="tapped value h of 'step' is missing"):
        fed(x)


def test_callable_runs_with_the_values_it_is_fed(session: Session) -> None:
    call = session.make_callable(lambda x: tap("h", x * 2) + 1, 1.0, feeds=["h"])
    assert call(1.0, feeds={"h": 10.0}) == 11.0


def test_sessions_share_or_isolate_variables_by_container(cluster: Cluster) -> None:
    w = Variable("w", jnp.zeros(()), device="/job:ps/task:0")
    first, same = (cluster.session(container="a") for _ in range(2))
    other, plain = cluster.session(container="b"), cluster.session()

    @function
    def add(x: Any) -> Any:
        w[...] = w[...] + x
        return w[...]

    assert first.run(add, 1.0) == 1.0
    assert same.run(add, 1.0) == 2.0
    assert other.run(add, 5.0) == 5.0
    plain.write({w: 7.0})
    values = [float(s.read([w])["w"]) for s in (first, same, other, plain)]
    assert values == [2.0, 2.0, 5.0, 7.0]
    pinned = Variable("w", jnp.zeros(()), device="/job:ps/task:0", container="b")
    assert float(first.read([pinned])["w"]) == 5.0


def test_a_callable_that_goes_after_a_reset_is_not_taken_back_twice(
    session: Session,
) -> None:
    call = session.make_callable(lambda x: 2 * x, 1.0)
    session.reset()
    assert call(2.0) == 4.0  # is made anew
    del call
    assert session.run(lambda x: x + 1, 1.0) == 2.0


def test_reset_drops_the_variables_of_one_container_alone(cluster: Cluster) -> None:
    w = Variable("w", jnp.ones(()), device="/job:ps/task:0")
    a, b = cluster.session(container="a"), cluster.session(container="b")

    @function
    def double() -> Any:
        w[...] = 2 * w[...]
        return w[...]

    for session in (a, b):
        assert [float(session.run(double)) for _ in range(2)] == [2.0, 4.0]
    a.reset()
    assert float(a.run(double)) == 2.0
    assert float(b.run(double)) == 8.0
    a.reset("b")
    with pytest.raises(UninitializedError, match="'w'"):
        b.run(double)


def test_new_shape_is_traced_once_and_announced(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    traces = []

    def step(x: Any) -> Any:
        traces.append(x.shape)
        return x.sum()

    with caplog.at_level(logging.WARNING, logger="jgraph"):
        for size in (4, 3, 4, 3):
            assert session.run(step, np.ones(size, np.float32)) == size
        assert session.run(step, np.ones(4, np.float32), fetches=[""]) == [4]
    assert len(set(traces)) == 2
    (record,) = [r for r in caplog.records if "compiled anew" in r.message]
    assert "x is float32[3] and was float32[4]" in record.message


class _InterruptedWhenTaken:
    """A lock that sends Ctrl-C to whoever runs the test when a step waits for it."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def acquire(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        assert self.free.wait(20)

    def release(self) -> None:
        pass


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_interrupt_ends_the_step_on_all_tasks(
    session: Session, servers: Servers
) -> None:
    w = Variable("w", jnp.ones(()), device="/job:ps/task:0")

    @function
    def step(x: Any) -> Any:
        with device("/job:worker/task:0"):
            y = jnp.sin(x)
        return w[...] + y

    session.initialize([w])
    call = session.make_callable(step, 0.0)
    runtimes = [server._server.service.runtime for server in servers.servers]  # type: ignore[union-attr]
    ps = servers.server("/job:ps/task:0")._server
    assert ps is not None
    store: Any = ps.service.runtime.store
    entry = store._entries["", "w"]
    lock = _InterruptedWhenTaken()
    entry.lock, usual = lock, entry.lock
    with pytest.raises(KeyboardInterrupt):
        call(0.0)
    for runtime in runtimes:
        idle = threading.Event()
        event_loop.event_loop().call_soon_threadsafe(runtime.when_idle, idle.set)
        assert idle.wait(10), runtime.task
    lock.free.set()
    entry.lock = usual
    store._groups.clear()  # they know the lock of before
    assert call(0.0) == 1.0


@pytest.mark.parametrize(
    ("error", "losses"),
    [
        (TaskLostError("gone"), 1),
        (InvalidProgramError("no program 'double-1'", handle="double-1"), 1),
        (InvalidProgramError("bytes of a segment do not parse"), 0),
    ],
)
def test_a_program_that_no_task_takes_is_not_registered_anew(
    error: JGError, losses: int, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise error

    double = session.make_callable(lambda x: 2 * x, 1.0)
    monkeypatch.setattr(programs, "run_in_process", refuse)
    with pytest.raises(type(error)):
        double(1.0)
    assert session._programs.losses == losses


def test_a_step_under_way_keeps_its_program_while_it_is_registered_anew(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread saw a task lost, and what it registers takes back what is old."""
    double = session.make_callable(lambda x: 2 * x, 1.0)
    programs = session._programs
    run = programs.run

    def run_late(*args: Any) -> list[Any]:
        monkeypatch.setattr(programs, "run", run)
        programs.losses += 1
        assert double(3.0) == 6.0
        assert session.run(lambda x: x + 1, 1.0) == 2.0
        return run(*args)

    monkeypatch.setattr(programs, "run", run_late)
    assert double(2.0) == 4.0
    assert session.run(lambda x: x - 1, 1.0) == 0.0
    assert len(programs) == 3  # that of before is taken back by now


def test_a_program_is_registered_anew_within_the_time_of_its_step(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = session.make_callable(lambda x: 2 * x, 1.0, timeout_s=7.0)
    limits = list[float]()
    call = session._cluster.call

    def noted(method: str, request: Any, *, timeout_s: float, **options: Any) -> Any:
        limits.append(timeout_s)
        return call(method, request, timeout_s=timeout_s, **options)

    monkeypatch.setattr(session._cluster, "call", noted)
    session._programs.losses += 1
    assert double(2.0) == 4.0
    assert limits[0] <= 7.0


def test_a_step_waits_no_longer_for_another_thread_that_registers_its_program(
    session: Session,
) -> None:
    double = session.make_callable(lambda x: 2 * x, 1.0, timeout_s=0.05)
    session._programs.losses += 1
    with (
        double._registration._lock,
        pytest.raises(DeadlineError, match=r"another thread .* after 0\.05 s"),
    ):
        double(2.0)
    double.timeout_s = 60.0
    assert double(2.0) == 4.0
