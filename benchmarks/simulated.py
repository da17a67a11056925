"""Clusters that are not here: ``python -m benchmarks simulated [--rows] [--only 2 4]``.

Each figure is made by the machines that decide in a cluster, at true counts, and by the
costs that calibration measured (``docs/scale.md``). Nothing of it was measured on such
a cluster. One JSON line for each row of the table:

2. 100 workers and 17 ps, Inception-v3 as planned (95 MB), 2.8 s of computing (on K40s),
   10 Gbit/s: synchronous steps/s of all over those of one; beside it with 34 and 100
   ps, with 17 and 100 and 104 workers of which an update takes 100, and asynchronous.
3. 8 and 512 workers with as many ps, VGG-16 as planned (553 MB), 0.6 s (on P100s), 25
   Gbit/s: share of the time that a worker computes; beside it ResNet-50 (102 MB), 0.29
   s. Their bytes are spread evenly, as by a partitioner.
4. A scalar, 16 ps: an update of 100 workers over one of 1 worker.
5. 100 MB, 16 ps: the same, 24 workers reading at a time; beside it all at once.
6. 50 workers and backup workers: how many make updates shortest, and how many are best
   for each worker, of 20 seeds.
7. 10,000 workers and 16 ps: CPU time of the machines of the busiest task per update, by
   themselves (``benchmarks machines``). The first ps has all of them.
8. 10,000 workers, 1,000 ps, 100 updates: how long the simulation takes.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import machines, measure
from benchmarks.models import resnet50, vgg16
from jgraph.examples import inception
from jgraph.plan.traffic import StepTraffic
from jgraph.testing import Computing, Costs, dense_step, load_costs, simulate
from jgraph.testing.scale.simulate import Mode, Simulated

_INCEPTION: Final = 95_000_000
_SEEDS: Final = 20
# Chosen so that updates without a backup worker and with four take about as long as was
# published, 2.2 and 1.93 s, of five choices that were tried.
_STRAGGLERS: Final = Computing(1.4, sigma=0.02, straggling=0.07, delay_s=0.3)


def costs(gbit: float) -> Costs:
    """Returns the calibrated costs, on a network of so many Gbit/s."""
    return load_costs().on_network(gbit * 1e9 / 8, latency_s=50e-6)


def as_planned(
    model: Any, loss: Any, tx: Any, batch: Any, batch_size: int
) -> StepTraffic:
    """Returns what a step of a model reads and sends, in the pieces of its plan."""
    with jg.LocalCluster(ps=1, workers=1) as cluster:
        trainer = jg.Trainer(model, loss, tx, cluster=cluster, strategy=jg.SyncPS())
        step = trainer.plan(batch, batch_size=batch_size).traffic()
    return replace(dense_step(step.read, variables=512), pieces=step.pieces)


def speedup(figures: dict[str, Any]) -> float:
    """Row 2."""
    model = inception.Inception(1000, auxiliary=False, rngs=nnx.Rngs(0))
    pictures = np.zeros(
        (inception.BATCH_SIZE, inception.SIZE, inception.SIZE, 3), np.float32
    )
    batch = {"image": pictures, "label": np.zeros(inception.BATCH_SIZE, np.int32)}
    tx = inception.rmsprop(1_000)
    step = as_planned(model, inception.loss_fn, tx, batch, inception.BATCH_SIZE)
    figures["pieces"] = len(step.pieces)

    def of(mode: Mode, ps: int, backup_workers: int = 0) -> float:
        one, many = (
            simulate(
                step,
                workers=workers,
                ps=ps,
                mode=mode,
                steps=100,
                backup_workers=backups,
                computing=Computing(2.8, sigma=0.05),
                costs=costs(10),
            ).steps_per_s
            for workers, backups in ((1, 0), (100 + backup_workers, backup_workers))
        )
        return round(many / one, 1)

    figures["sync_34_ps"], figures["sync_100_ps"] = of("sync", 34), of("sync", 100)
    figures["sync_17_ps_4_backups"] = of("sync", 17, backup_workers=4)
    figures["sync_100_ps_4_backups"] = of("sync", 100, backup_workers=4)
    figures["async"] = of("async", 17)
    return of("sync", 17)


def efficiency(figures: dict[str, Any]) -> list[float]:
    """Row 3."""
    figures["resnet50"] = shares(resnet50, resnet50.ResNet50, 0.29, {})
    return shares(vgg16, vgg16.Vgg16, 0.6, figures)


def shares(
    work: Any, model: Callable[..., Any], computing_s: float, figures: dict[str, Any]
) -> list[float]:
    """Returns which share of the time 8 and 512 workers of a model compute."""
    tx, batch = optax.sgd(0.1), work.examples()
    step = as_planned(model(rngs=nnx.Rngs(0)), work.loss_fn, tx, batch, work.BATCH)
    figures["pieces"] = len(step.pieces)
    found = []
    for workers in (8, 512):
        run = simulate(
            step,
            workers=workers,
            ps=workers,
            steps=10,
            computing=Computing(computing_s),
            costs=costs(25),
        )
        found.append(round(computing_s * run.steps_per_s / workers, 3))
        figures[f"busy_{workers}"] = rounded(run.busy)
    return found


def growth(
    nbytes: int, variables: int, max_readers: int | None = None
) -> Callable[[dict[str, Any]], float]:
    """Rows 4 and 5."""

    def update_s(workers: int, readers: int | None = None) -> float:
        return simulate(
            dense_step(nbytes, variables),
            workers=workers,
            ps=16,
            steps=100,
            computing=Computing(0.0),
            costs=costs(10),
            max_readers=readers,
        ).step_s["p50"]

    def row(figures: dict[str, Any]) -> float:
        one, many = update_s(1), update_s(100)
        figures["ms"] = [round(1e3 * one, 2), round(1e3 * many, 2)]
        if max_readers is None:
            return round(many / one, 2)
        figures["at_once"] = round(many / one, 2)
        in_turn = update_s(100, max_readers)
        figures["ms"].append(round(1e3 * in_turn, 2))
        return round(in_turn / one, 2)

    return row


def backups(figures: dict[str, Any]) -> list[int]:
    """Row 6."""
    updates: dict[int, float] = {}
    for count in range(7):
        found = [
            simulate(
                dense_step(_INCEPTION, variables=378),
                workers=50 + count,
                ps=17,
                steps=20,
                backup_workers=count,
                computing=_STRAGGLERS,
                costs=costs(10),
                seed=seed,
            ).step_s["p50"]
            for seed in range(_SEEDS)
        ]
        updates[count] = statistics.median(found)
    each = {b: updates[0] / s * 50 / (50 + b) for b, s in updates.items()}
    figures["update_s"] = [round(s, 3) for s in updates.values()]
    figures["per_worker"] = [round(s, 3) for s in each.values()]
    return [min(updates, key=updates.__getitem__), max(each, key=each.__getitem__)]


def large(ps: int, updates: int) -> tuple[Simulated, float]:
    """Returns a run of 10,000 workers, and how long its simulation took."""
    began = time.process_time()
    found = simulate(
        dense_step(_INCEPTION, variables=ps),
        workers=10_000,
        ps=ps,
        steps=updates,
        computing=Computing(2.8, sigma=0.05),
        costs=costs(10),
    )
    return found, time.process_time() - began


def busiest(figures: dict[str, Any]) -> float:
    """Row 7."""
    figures["ms"] = found = machines.update_ms(workers=10_000, ps=16)
    return round(sum(found.values()), 1)


def largest(figures: dict[str, Any]) -> float:
    """Row 8."""
    found, seconds = large(ps=1_000, updates=100)
    figures["steps_per_s"] = round(found.steps_per_s)
    return round(seconds)


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Returns figures as one reads them."""
    return {name: round(x, 2) for name, x in figures.items()}


ROWS: Final[Mapping[int, tuple[Callable[[dict[str, Any]], Any], str]]] = {
    2: (speedup, "x"),
    3: (efficiency, "share of the time"),
    4: (growth(64, variables=16), "x"),
    5: (growth(100_000_000, variables=64, max_readers=24), "x"),
    6: (backups, "backup workers"),
    7: (busiest, "ms of CPU"),
    8: (largest, "s of CPU"),
}


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--rows", action="store_true", help="only rows of the table")
    parser.add_argument("--only", type=int, nargs="+", default=sorted(ROWS))
    a = parser.parse_args(args)
    for number in a.only:
        row, unit = ROWS[number]
        figures: dict[str, Any] = {}
        value = row(figures)
        if a.rows:
            measure.emit_row(number, value, unit, kind="simulated", **figures)
        else:
            measure.emit("simulated", row=number, value=value, unit=unit, **figures)


if __name__ == "__main__":
    main()
