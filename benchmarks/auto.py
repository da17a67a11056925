"""Automatic placement: predicted beside measured, ``python -m benchmarks.auto``.

Training steps (forward, backward, update) on a cluster of workers of this machine, each
placed in three ways, in turns: by ``jg.auto``, all on one task, and split in two halves
by hand. Prints one JSON line per example:

* ``ratio``: measured time of what ``jg.auto`` chose over that of all on one task.
* ``auto_predicted``, ``one_predicted``, ``split_predicted``: predicted over measured
  time, of each way. The cluster is measured anew in each round.
* ``tasks``: how many tasks compute, as ``jg.auto`` chose.

Workers of one machine share its cores, so that there is nothing to win by several. With
``--threads 1`` each computes with one thread, as if it had a core of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias, final

import jax
import numpy as np

import jgraph as jg
from benchmarks import measure
from benchmarks.pipeline import loss_fn, make_params, stage
from jgraph.client.placement.measuring import measure as measured_model
from jgraph.examples.lm import LENGTH
from jgraph.examples.pipeline import BATCH_SIZE, Stage, loss_fn as words_loss

RATE = 1e-2
WORDS = 1000
Halves: TypeAlias = tuple[str | None, str | None]
"""Where a user puts the first and the second half of a model; None: nowhere."""


@final
@dataclass(frozen=True, slots=True)
class Example:
    """A model to train.

    Attributes:
      params: a pytree for each part.
      apply: from (number of the part, its parameters, its input) to its output.
      loss: of what the last part gives and the targets.
      batch: inputs and targets.
    """

    params: Sequence[Any]
    apply: Callable[[int, Any, Any], Any]
    loss: Callable[[Any, Any], Any]
    batch: tuple[Any, Any]

    def step(self, halves: Halves) -> Callable[[Any, Any], Any]:
        """Returns a training step over variables that are made here."""
        leaves, tree = jax.tree.flatten(list(self.params))
        variables = [
            jg.Variable(f"v{n}", np.asarray(leaf)) for n, leaf in enumerate(leaves)
        ]

        def train(x: Any, t: Any) -> Any:
            def loss(values: Sequence[Any]) -> Any:
                h = x
                parts = jax.tree.unflatten(tree, values)
                for n, params in enumerate(parts):
                    with jg.device(halves[2 * n // len(parts)] or ""):
                        h = self.apply(n, params, h)
                with jg.device(halves[1] or ""):
                    return self.loss(h, t)

            values = [v[...] for v in variables]
            found, gradients = jax.value_and_grad(loss)(values)
            for v, value, gradient in zip(variables, values, gradients, strict=True):
                v[...] = value - RATE * gradient
            return found

        return train


def mlp(width: int, batch: int, layers: int = 6) -> Example:
    """Layers of equal width."""
    x, t = np.random.default_rng(0).normal(size=(2, batch, width)).astype("float32")
    params = make_params(width, layers, layers)
    return Example(params, lambda _, p, h: stage(p, h), loss_fn, (x, t))


def towers(width: int, batch: int, layers: int = 4) -> Example:
    """Two stacks of layers that know nothing of each other, and their sum."""
    x, t = np.random.default_rng(0).normal(size=(2, batch, width)).astype("float32")
    params = make_params(width, 2 * layers, 2)

    def apply(n: int, layer: Any, h: Any) -> Any:
        before, sums = (h, []) if n == 0 else h
        sums = [*sums, stage(layer, before)]
        return (before, sums) if n == 0 else sums[0] + sums[1]

    return Example(params, apply, loss_fn, (x, t))


def transformer(width: int, batch: int, stages: int = 4) -> Example:
    """The stages of ``jgraph examples pipeline``, on made-up words."""
    del width, batch  # it has its own
    words = np.random.default_rng(0).integers(0, WORDS, (BATCH_SIZE, LENGTH))
    x = words.astype("int32")
    modules = [Stage(WORDS, n == 0, n == stages - 1) for n in range(stages)]
    params: list[Any] = []
    h: Any = x
    for n, module in enumerate(modules):
        params.append(jax.jit(module.init)(jax.random.key(n), h))
        h = np.zeros(jax.eval_shape(module.apply, params[-1], h).shape, np.float32)
    return Example(params, lambda n, p, h: modules[n].apply(p, h), words_loss, (x, x))


EXAMPLES: Mapping[str, Callable[[int, int], Example]] = {
    "mlp": mlp,
    "towers": towers,
    "transformer": transformer,
}


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of each worker")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args(args)
    env = {"NPROC": str(a.threads)} if a.threads else {}
    for name in a.only:
        example = EXAMPLES[name](a.width, a.batch)
        with jg.LocalCluster(ps=0, workers=a.workers, env=env) as cluster:
            found = _rounds(cluster, example, a.steps, a.rounds)
        figures: dict[str, Any] = {}
        for way, rows in found.items():
            prefix = "" if way == "auto" else f"{way}_"
            seconds = [row.measured_s for row in rows]
            predicted = [row.predicted_s for row in rows]
            figures |= measure.spread(f"{prefix}ms", [1e3 * s for s in seconds])
            figures |= measure.ratio(f"{way}_predicted", predicted, seconds)
        mine, one = ([r.measured_s for r in found[way]] for way in ("auto", "one"))
        measure.emit(
            "auto",
            example=name,
            workers=a.workers,
            threads=a.threads or None,
            steps=a.steps,
            rounds=a.rounds,
            tasks=round(median(row.tasks for row in found["auto"])),
            **measure.ratio("ratio", mine, one),
            **figures,
        )


@final
@dataclass(frozen=True, slots=True)
class Row:
    """What one way of placing took in one round."""

    predicted_s: float
    measured_s: float
    tasks: int


def _rounds(
    cluster: jg.LocalCluster, example: Example, steps: int, rounds: int
) -> dict[str, list[Row]]:
    workers = cluster.tasks("worker")
    found: dict[str, list[Row]] = {"auto": [], "one": [], "split": []}
    halves: Halves = (workers[0], workers[-1])
    for number in range(rounds):
        model = measured_model(cluster)
        ways: dict[str, tuple[Halves, list[Any]]] = {
            "auto": ((None, None), workers),
            "one": ((None, None), workers[:1]),
            "split": (halves, workers),
        }
        for way in list(ways)[:: -1 if number % 2 else 1]:
            where, tasks = ways[way]
            placement = jg.auto(cluster, model, tasks=tasks)
            row = _timed(cluster, placement, example.step(where), example.batch, steps)
            found[way].append(row)
    return found


def _timed(
    cluster: jg.LocalCluster,
    placement: Any,
    step: Callable[..., Any],
    batch: tuple[Any, Any],
    steps: int,
) -> Row:
    with cluster.session(container="auto", placement=placement) as session:
        call = session.make_callable(step, *batch)
        for _ in range(3):
            call(*batch)
        times = []
        for _ in range(steps):
            began = perf_counter()
            call(*batch)
            times.append(perf_counter() - began)
        session.reset()
    predicted = call.plan.prediction
    assert predicted is not None  # the session places it
    computing = [s for s in predicted.by_task.values() if s > 1e-3]
    return Row(predicted.seconds, median(times), len(computing))


if __name__ == "__main__":
    main()
