"""A pipeline beside one process: ``python -m benchmarks.pipeline``.

An MLP in as many stages as workers, forward, backward and SGD, beside the same step in
this process with one ``jax.jit``, in turns. Prints one JSON line per schedule and
number of microbatches:

* ``ratio``: time of the pipeline's step over that of one process. Workers of one
  machine share its cores, so there is nothing to win, and the bubble costs nothing
  either: what is left is what cutting and sending cost.
* ``bubble`` and ``bubble_measured``: the part of the workers' time in which they wait,
  by the schedule, and between the first and the last pass of traced steps. On fewer
  cores than workers the waiting is not of the schedule alone.
* ``held_mb``: the most bytes of values that a worker holds in a step, by the plan.

``--slowed``: two workers, each on a core of its own; the second one shares its core
with a process that computes all the time. The layers are cut into halves, and by
``balance=jg.auto(cluster)``, in turns:

* ``gain``: time of a step with halves over that with the measured cut.
* ``predicted_gain``: the same of the slowest stages, as the balance tells.
* ``layers``: how many layers each worker has by the measured cut.
* ``speeds``: of the workers, in GFLOP/s, as measured.
"""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgraph as jg
from benchmarks import measure
from benchmarks.on_cluster import OnCluster
from jgraph.coordination.step.run_metadata import RunMetadata
from jgraph.testing.memory_use import held_nbytes

Layers = list[tuple[Any, Any]]
RATE = 1e-2


def stage(params: Layers, x: Any) -> Any:
    """Returns what some layers make of their inputs."""
    for w, b in params:
        x = jax.nn.relu(x @ w + b)
    return x


def loss_fn(y: Any, t: Any) -> Any:
    """Returns the mean square error."""
    return ((y - t) ** 2).mean()


def make_params(width: int, layers: int, stages: int) -> list[Layers]:
    """Returns the layers of each stage."""
    keys = jax.random.split(jax.random.key(0), layers)
    made = [(jax.random.normal(k, (width, width)) / 32, jnp.zeros(width)) for k in keys]
    return [
        [*made[n * layers // stages : (n + 1) * layers // stages]]
        for n in range(stages)
    ]


class OneProcess:
    """The same step in this process, with one jit."""

    def __init__(self, params: list[Layers], x: Any, t: Any) -> None:
        self._params = jax.tree.map(jnp.array, params)
        self._batch = jnp.asarray(x), jnp.asarray(t)
        self._step = jax.jit(self._train, donate_argnums=0)

    @staticmethod
    def _train(params: list[Layers], x: Any, t: Any) -> Any:
        def loss(params: list[Layers]) -> Any:
            h = x
            for tree in params:
                h = stage(tree, h)
            return loss_fn(h, t)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    def seconds(self, steps: int) -> float:
        """Returns the time of a step."""
        began = time.perf_counter()
        for _ in range(steps):
            self._params, _ = self._step(self._params, *self._batch)
        jax.block_until_ready(self._params)
        return (time.perf_counter() - began) / steps


class Piped(OnCluster):
    """A pipeline on a cluster of its own."""

    def __init__(
        self,
        cluster: jg.LocalCluster,
        pipe: jg.Pipeline,
        params: list[Layers],
        x: Any,
        container: str = "",
    ) -> None:
        super().__init__(cluster)
        self.session = cluster.session()
        self.step = pipe.step(params, optax.sgd(RATE), x=x, container=container)

    def held_mb(self, x: Any, t: Any) -> float:
        """Returns the most MB of values that a worker holds in a step."""
        made = self.session.plan(self.step.train, x, t)
        return max(held_nbytes(made.program).values()) / 1e6

    def seconds(self, steps: int, x: Any, t: Any) -> float:
        """Returns the time of a step."""
        began = time.perf_counter()
        for _ in range(steps):
            self.session.run(self.step.train, x, t)
        return (time.perf_counter() - began) / steps

    def bubble(self, x: Any, t: Any) -> float:
        """Returns the part of the workers' time in which they wait, in one step."""
        self.session.run(self.step.train, x, t, trace=True)
        return waited(self.session.run_metadata)


def waited(ran: RunMetadata) -> float:
    """Returns the part of the time from first to last pass without one."""
    passes = [n for n in ran.nodes if n.kind == "segment" and n.label.endswith("pass")]
    began, ended = min(n.start_s for n in passes), max(n.end_s for n in passes)
    tasks = {n.task for n in passes}
    return 1 - sum(n.seconds for n in passes) / ((ended - began) * len(tasks))


ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
SPINS = """
import os, sys, time
parent, ends = os.getppid(), time.monotonic() + float(sys.argv[1])
while time.monotonic() < ends and os.getppid() == parent:
    pass
"""
SPINS_S = 600


@contextmanager
def slowed(cluster: jg.LocalCluster) -> Iterator[None]:
    """Gives each of two workers a core, and the second one company there."""
    first, *_, last = sorted(os.sched_getaffinity(0)) * 2
    command = [sys.executable, "-c", SPINS, str(SPINS_S)]
    company = subprocess.Popen(command)
    try:
        pids = [cluster.pid(task) for task in cluster.tasks("worker")]
        for pid, core in zip([*pids, company.pid], [first, last, last], strict=True):
            for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
        yield
    finally:
        company.kill()
        company.wait(10)


def balanced(a: Any) -> dict[str, Any]:
    """Returns what a cut by speed gains where a worker is slow."""
    x, t = np.random.default_rng(0).normal(size=(2, a.batch, a.width)).astype("float32")
    params = [[layer] for tree in make_params(a.width, a.layers, 1) for layer in tree]
    microbatches = max(a.microbatches)
    cluster = jg.LocalCluster(ps=0, workers=2, env=ONE_THREAD)
    with cluster, slowed(cluster):
        measured = jg.auto(cluster)
        costs = measured.cost_model
        cut = jg.Pipeline(
            [stage] * a.layers, loss_fn, microbatches=microbatches, balance=measured
        )
        halves = jg.Pipeline([stage] * 2, loss_fn, microbatches=microbatches)
        ways = {
            "balanced": Piped(cluster, cut, params, x, "balanced"),
            "halves": Piped(
                cluster, halves, make_params(a.width, a.layers, 2), x, "halves"
            ),
        }
        calls = {
            name: lambda piped=piped: piped.seconds(a.steps, x, t)
            for name, piped in ways.items()
        }
        measure.take_turns(calls, 1)
        turns = measure.take_turns(calls, a.rounds)
    balance = cut.balance
    assert balance is not None
    print(balance, file=sys.stderr)
    return {
        **measure.ratio("gain", turns["halves"], turns["balanced"]),
        "predicted_gain": round(balance.even_s / balance.slowest_s, 3),
        "layers": [stage.end - stage.first for stage in balance.stages],
        "speeds": [
            round(costs.tasks[s.task].flops_per_s / 1e9, 1) for s in balance.stages
        ],
        "width": a.width,
        "batch": a.batch,
        "microbatches": microbatches,
        **measure.spread("ms", [1e3 * s for s in turns["balanced"]]),
        **measure.spread("halves_ms", [1e3 * s for s in turns["halves"]]),
    }


def arguments(args: Sequence[str] | None = None) -> Any:
    """Returns the options of a command line."""
    parser = measure.parser(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--schedule", nargs="+", default=["1f1b", "gpipe"])
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slowed", action="store_true", help="one worker is slow")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    a = arguments(args)
    if a.slowed:
        measure.emit("pipeline", case="slowed", **balanced(a))
        return
    x, t = np.random.default_rng(0).normal(size=(2, a.batch, a.width)).astype("float32")
    params = make_params(a.width, a.layers, a.workers)
    for schedule in a.schedule:
        for microbatches in a.microbatches:
            pipe = jg.Pipeline(
                [stage] * a.workers,
                loss_fn,
                microbatches=microbatches,
                schedule=schedule,
            )
            cluster = jg.LocalCluster(ps=0, workers=a.workers)
            with Piped(cluster, pipe, params, x) as piped:
                held = piped.held_mb(x, t)
                one = OneProcess(params, x, t)
                ways = {
                    "one": lambda one=one: one.seconds(a.steps),
                    "piped": lambda piped=piped: piped.seconds(a.steps, x, t),
                }
                measure.take_turns(ways, 1)
                turns = measure.take_turns(ways, a.rounds)
                bubbles = [piped.bubble(x, t) for _ in range(a.rounds)]
            measure.emit(
                "pipeline",
                schedule=schedule,
                workers=a.workers,
                layers=a.layers,
                width=a.width,
                batch=a.batch,
                microbatches=microbatches,
                **measure.spread("one_ms", [1e3 * s for s in turns["one"]]),
                **measure.spread("ms", [1e3 * s for s in turns["piped"]]),
                **measure.ratio("ratio", turns["piped"], turns["one"]),
                bubble=round(pipe.bubble, 3),
                **measure.spread("bubble_measured", bubbles, 3),
                held_mb=round(held, 1),
            )


if __name__ == "__main__":
    main()
