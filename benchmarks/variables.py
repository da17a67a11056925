"""Steps of many small variables: ``python -m benchmarks.variables --layers 8 24``.

A transformer so narrow that it computes next to nothing: what is measured is the cost
of its variables, 305 of 8 layers and 881 of 24 with the optimizer's. A loop of plain
``jax.jit`` takes turns with ``jg.Local()`` and with a cluster of ``--ps`` and one
worker, without and with ``prefetch=1``. ``ratio`` is of steps per second, to those of
plain JAX: the median over pairs of neighbouring rounds. ``cpu_us`` is the least CPU
time of a step, of the loop of plain JAX and of each task, with what a ``fit`` begins
and ends with: on a busy machine only that can be compared. Prints one JSON line for
each number of layers.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

import jgraph as jg
from benchmarks import measure
from benchmarks.models import narrow_transformer as model
from benchmarks.on_cluster import Training
from benchmarks.train import RATE, ByHand, timed

WARM_UP = 20


def plain_loop(layers: int, data: Any) -> Callable[[int], None]:
    """Returns a loop of one jitted call on the leaves of the state, donated.

    Flax's own tree of the state would cost more than the step.
    """
    by_hand = ByHand(model.Narrow(layers), data, model.BATCH)
    leaves, tree = jax.tree.flatten(by_hand.state)

    def step(leaves: list[Any], batch: Any) -> tuple[Any, list[Any]]:
        value, state = by_hand.function(jax.tree.unflatten(tree, leaves), batch)
        return value, jax.tree.leaves(state)

    by_hand.state, by_hand.step = leaves, jax.jit(step, donate_argnums=0)
    return by_hand.run


def measure_layers(
    a: argparse.Namespace, layers: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Returns steps per second of each way, round by round, and CPU us of a step."""
    data = model.make_data()
    cpu: defaultdict[str, list[float]] = defaultdict(list)
    with jg.LocalCluster(ps=a.ps, workers=1) as cluster:
        local, remote, ahead = (
            jg.Trainer(
                model.make_model(layers),
                model.loss_fn,
                optax.adam(RATE),
                strategy=strategy,
                cluster=where,
            )
            for strategy, where in (
                (jg.Local(), None),
                (jg.AsyncPS(), cluster),
                (jg.AsyncPS(prefetch=1), cluster),
            )
        )

        def in_process(steps: int) -> None:
            local.fit(data, steps=steps, batch_size=model.BATCH, progress=False)

        def on_cluster(way: str, trainer: jg.Trainer) -> Callable[[], float]:
            training = Training(cluster, trainer, data, model.BATCH)
            training.run(1, WARM_UP)

            def run() -> float:
                before = training.cpu_seconds()
                rates = measure.rates(training.run(1, a.steps))
                for task, seconds in training.cpu_seconds().items():
                    cpu[f"{way} {task}"].append(seconds - before[task])
                return rates.steps_per_s

            return run

        loop = timed(plain_loop(layers, data), a.steps, WARM_UP)

        def plain() -> float:
            began = time.process_time()
            step_s = loop()
            cpu["plain"].append(time.process_time() - began)
            return step_s

        in_turn = timed(in_process, a.steps, WARM_UP)
        found = measure.take_turns(
            {
                "plain": lambda: 1 / plain(),
                "local": lambda: 1 / in_turn(),
                "cluster": on_cluster("cluster", remote),
                "prefetch": on_cluster("prefetch", ahead),
            },
            a.rounds,
        )
        least = {name: round(min(s) / a.steps * 1e6) for name, s in cpu.items()}
        return found, least


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", action="store_true", help="only the rows, as JSON")
    a = parser.parse_args(args)
    row = 0
    for layers in a.layers:
        found, cpu = measure_layers(a, layers)
        ratios: dict[str, Any] = {}
        for way in ("cluster", "prefetch", "local"):
            ratio = measure.ratio(f"{way}_ratio", found[way], found["plain"])
            ratios |= ratio
            if a.rows:
                row += 1
                unit = f"{way} to plain jax.jit, steps/s, {layers} layers"
                measure.emit_row(row, ratio[f"{way}_ratio"], unit)
        if a.rows:
            continue
        rates: dict[str, Any] = {}
        for way, values in found.items():
            rates |= measure.spread(f"{way}_steps_per_s", values)
        measure.emit(
            "variables",
            layers=layers,
            variables=model.count(layers),
            ps=a.ps,
            steps=a.steps,
            rounds=a.rounds,
            device=jax.devices()[0].device_kind,
            cpu_us=cpu,
            **rates,
            **ratios,
        )


if __name__ == "__main__":
    main()
