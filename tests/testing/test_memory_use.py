"""How much a task holds: planned from the program, and counted while it runs."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.plan.plan import Plan, plan
from jgraph.runtime.cost import Cost
from jgraph.testing.memory_use import held_nbytes
from tests.support.plans import WORKERS, graph_of
from tests.support.tasks import Tasks

T = TypeVar("T")
ROWS, WIDTH, MICROBATCHES = 64, 256, 8
PART = ROWS // MICROBATCHES * WIDTH * 4


class Watched(Tasks):
    """A task that counts the bytes of the values which it holds."""

    def __init__(self, others: Tasks, name: str) -> None:
        super().__init__(name)
        self.peak = 0
        self.messages = others.messages
        self.outcomes = others.outcomes
        others.runtimes[name] = self.runtimes[name]

    def submit(
        self,
        work: Callable[[], T],
        done: Callable[[T | BaseException], None],
        cost: Cost,
    ) -> None:
        def counted(result: T | BaseException) -> None:
            (runtime,) = self.runtimes.values()
            runs = runtime._steps.values()
            held = [v for run in runs for v in run._values._values.values()]
            made = result if isinstance(result, list) else []
            self.peak = max(self.peak, nbytes_of([*held, *made]))
            done(result)

        super().submit(work, counted, cost)


def nbytes_of(values: list[Any]) -> int:
    """Returns the bytes of arrays that are there: not those that were donated."""
    alive = [v for v in values if not getattr(v, "is_deleted", bool)()]
    return sum(value.nbytes for value in alive)


def pipeline(schedule: Any) -> tuple[jg.Pipeline, Plan, tuple[Any, Any]]:
    """Returns a pipeline of three stages that keep three values each, and its plan."""

    def stage(w: Any, x: Any) -> Any:
        # All that the derivative of exp needs is its value, in every JAX.
        return jnp.exp(-w * jnp.exp(-w * jnp.exp(-w * x)))

    pipe = jg.Pipeline(
        [stage] * 3,
        lambda y, t: ((y - t) ** 2).mean(),
        microbatches=MICROBATCHES,
        schedule=schedule,
        tasks=WORKERS[:3],
    )
    x = np.ones((ROWS, WIDTH), np.float32)

    def step(x: Any, t: Any) -> Any:
        return pipe.value_and_grad([jnp.ones(WIDTH)] * 3, x, t)

    graph = graph_of(step, x, x)
    return pipe, plan(graph, tasks=WORKERS, driver=WORKERS[3]), (x, x)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_task_holds_what_the_plan_says_within_a_fifth(schedule: Any) -> None:
    _, made, (x, t) = pipeline(schedule)
    tasks = Tasks(*(p.task for p in made.program.partitions))
    watched = {worker: Watched(tasks, worker) for worker in WORKERS[:3]}
    tasks.register("step", made.program)
    tasks.run("step", 1, {"x": x, "t": t})
    planned = held_nbytes(made.program)
    for worker, task in watched.items():
        assert task.peak == pytest.approx(planned[worker], rel=0.2)


def test_1f1b_lets_go_of_activations_that_gpipe_holds() -> None:
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        pipe, made, _ = pipeline(schedule)
        peaks[schedule] = held_nbytes(made.program)[WORKERS[1]]
        held = pipe.schedule.most_held()[1]
        # Three values and the input of each microbatch, and what a pass makes.
        assert 3 * held * PART <= peaks[schedule] <= (4 * held + 8) * PART
    assert peaks["1f1b"] < 0.6 * peaks["gpipe"]


def test_a_value_counts_from_its_making_to_its_last_use() -> None:
    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            return jnp.outer(x, x).sum()

    made = plan(graph_of(step, jnp.ones(100)), tasks=WORKERS, driver=WORKERS[0])
    # The outer product is inside the segment; x and the sum are between nodes.
    assert held_nbytes(made.program)[WORKERS[1]] == 100 * 4 + 4


def test_sending_waits_for_nobody() -> None:
    _, made, (x, t) = pipeline("1f1b")
    tasks = Tasks(*(p.task for p in made.program.partitions))
    tasks.register("step", made.program)
    tasks.start("step", 1, {"x": x, "t": t})
    while not any(dst == WORKERS[1] for dst, *_ in tasks.messages):
        tasks.deliver_one()
    # The first worker ran three forward passes, and no message has arrived yet.
    assert sum(dst == WORKERS[1] for dst, *_ in tasks.messages) == 3
