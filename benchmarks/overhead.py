"""What a step costs that computes nothing: ``python -m benchmarks.overhead``.

A scalar null step in growing company, in turns: ``jit_us``, plain ``jax.jit``;
``one_task_us``, a loop on one task, so planning's executor and driver without a wire;
``step_us``, one ps and one worker. ``run_us`` is a call of ``Session.run`` from the
client. ``cpu_us`` is the CPU time of each task per step: what is not CPU time is
waiting for the other side, the kernel and a free core. Prints one JSON line.

``--variables 100 1000``: what each further variable of 1 kB costs such a step, on one
ps and one worker. Steps on these numbers of variables take turns; ``variable_us`` is
the median over the rounds of the slope between the least and the most.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jgraph as jg
from benchmarks import measure
from benchmarks.null_step import NullStep


def plain(steps: int) -> Callable[[], float]:
    """The step in plain JAX; returns the microseconds of one."""
    step = jax.jit(lambda v, x: (v + (v * 0 + x[0]), x.sum()), donate_argnums=0)
    x = np.ones(1, np.float32)

    def call() -> float:
        v, fetch = step(jnp.zeros(()), x)
        began = time.perf_counter()
        for _ in range(steps):
            v, fetch = step(v, x)
            np.asarray(fetch)
        return (time.perf_counter() - began) / steps * 1e6

    return call


def session_run(work: NullStep, steps: int) -> Callable[[], float]:
    """A call of ``Session.run`` that needs the ps; returns microseconds."""
    variable = work.variables[0]

    def read() -> Any:
        return variable[...] + 1

    function = jg.function(read)

    def call() -> float:
        work.session.run(function)
        began = time.perf_counter()
        for _ in range(steps):
            work.session.run(function)
        return (time.perf_counter() - began) / steps * 1e6

    return call


def looped(
    work: NullStep, steps: int, cpu: dict[str, list[float]] | None = None
) -> Callable[[], float]:
    """Steps in a worker's own loop; returns the microseconds of one."""
    work.run(1, 20)

    def call() -> float:
        before = work.cpu_seconds()
        times = work.run(1, steps)
        if cpu is not None:
            for task, after in work.cpu_seconds().items():
                cpu.setdefault(task, []).append((after - before[task]) / steps * 1e6)
        return 1e6 / measure.rates(times).steps_per_s

    return call


def measure_variables(a: argparse.Namespace) -> None:
    """Measures null steps on several numbers of variables, in turns."""
    with ExitStack() as stack:
        works = {
            count: stack.enter_context(NullStep("many", count=count))
            for count in sorted(a.variables)
        }
        ways = {
            f"step_us_{count}": looped(work, max(20, a.steps * 10 // (10 + count)))
            for count, work in works.items()
        }
        found = measure.take_turns(ways, a.rounds)
        for work in works.values():
            work.check()
    least, most = min(works), max(works)
    slopes = [
        (many - few) / (most - least)
        for few, many in zip(
            found[f"step_us_{least}"], found[f"step_us_{most}"], strict=True
        )
    ]
    slope = measure.spread("variable_us", slopes, 2)
    if a.rows:
        measure.emit_row(1, slope["variable_us"], "us per further variable of 1 kB")
        return
    figures: dict[str, Any] = {}
    for name, values in found.items():
        figures |= measure.spread(name, values)
    measure.emit("overhead", steps=a.steps, rounds=a.rounds, **figures, **slope)


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variables", type=int, nargs="+", metavar="COUNT")
    parser.add_argument("--rows", action="store_true", help="only the row, as JSON")
    a = parser.parse_args(args)
    if a.variables:
        if len(set(a.variables)) < 2:
            parser.error("--variables takes two numbers or more, to compare them")
        measure_variables(a)
        return
    if a.rows:
        parser.error("--rows goes with --variables")
    cpu: dict[str, list[float]] = {}
    with NullStep("scalar") as two, NullStep("scalar", ps=0) as one:
        ways = {
            "jit_us": plain(a.steps),
            "one_task_us": looped(one, a.steps),
            "step_us": looped(two, a.steps, cpu),
            "run_us": session_run(two, max(1, a.steps // 5)),
        }
        found = measure.take_turns(ways, a.rounds)
    figures: dict[str, Any] = {}
    for name, values in found.items():
        figures |= measure.spread(name, values)
    medians = {t: measure.spread("us", used)["us"] for t, used in cpu.items()}
    measure.emit("overhead", steps=a.steps, rounds=a.rounds, **figures, cpu_us=medians)


if __name__ == "__main__":
    main()
