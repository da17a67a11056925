"""A model in two halves beside one process: ``python -m benchmarks split``.

An MLP, the first half of its layers on one worker and the second on another; forward,
backward and SGD as one pre-registered step, beside the same step in this process with
one ``jax.jit``, in turns. Both are given a numpy batch and give the loss back, step by
step. Prints one JSON line:

* ``ratio``: time of the split step over that of one process. The workers share the
  cores, and the halves wait for each other: what is left is what cutting and sending
  cost.
* ``transit_ms``: of a traced step, from when a worker has sent large values to when
  the other has them, both ways together.
* ``cpu_ratio``: CPU time of all processes, likewise.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jgraph as jg
from benchmarks import measure
from benchmarks.auto import RATE, Example, mlp
from benchmarks.on_cluster import OnCluster
from jgraph.coordination.step.run_metadata import RunMetadata

LARGE_BYTES = 1 << 16


def in_one_process(example: Example) -> Callable[[Any, Any], Any]:
    """Returns the training step as one ``jax.jit``; it keeps its parameters."""
    params = jax.tree.map(jnp.array, example.params)

    def train(params: Any, x: Any, t: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for n, part in enumerate(params):
                h = example.apply(n, part, h)
            return example.loss(h, t)

        found, gradients = jax.value_and_grad(loss)(params)
        new = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
        return new, found

    jitted = jax.jit(train, donate_argnums=0)

    def step(x: Any, t: Any) -> Any:
        nonlocal params
        params, found = jitted(params, x, t)
        return np.asarray(found)

    return step


def transit_s(ran: RunMetadata) -> float:
    """Returns how long large values were on their way, all together."""
    ends = {n.key: n.end_s for n in ran.nodes if n.kind == "send"}
    came = [n for n in ran.nodes if n.kind == "recv" and n.nbytes >= LARGE_BYTES]
    return sum(n.start_s - ends[n.key] for n in came)


class Split(OnCluster):
    """A step over two workers of a cluster of its own."""

    def __init__(self, cluster: jg.LocalCluster, example: Example) -> None:
        super().__init__(cluster)
        first, second = cluster.tasks("worker")
        self._batch = example.batch
        self._session = cluster.session()
        self._step = jg.function(example.step((first, second)))
        self._call = self._session.make_callable(self._step, *example.batch)

    def step(self, x: Any, t: Any) -> Any:
        """Runs a step."""
        return self._call(x, t)

    def transit_ms(self) -> float:
        """Returns how long large values of one step are on their way."""
        self._session.run(self._step, *self._batch, trace=True)
        return 1e3 * transit_s(self._session.run_metadata)


class Turn(NamedTuple):
    """What a step took in one round: of the clock, and of the cores."""

    ms: float
    cpu_ms: float


def turn(split: Split, step: Callable[[Any, Any], Any], batch: Any, steps: int) -> Turn:
    """Runs some steps; CPU time is that of this process and of the workers."""

    def used() -> float:
        return time.process_time() + sum(split.cpu_seconds().values())

    began, before = time.perf_counter(), used()
    for _ in range(steps):
        step(*batch)
    seconds, cores = time.perf_counter() - began, used() - before
    return Turn(seconds / steps * 1e3, cores / steps * 1e3)


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--rounds", type=int, default=12)
    a = parser.parse_args(args)
    example = mlp(a.width, a.batch, a.layers)
    one = in_one_process(example)
    with Split(jg.LocalCluster(ps=0, workers=2), example) as split:
        ways = {
            "one": lambda: turn(split, one, example.batch, a.steps),
            "split": lambda: turn(split, split.step, example.batch, a.steps),
        }
        measure.take_turns(ways, 1)
        turns = measure.take_turns(ways, a.rounds)
        transits = [split.transit_ms() for _ in range(a.rounds)]
    two, alone = (list(zip(*turns[way], strict=True)) for way in ("split", "one"))
    measure.emit(
        "split",
        layers=a.layers,
        width=a.width,
        batch=a.batch,
        steps=a.steps,
        rounds=a.rounds,
        **measure.ratio("ratio", two[0], alone[0]),
        **measure.spread("ms", two[0]),
        **measure.spread("one_ms", alone[0]),
        **measure.ratio("cpu_ratio", two[1], alone[1]),
        **measure.spread("cpu_ms", two[1]),
        **measure.spread("transit_ms", transits, 2),
    )


if __name__ == "__main__":
    main()
