from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import (
    CancelledStepError,
    InvalidProgramError,
    UninitializedError,
    VariableMismatchError,
)
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import Program, StoredVariable
from tests.support.tasks import Tasks

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
W = StoredVariable("w", ValueType((3,), "float32"))


def counting_program(shape: tuple[int, ...] = (3,)) -> Program:
    """A worker reads w from the ps, and the ps adds to it what the worker sends."""
    w = Variable("w", jnp.zeros(shape), device=PS)

    def step(x: jax.Array) -> jax.Array:
        with device(WORKER):
            gradient = x * 2 + w[...] * 0
        w[...] = w[...] + gradient
        with device(WORKER):
            total: jax.Array = gradient.sum()
        return total

    graph, _ = trace(step, jax.ShapeDtypeStruct(shape, jnp.float32))
    return plan(graph, tasks=[PS, WORKER], driver=WORKER).program


@pytest.fixture
def tasks() -> Tasks:
    tasks = Tasks(PS, WORKER)
    tasks.runtimes[PS].store.write([W], [np.zeros(3, np.float32)])
    tasks.register("count", counting_program())
    return tasks


def value_of_w(tasks: Tasks) -> list[float]:
    values: list[float] = tasks.runtimes[PS].store.read([W])[0].tolist()
    return values


def test_step_runs_on_both_tasks_and_updates_the_variable(tasks: Tasks) -> None:
    (total,) = tasks.run("count", 1, {"x": np.ones(3, np.float32)})
    assert total == 6.0
    assert value_of_w(tasks) == [2.0, 2.0, 2.0]
    assert tasks.outcomes[PS, ("count", 1)] == []


def test_second_registration_of_a_program_compiles_nothing(tasks: Tasks) -> None:
    compiled = tasks.cache.compilations
    assert compiled == 2
    tasks.register("again", counting_program())
    tasks.run("again", 1, {"x": np.ones(3, np.float32)})
    assert tasks.cache.compilations == compiled


def test_concurrent_steps_lose_no_update(tasks: Tasks) -> None:
    """All workers read before any of them writes: every update must still count."""
    for step_id in range(8):
        tasks.start("count", step_id, {"x": np.ones(3, np.float32)})
    tasks.deliver_all()
    assert value_of_w(tasks) == [16.0] * 3


def test_ordered_steps_wait_for_the_step_before_them(tasks: Tasks) -> None:
    x = {"x": np.ones(3, np.float32)}
    tasks.start("count", 1, x, ordered=True)
    tasks.start("count", 2, x, ordered=True)
    from_ps = [step for dst, step, _, _ in tasks.messages if dst == WORKER]
    assert from_ps == [("count", 1)]
    tasks.deliver_all()
    assert value_of_w(tasks) == [4.0] * 3


def test_a_step_that_waits_begins_before_the_one_before_it_is_told(
    tasks: Tasks,
) -> None:
    ps, sent = tasks.runtimes[PS], list[tuple[str, int]]()

    def told(outcome: object, times: object) -> None:
        sent.extend(step for dst, step, _, _ in tasks.messages if dst == WORKER)

    ps.start_step(("count", 1), told, ordered=True)
    ps.start_step(("count", 2), lambda outcome, times: None, ordered=True)
    tasks.runtimes[WORKER].start_step(
        ("count", 1),
        lambda outcome, times: None,
        feeds={"x": np.ones(3, np.float32)},
    )
    tasks.deliver_all()
    assert sent == [("count", 2)]


def ones(times: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.full(3, times, np.float32)}


def test_a_step_that_reads_ahead_reads_before_the_update_of_the_one_before_it(
    tasks: Tasks,
) -> None:
    tasks.start("count", 1, ones(), ordered=True, ahead=1)
    tasks.start("count", 2, ones(), ordered=True, ahead=1)
    tasks.start("count", 3, ones(), ordered=True, ahead=1)
    read = [step for dst, step, _, _ in tasks.messages if dst == WORKER]
    assert read == [("count", 1), ("count", 2)]
    tasks.deliver_one()  # w for step 1, which sends its gradient
    tasks.deliver_one()  # w for step 2
    assert value_of_w(tasks) == [0.0] * 3
    tasks.deliver_all()
    assert value_of_w(tasks) == [6.0] * 3
    assert all(tasks.outcomes[PS, ("count", n)] == [] for n in (1, 2, 3))


def test_a_step_that_read_ahead_computes_and_writes_after_the_one_before_it(
    tasks: Tasks,
) -> None:
    """Whatever comes first: its values, or those of the step before it."""
    for step_id in (1, 2):
        tasks.start("count", step_id, ones(10.0**step_id), ordered=True, ahead=1)
    first, second = (m for m in tasks.messages if m[0] == WORKER)
    tasks.messages.clear()
    for dst, step, key, values in (second, first):
        tasks.runtimes[dst].deliver(step, key, values)
        told = [step for task, step in tasks.outcomes if task == WORKER]
        assert told == ([] if step[1] == 2 else [("count", 1), ("count", 2)])
    first, second = tasks.messages
    tasks.messages.clear()
    for dst, step, key, values in (second, first):
        tasks.runtimes[dst].deliver(step, key, values)
        done = 0.0 if step[1] == 2 else 220.0
        assert value_of_w(tasks) == [done] * 3


def test_aborting_a_step_lets_the_one_that_read_ahead_go_on(tasks: Tasks) -> None:
    first = tasks.start("count", 1, ones(), ordered=True, ahead=1)
    tasks.start("count", 2, ones(), ordered=True, ahead=1)
    for runtime in tasks.runtimes.values():
        runtime.abort(first, CancelledStepError("given up"))
    tasks.deliver_all()
    assert value_of_w(tasks) == [2.0] * 3
    assert tasks.outcomes[PS, ("count", 2)] == []


def test_aborting_a_step_that_read_ahead_leaves_the_one_before_it(
    tasks: Tasks,
) -> None:
    tasks.start("count", 1, ones(), ordered=True, ahead=1)
    second = tasks.start("count", 2, ones(), ordered=True, ahead=1)
    for runtime in tasks.runtimes.values():
        runtime.abort(second, CancelledStepError("given up"))
    tasks.deliver_all()
    assert value_of_w(tasks) == [2.0] * 3
    assert (WORKER, ("count", 1)) in tasks.outcomes


def test_values_may_arrive_before_the_step_starts(tasks: Tasks) -> None:
    tasks.runtimes[PS].start_step(("count", 5), lambda outcome, times: None)
    tasks.deliver_all()  # w is at the worker, which has not begun
    done: list[object] = []
    tasks.runtimes[WORKER].start_step(
        ("count", 5),
        lambda outcome, times: done.append(outcome),
        feeds={"x": np.ones(3, np.float32)},
    )
    tasks.deliver_all()
    assert done == [[np.float32(6.0)]]


def test_too_many_early_values_end_the_oldest_step_that_has_not_begun(
    tasks: Tasks,
) -> None:
    worker = tasks.runtimes[WORKER]
    worker.max_early_bytes = 30  # of 12 bytes each
    for step_id in (5, 6, 7):
        tasks.runtimes[PS].start_step(("count", step_id), lambda outcome, times: None)
    tasks.deliver_all()
    with pytest.raises(CancelledStepError, match=r"gave up step 5 .* 30 bytes"):
        worker.start_step(("count", 5), lambda outcome, times: None)
    done: list[object] = []
    worker.start_step(
        ("count", 6),
        lambda outcome, times: done.append(outcome),
        feeds={"x": np.ones(3, np.float32)},
    )
    tasks.deliver_all()
    assert done == [[np.float32(6.0)]]


def test_values_for_no_program_are_not_kept(tasks: Tasks) -> None:
    worker = tasks.runtimes[WORKER]
    worker.max_early_bytes = 0
    worker.deliver(("gone", 1), "w", [np.ones(3)])
    tasks.run("count", 1, {"x": np.ones(3, np.float32)})


def test_aborted_step_takes_back_what_it_sent(tasks: Tasks) -> None:
    step = tasks.start("count", 1, {"x": np.ones(3, np.float32)})
    assert [message[1] for message in tasks.messages] == [step]
    tasks.runtimes[PS].abort(step, CancelledStepError("stopped"))
    assert not tasks.messages


def test_uninitialized_variable_fails_the_step_with_its_name() -> None:
    tasks = Tasks(PS, WORKER)
    tasks.register("count", counting_program())
    step = tasks.start("count", 1, {"x": np.ones(3, np.float32)})
    outcome = tasks.outcomes[PS, step]
    assert isinstance(outcome, UninitializedError)
    assert "'w'" in str(outcome)


def test_aborted_step_is_over_and_its_late_values_are_dropped(tasks: Tasks) -> None:
    step = tasks.start("count", 1, {"x": np.ones(3, np.float32)})
    error = CancelledStepError("stopped")
    for runtime in tasks.runtimes.values():
        runtime.abort(step, error)
    tasks.deliver_all()
    assert tasks.outcomes[WORKER, step] is error
    assert value_of_w(tasks) == [0.0] * 3
    assert tasks.run("count", 2, {"x": np.ones(3, np.float32)})[0] == 6.0


def test_aborting_an_ordered_step_lets_the_next_one_start(tasks: Tasks) -> None:
    x = {"x": np.ones(3, np.float32)}
    first = tasks.start("count", 1, x, ordered=True)
    tasks.start("count", 2, x, ordered=True)
    for runtime in tasks.runtimes.values():
        runtime.abort(first, CancelledStepError("stopped"))
    tasks.deliver_all()
    assert value_of_w(tasks) == [2.0] * 3


def test_unregistered_program_is_gone_and_its_steps_end(tasks: Tasks) -> None:
    step = tasks.start("count", 1, {"x": np.ones(3, np.float32)})
    tasks.runtimes[WORKER].unregister("count")
    assert isinstance(tasks.outcomes[WORKER, step], CancelledStepError)
    with pytest.raises(InvalidProgramError, match="no program 'count'"):
        tasks.runtimes[WORKER].start_step(("count", 2), lambda outcome, times: None)


def test_step_that_is_over_has_settled_when_its_threads_change_nothing_more(
    tasks: Tasks,
) -> None:
    step = tasks.start("count", 1, {"x": np.ones(3, np.float32)})
    ps, tasks.threads = tasks.runtimes[PS], deque()
    tasks.deliver_all()
    while not ps.steps[step].work.nodes:
        tasks.threads.popleft()()
        tasks.deliver_all()
    (run,) = ps.unregister("count")
    assert isinstance(tasks.outcomes[PS, step], CancelledStepError)
    settled: list[list[float]] = []
    run.work.when_settled(lambda: settled.append(value_of_w(tasks)))
    assert settled == []
    while tasks.threads:
        tasks.threads.popleft()()
    assert settled == [value_of_w(tasks)]
    run.work.when_settled(lambda: settled.append([]))  # at once
    assert settled[1:] == [[]]
    assert ps.unregister("count") == []


def test_name_reused_with_another_shape_is_refused_at_registration(
    tasks: Tasks,
) -> None:
    with pytest.raises(VariableMismatchError, match="'w' is float32"):
        tasks.register("other", counting_program((4,)))
    assert tasks.runtimes[PS].programs == ["count"]


def test_idle_callback_comes_after_the_last_step(tasks: Tasks) -> None:
    runtime, idle = tasks.runtimes[WORKER], list[str]()
    runtime.when_idle(lambda: idle.append("at once"))
    tasks.start("count", 1, {"x": np.ones(3, np.float32)})
    runtime.when_idle(lambda: idle.append("after"))
    assert idle == ["at once"]
    tasks.deliver_all()
    assert idle == ["at once", "after"]
