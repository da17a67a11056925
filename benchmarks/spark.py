"""What a cluster on Spark costs, and what it leaves: ``python -m benchmarks spark``.

One JSON line each; ``--rows`` prints them as rows of a table, in this order.

- ``ready``: seconds until ``jg.SparkCluster`` serves in a session that has slots, and
  ``jg.LocalCluster`` of as many tasks in turns with it.
- ``reading``: the share of a step that reading takes: steps per second with
  ``jg.Source.spark`` beside those with the same examples as arrays, in turns: with
  more of them than a worker keeps decoded, and with fewer.
- ``executor``: seconds from the kill of an executor until its run goes on, with the
  longer of a worker and a ps on it; exactly-once is counted.
- ``left``: the longest time until no process is left after the driver is killed, after
  ``spark.stop()`` inside the block, and after the kill of a Python worker.
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import psutil
from flax import nnx

import jgraph as jg
from benchmarks import measure
from tests.support.spark_driver import Facts, facts_of, spark_home, start

UNITS = {"ready": "s", "reading": "of a step", "executor": "s", "left": "s"}
WIDTH, BATCH = 256, 128
SIZES = {"": 131_072, "_kept": 16_384}
"""Rows of 1 KiB: more than a worker keeps of row groups (64 MiB), and less."""
END_S = 30.0


@contextmanager
def session(master: str) -> Iterator[Any]:
    """A session without a page of its own."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    for key in ("spark.ui.enabled", "spark.ui.showConsoleProgress"):
        builder = builder.config(key, "false")
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def seconds_of(make: Callable[[], Any]) -> float:
    """Seconds until a cluster of a ps and two workers is there; ends it."""
    began = time.monotonic()
    with make():
        return time.monotonic() - began


def ready(rounds: int) -> dict[str, Any]:
    """See above."""
    with session("local[3]") as spark:
        spark.range(3).count()  # the slots are there, and what runs in them is loaded
        on_spark = lambda: jg.SparkCluster(spark, ps=1, workers=2)
        here = lambda: jg.LocalCluster(ps=1, workers=2, tls=True)
        pairs = [(seconds_of(on_spark), seconds_of(here)) for _ in range(rounds)]
    spark_s, local_s = (statistics.median(one) for one in zip(*pairs, strict=True))
    return {"ready_s": round(spark_s, 3), "local_cluster_s": round(local_s, 3)}


class Model(nnx.Module):
    """A network of a few milliseconds a step."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def loss(model: Model, batch: Any) -> Any:
    return ((model(batch["x"]) - 1) ** 2).mean()


def rate(cluster: Any, data: Any, steps: int) -> float:
    """Steps per second of a run, the first tenth left out."""
    with jg.Trainer(Model(), loss, optax.sgd(1e-4), cluster=cluster) as trainer:
        run = trainer.fit(data, steps=steps, batch_size=BATCH, progress=False)
        seconds = np.sort(run.metrics("loss")["seconds"])[steps // 10 :]
    return float(len(seconds) / (seconds[-1] - seconds[0]))


def reading(rounds: int, steps: int) -> dict[str, Any]:
    """See above."""
    from pyspark.sql import functions

    found: dict[str, Any] = {}
    with session("local[3]") as spark:
        numbers = [functions.rand(seed).cast("float") for seed in range(WIDTH)]
        for name, rows in SIZES.items():
            frame = spark.range(0, rows, 1, 8).select(
                functions.array(*numbers).alias("x")
            )
            files = jg.Source.spark(frame)
            arrays = {"x": np.random.default_rng(0).random((rows, WIDTH), np.float32)}
            with jg.SparkCluster(spark, ps=1, workers=2) as cluster:
                ways = {"files": files, "arrays": arrays}
                turns = {n: partial(rate, cluster, d, steps) for n, d in ways.items()}
                rate(cluster, files, steps // 4)
                rates = measure.take_turns(turns, 2 * rounds)
            pairs = zip(rates["files"], rates["arrays"], strict=True)
            shares = [1 - of_files / of_arrays for of_files, of_arrays in pairs]
            found |= measure.interval(f"share{name}", shares)
            for way in ways:
                found |= measure.spread(f"{way}{name}_steps_per_s", rates[way])
    return found


def seen(master: str, *scenarios: str) -> Facts:
    """What scenarios of the tests have seen, by name."""
    with tempfile.TemporaryDirectory() as directory:
        home = spark_home(Path(directory))
        with start(Path(directory), master, *scenarios, spark_home=home) as process:
            return facts_of(process, Path(directory))


def executor(rounds: int) -> dict[str, Any]:
    """See above."""
    found = [
        seen("local-cluster[4,1,1024]", "executors")["executors"] for _ in range(rounds)
    ]
    longest = [max(one["back_s"].values()) for one in found]
    return {
        "goes_on_s": round(statistics.median(longest), 3),
        "batches_again": [one["again"] for one in found],
        "of_tasks_s": [one["back_s"] for one in found],
    }


def killed_driver_s() -> float:
    """Seconds until no process of a killed driver, or of its servers, is left."""
    with (
        tempfile.TemporaryDirectory() as directory,
        start(Path(directory), "local[2]", "leave_open") as process,
    ):
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        family = [psutil.Process(p) for p in facts["servers"] + facts["family"]]
        process.kill()
        began = time.monotonic()
        _, alive = psutil.wait_procs(family, timeout=END_S)
    return float("inf") if alive else time.monotonic() - began


def left(rounds: int) -> dict[str, Any]:
    """See above."""
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        facts = seen("local[3]", "train", "stop_inside")
        worker_s = facts["train"]["server_outlives_its_spark_task_s"]
        stop_s = facts["stop_inside"]["left_s"]
        case = {"worker": worker_s, "stop": stop_s, "driver": killed_driver_s()}
        found.append(case)
    longest = [max(one.values()) for one in found]
    medians = {
        k: round(statistics.median(one[k] for one in found), 3) for k in found[0]
    }
    return {"longest_s": round(max(longest), 3), "median_s": medians}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=[*UNITS], default=[*UNITS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", action="store_true", help="rows of a table")
    a = parser.parse_args()
    if shutil.which("java") is None:
        sys.exit("needs Java: apt-get install default-jre-headless")
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "ready": lambda: ready(a.rounds),
        "reading": lambda: reading(a.rounds, a.steps),
        "executor": lambda: executor(a.rounds),
        "left": lambda: left(a.rounds),
    }
    for number, (name, case) in enumerate(cases.items(), 1):
        if name not in a.cases:
            continue
        figures = case()
        if a.rows:
            value, *_ = figures.values()
            measure.emit_row(number, value, UNITS[name], case=name, **figures)
        else:
            measure.emit("spark", case=name, rounds=a.rounds, **figures)


if __name__ == "__main__":
    main()
