"""Training steps beside plain JAX: ``python -m benchmarks.train --model mlp cnn``.

Without ``--ps`` the Trainer trains in this process, in turns with a ``jax.jit`` loop
written by hand, one JSON line per model; ``python -m benchmarks.train --ps 1 --workers
1 2 4 --baseline`` for clusters, one line per number of workers. What is compared takes
turns in one run; ``ratio`` is the median over pairs of neighbouring rounds.

Data is made up, of the right shapes; ``--data FILE`` takes it from a file: a text for
``lstm`` and ``transformer``, census rows ("adult.data") for ``wide_deep``, ``x`` and
``y`` of ``numpy.savez`` for the others.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure, models
from benchmarks.on_cluster import Training

STRATEGIES: dict[str, Callable[[], Any]] = {
    "AsyncPS": jg.AsyncPS,
    "prefetch": partial(jg.AsyncPS, prefetch=1),
    "SyncPS": jg.SyncPS,
}
RATE = 1e-3


def optimizer(model: str) -> optax.GradientTransformation:
    """Returns Adam; of large tables Adagrad, whose update of touched rows is exact.

    By hand the whole table is updated: both sides then come to the same values.
    """
    return optax.adagrad(RATE) if model == "wide_deep" else optax.adam(RATE)


class ByHand:
    """The loop that a JAX user writes: jit, donated state, batches by index."""

    def __init__(
        self, model: str | models.Work, data: tuple[Any, ...], batch: int
    ) -> None:
        work = models.get(model) if isinstance(model, str) else model
        tx = optimizer(model) if isinstance(model, str) else optax.adam(RATE)
        split: Any = nnx.split(work.make_model(), nnx.Param, ...)
        graphdef, params, rest = split
        state = params, rest, tx.init(params)
        self.state: Any = jax.tree.map(jnp.copy, state)
        self.data, self.batch = data, batch
        self.random, self.order = np.random.default_rng(0), np.empty(0, int)

        def step(state: Any, batch: Any) -> Any:
            params, rest, opt = state

            def loss(params: Any) -> Any:
                model = nnx.merge(graphdef, params, rest, copy=True)
                value = work.loss_fn(model, batch)
                changed: Any = nnx.split(model, nnx.Param, ...)
                return value, changed[2]

            (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, opt = tx.update(grads, opt, params)
            return value, (optax.apply_updates(params, updates), rest, opt)

        self.function = step
        self.step: Any = jax.jit(step, donate_argnums=0)

    def next_batch(self) -> tuple[Any, ...]:
        """Returns examples in a new order for each epoch."""
        if len(self.order) < self.batch:
            self.order = self.random.permutation(len(self.data[0]))
        rows, self.order = np.split(self.order, [self.batch])
        return tuple(field[rows] for field in self.data)

    def run(self, steps: int) -> None:
        losses = []
        for _ in range(steps):
            loss, self.state = self.step(self.state, self.next_batch())
            losses.append(loss)
        jax.block_until_ready(losses)


def on_cluster(
    model: str,
    *,
    ps: int,
    workers: int,
    transport: Literal["auto", "network"] = "auto",
    strategy: str = "AsyncPS",
    batch: int | None = None,
    source: Path | None = None,
) -> Training:
    """Makes a cluster, and a Trainer on it.

    Args:
      model: one of ``models.NAMES``.
      ps: parameter servers.
      workers: all of them train.
      transport: how tensors travel, see ``jg.LocalCluster``.
      strategy: one of ``STRATEGIES``.
      batch: examples of one step; the model's own number if unset.
      source: a file of data; made up if unset.
    """
    work = models.get(model)
    cluster = jg.LocalCluster(ps=ps, workers=workers, transport=transport)
    trainer = jg.Trainer(
        work.make_model(),
        work.loss_fn,
        optimizer(model),
        cluster=cluster,
        strategy=STRATEGIES[strategy](),
    )
    return Training(
        cluster,
        trainer,
        work.make_data(source=source),
        batch or work.BATCH,
        in_step=strategy == "SyncPS",
    )


def measure_local(a: argparse.Namespace, name: str) -> None:
    """Compares the Trainer in this process with a loop by hand."""
    work = models.get(name)
    batch = a.batch_size or work.BATCH
    data = work.make_data(source=a.data)
    by_hand = ByHand(name, data, batch)
    trainer = jg.Trainer(work.make_model(), work.loss_fn, optimizer(name))

    def fit(steps: int) -> None:
        trainer.fit(data, steps=steps, batch_size=batch, progress=False)

    warm_up = min(a.steps, 10)
    times = measure.take_turns(
        {
            "by_hand": timed(by_hand.run, a.steps, warm_up),
            "trainer": timed(fit, a.steps, warm_up),
        },
        a.rounds,
    )
    rates = [1 / seconds for seconds in times["trainer"]]
    measure.emit(
        "train_local",
        model=name,
        batch_size=batch,
        steps=a.steps,
        rounds=a.rounds,
        **measure.spread("by_hand_us", [t * 1e6 for t in times["by_hand"]]),
        **measure.spread("trainer_us", [t * 1e6 for t in times["trainer"]]),
        **measure.ratio("ratio", times["trainer"], times["by_hand"], 4),
        **measure.spread("steps_per_s", rates),
        **measure.spread("examples_per_s", [batch * rate for rate in rates], 0),
        bytes_per_step=0,
        peak_rss_mb={"client": measure.peak_mb(os.getpid())},
        device=jax.devices()[0].device_kind,
    )


def timed(run: Callable[[int], Any], steps: int, warm_up: int) -> Callable[[], float]:
    """Returns what runs ``steps`` steps and gives the seconds of one; warms up."""
    run(warm_up)

    def call() -> float:
        began = time.perf_counter()
        run(steps)
        return (time.perf_counter() - began) / steps

    return call


def measure_cluster(a: argparse.Namespace, name: str, workers: int) -> None:
    """Measures a cluster, and plain JAX in turns with it if asked."""
    with on_cluster(
        name,
        ps=a.ps,
        workers=workers,
        transport=a.transport,
        strategy=a.strategy,
        batch=a.batch_size,
        source=a.data,
    ) as work:
        work.run(workers, min(a.steps, 20))
        ways: dict[str, Callable[[], float | measure.Rates]] = {
            "cluster": partial(measure.rates_of, work.run, workers, a.steps)
        }
        if a.baseline:
            by_hand = ByHand(name, work.data, work.batch)
            ways["plain"] = timed(by_hand.run, a.steps, min(a.steps, 10))
        found = measure.take_turns(ways, a.rounds)
        rates: Any = found["cluster"]
        plain: Any = found.get("plain")
        examples = [r.steps_per_s * work.batch for r in rates]
        beside: dict[str, float] = {}
        if plain is not None:
            alone = [work.batch / seconds for seconds in plain]
            beside = {
                **measure.spread("plain_jax_examples_per_s", alone, 0),
                **measure.ratio("ratio_to_plain_jax", examples, alone),
            }
        measure.emit(
            "train",
            model=name,
            strategy=a.strategy,
            transport=a.transport,
            ps=a.ps,
            workers=workers,
            batch_size=work.batch,
            steps=a.steps,
            rounds=a.rounds,
            **measure.rate_figures(rates),
            **measure.spread("examples_per_s", examples, 0),
            **beside,
            bytes_per_step=work.bytes_per_step,
            peak_rss_mb=work.peaks(),
        )


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=models.NAMES, default=["mlp"])
    parser.add_argument("--ps", type=int, default=0, help="0: train in this process")
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="AsyncPS")
    parser.add_argument("--transport", choices=["auto", "network"], default="auto")
    parser.add_argument("--baseline", action="store_true", help="plain JAX as well")
    parser.add_argument("--batch-size", type=int, help="the model's own if unset")
    parser.add_argument("--data", type=Path, metavar="FILE", help="made up if unset")
    parser.add_argument("--steps", type=int, default=200, help="of each worker a round")
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args(args)
    for name in a.model:
        if a.ps == 0:
            measure_local(a, name)
            continue
        for workers in a.workers:
            measure_cluster(a, name, workers)


if __name__ == "__main__":
    main()
