"""What a cluster on Spark costs, and what it leaves: ``python -m benchmarks spark``.

One JSON line each; ``--rows`` prints them as rows of a table, in this order.

- ``ready``: seconds until ``jg.SparkCluster`` serves in a session that has slots, and
  ``jg.LocalCluster`` of as many tasks in turns with it.
- ``reading``: the share of a step that reading takes: the time that loops wait for
  batches, and all time that their tasks read on a core, whether a step waited or not,
  of the time of the steps. The files are those of ``jg.Source.spark``: more than a
  worker keeps decoded, in the first epoch; fewer; and as many in one row group, as
  written elsewhere. The same examples as arrays in turns.
- ``executor``: seconds from the kill of an executor until its run goes on, with the
  longer of a worker and a ps on it; exactly-once is counted.
- ``left``: the longest time until no process is left after the driver is killed, after
  ``spark.stop()`` inside the block, and after the kill of a Python worker; and seconds
  until a server that is killed serves again, in its task.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from flax import nnx

import jgraph as jg
from benchmarks import measure
from tests.support.spark_driver import Facts, facts_of, spark_home, start

UNITS = {"ready": "s", "reading": "of a step", "executor": "s", "left": "s"}
WIDTH, BATCH = 256, 128
SIZES = {"": 131_072, "_kept": 16_384, "_one_group": 131_072}
"""Rows of 1 KiB: more than a worker keeps of row groups (64 MiB), and less."""
END_S = 30.0


@contextmanager
def session(master: str) -> Iterator[Any]:
    """A session without a page of its own."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable  # which has what packs lists
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


@dataclass(frozen=True, slots=True)
class Reading:
    """What a run of some steps had to do with its input.

    Attributes:
      steps_per_s: of all workers.
      waited: share of the steps' time in which a loop waited for a batch.
      read: reading on a core, as a share of the steps' time.
    """

    steps_per_s: float
    waited: float
    read: float


def read_on_a_core(cluster: Any) -> float:
    """Seconds that tasks of a cluster have read examples."""
    tasks = cluster.status().tasks
    return float(sum(task.busy_s.get("read", 0.0) for task in tasks))


def reading_of(cluster: Any, data: Any, steps: int) -> Reading:
    """Trains, and looks at where the time of the workers went."""
    workers = cluster.tasks("worker")
    before = read_on_a_core(cluster)
    with jg.Trainer(Model(), loss, optax.sgd(1e-4), cluster=cluster) as trainer:
        run = trainer.fit(data, steps=steps, batch_size=BATCH, progress=False)
        parts = [one.seconds for one in run.profile().replicas]
        seconds = np.sort(run.metrics("loss")["seconds"])[steps // 10 :]
    total = sum(sum(one.values()) for one in parts)
    waited = sum(one.get("input", 0.0) for one in parts)
    assert len(parts) == len(workers)
    return Reading(
        float(len(seconds) / (seconds[-1] - seconds[0])),
        waited / total,
        (read_on_a_core(cluster) - before) / total,
    )


def reading(rounds: int, steps: int) -> dict[str, Any]:
    """See above."""
    found: dict[str, Any] = {}
    with session("local[3]") as spark, tempfile.TemporaryDirectory() as directory:
        for name, rows in SIZES.items():
            x = np.random.default_rng(0).random((rows, WIDTH), np.float32)
            ends = np.arange(rows + 1, dtype=np.int32) * WIDTH
            table = pa.table({"x": pa.ListArray.from_arrays(ends, x.reshape(-1))})
            if name == "_one_group":
                pq.write_table(table, f"{directory}/x.parquet", row_group_size=rows)
                files = jg.Source.parquet(f"{directory}/x.parquet")
            else:
                files = jg.Source.spark(spark.createDataFrame(table).repartition(8))
            ways = {"files": files, "arrays": {"x": x}}
            with jg.SparkCluster(spark, ps=1, workers=2) as cluster:
                turns = {
                    way: partial(reading_of, cluster, data, steps)
                    for way, data in ways.items()
                }
                reading_of(cluster, files, steps // 4)
                took = measure.take_turns(turns, rounds)
            shares = [one.waited + one.read for one in took["files"]]
            found |= measure.interval(f"share{name}", shares)
            for way in ways:
                waited = statistics.median(one.waited for one in took[way])
                read = statistics.median(one.read for one in took[way])
                found |= {f"{way}{name}_waited": round(waited, 4)}
                found |= {f"{way}{name}_read_on_a_core": round(read, 4)}
                rates = [one.steps_per_s for one in took[way]]
                found |= measure.spread(f"{way}{name}_steps_per_s", rates)
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
    back_s: list[float] = []
    for _ in range(rounds):
        facts = seen("local[3]", "train", "stop_inside")
        back_s.append(facts["train"]["back_s"])
        worker_s = facts["train"]["server_outlives_its_spark_task_s"]
        stop_s = facts["stop_inside"]["left_s"]
        case = {"worker": worker_s, "stop": stop_s, "driver": killed_driver_s()}
        found.append(case)
    longest = [max(one.values()) for one in found]
    medians = {
        k: round(statistics.median(one[k] for one in found), 3) for k in found[0]
    }
    back = measure.spread("server_back_s", back_s, 2)
    return {"longest_s": round(max(longest), 3), "median_s": medians, **back}


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
