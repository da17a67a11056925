"""What each level of durability costs: ``python -m benchmarks durability``.

The same asynchronous training (an MLP 784-512-512-10, Adam) on the same processes at
each level, in turns. One JSON line per level: steps per second, those of each round,
and the share of what ``"checkpoint"`` does in the same round; with ``--lose`` also how
long a run goes without a report when a ps is killed. ``--mb`` makes the state larger:
two thirds of it are Adam's.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure

LEVELS = ("checkpoint", "replica", "log")
PS = "/job:ps/task:1"


class MLP(nnx.Module):
    """An MLP 784-512-…-10, with as many layers of 512 as a state of ``mb`` MB has."""

    def __init__(self, mb: float) -> None:
        rngs = nnx.Rngs(0)
        hidden = max(1, round((mb * 1e6 / 12 - 784 * 512) / 512**2))
        sizes = [784, *[512] * (hidden + 1), 10]
        self.layers = nnx.List(
            [nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)]
        )

    def __call__(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def loss(model: Any, batch: Any) -> Any:
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def data() -> tuple[Any, Any]:
    """Returns random pictures and labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, 784)).astype(np.float32)
    return x, rng.integers(0, 10, 4096).astype(np.int32)


def trainer_of(cluster: jg.LocalCluster, level: str, mb: float) -> jg.Trainer:
    """Returns a Trainer of that level."""
    strategy = jg.AsyncPS(durability=level)  # type: ignore[arg-type]  # one of LEVELS
    model = MLP(mb)
    return jg.Trainer(model, loss, optax.adam(1e-3), cluster=cluster, strategy=strategy)


def rate(trainer: jg.Trainer, given: Any, seconds: float) -> float:
    """Returns steps per second over so long, from the first report on."""
    seen: list[tuple[float, int]] = []

    def watch(run: Any, report: Any) -> None:
        seen.append((time.perf_counter(), report.step))
        if seen[-1][0] - seen[0][0] > seconds:
            run.stop()

    trainer.fit(given, steps=10**9, batch_size=128, callbacks=[watch], progress=False)
    (began, first), (ended, last) = seen[0], seen[-1]
    return (last - first) / (ended - began)


def lose(trainer: jg.Trainer, cluster: jg.LocalCluster, given: Any) -> dict[str, Any]:
    """Kills a ps; returns how long nothing was reported, and what was done again."""
    killed: list[float] = []
    back: list[float] = []

    def watch(run: Any, report: Any) -> None:
        now = time.perf_counter()
        if not killed and report.step > 100:
            cluster.kill(PS)
            killed.append(now)
        elif run.recoveries() and not back:
            back.append(now)
            run.stop()

    run = trainer.fit(
        given, steps=10**9, batch_size=128, callbacks=[watch], progress=False
    )
    (recovery,) = run.recoveries()
    return {
        "went_on_s": round(back[0] - killed[0], 2),
        "steps_again": recovery.again,
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3, help="of each round")
    parser.add_argument("--mb", type=float, default=8, help="of state, with Adam's")
    parser.add_argument("--lose", action="store_true", help="kill a ps at the end")
    a = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as root:
        env = {"JGRAPH_RECORDS_DIR": root}
        with jg.LocalCluster(ps=2, workers=2, restarts=100, env=env) as cluster:
            measured(cluster, a)


def measured(cluster: jg.LocalCluster, a: argparse.Namespace) -> None:
    """Prints what each level costs."""
    given = data()
    trainers = {level: trainer_of(cluster, level, a.mb) for level in a.levels}
    rates: dict[str, list[float]] = {level: [] for level in a.levels}
    for trainer in trainers.values():  # compiles
        trainer.fit(given, steps=20, batch_size=128, progress=False)
    for _ in range(a.rounds):
        for level, trainer in trainers.items():
            rates[level].append(rate(trainer, given, a.seconds))
    for level, found in rates.items():
        base = rates.get("checkpoint", found)
        share = statistics.median(x / y for x, y in zip(found, base, strict=True))
        lost = {}
        if a.lose and level != "checkpoint":
            lost = lose(trainer_of(cluster, level, a.mb), cluster, given)
        measure.emit(
            "durability",
            level=level,
            mb=a.mb,
            steps_per_s=round(statistics.median(found), 1),
            rounds=[round(x, 1) for x in found],
            of_checkpoint=round(share, 3),
            **lost,
        )


if __name__ == "__main__":
    main()
