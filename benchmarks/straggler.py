"""One slow worker in synchronous training: ``python -m benchmarks.straggler``.

Every worker's step has a fixed wait in place of computing; the last worker's is longer.
One JSON line: milliseconds of a step without a slow worker, with one that is waited
for, and with one that a backup worker stands in for. The three take turns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure
from jgraph.client.cluster import Cluster
from jgraph.clock import SystemClock
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.state.placement import new_container
from jgraph.train.state.runner import Order
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.strategies import arrangement_on
from jgraph.train.strategies.sync_runner import SyncPS, SyncRunner


class Model(nnx.Module):
    """One weight vector: what a step computes is negligible beside the wait."""

    def __init__(self, values: int) -> None:
        self.weights = nnx.Param(jnp.zeros(values))


def loss(model: Any, batch: Any) -> Any:
    return (model.weights[...] ** 2).sum() + batch.mean()


def training(
    cluster: Cluster, backups: int, waits: Mapping[int, float], values: int
) -> Callable[[int], float]:
    """Returns what trains for some steps and returns the milliseconds of one."""
    strategy = SyncPS(backup_workers=backups)
    step = TrainStep(
        adapt(Model(values), loss, seed=0),
        optax.sgd(0.1),
        arrangement=arrangement_on(cluster, strategy),
        container=new_container(),
    )
    runner = SyncRunner(step, cluster, strategy)
    runner.compute_wait_s = waits
    data = as_dataset(np.ones((64, 1), np.float32))
    clock = SystemClock()

    def run(steps: int) -> float:
        order = Order(data, steps, 1, 0, report_every_s=0.05)
        began, ends = clock.now(), [0.0]
        for chunk in runner.run(order):
            ends.extend(chunk.seconds)
        assert ends[-1] <= clock.now() - began
        return (ends[-1] - ends[1]) / (len(ends) - 2) * 1e3

    run(3)
    return run


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--wait-ms", type=float, default=20, help="of every worker")
    parser.add_argument("--slow-ms", type=float, default=100, help="more, of the last")
    parser.add_argument("--mb", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args(args)
    usual = dict.fromkeys(range(a.workers), a.wait_ms / 1e3)
    slow = {**usual, a.workers - 1: (a.wait_ms + a.slow_ms) / 1e3}
    values = int(a.mb * 1e6 / 4)
    with jg.LocalCluster(ps=1, workers=a.workers) as cluster:
        ways = {
            "even": training(cluster, 1, usual, values),
            "waited_for": training(cluster, 0, slow, values),
            "backup": training(cluster, 1, slow, values),
        }
        turns = {name: (lambda run=run: run(a.steps)) for name, run in ways.items()}
        found = measure.take_turns(turns, a.rounds)
    figures: dict[str, Any] = {}
    for name, times in found.items():
        figures |= measure.spread(f"{name}_ms", times)
    measure.emit(
        "straggler",
        workers=a.workers,
        wait_ms=a.wait_ms,
        slow_ms=a.slow_ms,
        mb=a.mb,
        steps=a.steps,
        rounds=a.rounds,
        **figures,
        **measure.ratio("backup_over_even", found["backup"], found["even"]),
    )


if __name__ == "__main__":
    main()
