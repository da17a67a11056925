"""What faults cost a training run: ``python -m benchmarks recovery``.

A model with Adam trains on real processes, and saves checkpoints. One JSON line each:

- ``worker``, ``master``: one is killed. Until the next report of the others, and until
  it was there again.
- ``ps``: one is killed. Until the first step after the run went back to its newest
  checkpoint: noticing, starting the process, tracing and compiling anew, restoring.
- ``replica``, ``log``: the same, and the run goes on from the copy, or the log, of it.
- ``goodput``: a random task is killed every 20 s. Updates per second that lasted, over
  those of the same run undisturbed.

``--rows`` prints three rows instead, medians of ``--rounds``: seconds until the next
report after the loss of the master, of a worker, and of a ps, the last from its
checkpoint, a replica and a log.
"""

import argparse
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.state.durability import Durability

MASTER, WORKER, PS = "/job:worker/task:0", "/job:worker/task:1", "/job:ps/task:1"
LOSSES: dict[str, tuple[str, Durability]] = {
    "worker": (WORKER, "checkpoint"),
    "master": (MASTER, "checkpoint"),
    "ps": (PS, "checkpoint"),
    "replica": (PS, "replica"),
    "log": (PS, "log"),
}
LOG = {MASTER: "jgraph.loops", WORKER: "jgraph.recover", PS: "jgraph.recover"}
CASES = (*LOSSES, "goodput")
ROWS = (("master",), ("worker",), ("ps", "replica", "log"))
STRATEGIES = {"async": jg.AsyncPS, "sync": jg.SyncPS}


class Model(nnx.Module):
    """Layers of 1 MB each, and a step that costs little more than moving them."""

    def __init__(self, mb: float) -> None:
        rngs, width = nnx.Rngs(0), 500
        layers = max(1, round(mb / 3))  # Adam keeps two numbers for each
        self.layers = nnx.List(
            [nnx.Linear(width, width, rngs=rngs) for _ in range(layers)]
        )

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def loss(model: Any, batch: Any) -> Any:
    return (model(batch) ** 2).mean()


class Bench:
    """A cluster, a Trainer on it, and the directory of its checkpoints."""

    def __init__(
        self,
        cluster: jg.LocalCluster,
        a: argparse.Namespace,
        durability: Durability = "checkpoint",
    ) -> None:
        self.cluster = cluster
        self.every = a.every
        self.trainer = jg.Trainer(
            *(Model(a.mb), loss, optax.adam(1e-4)),
            cluster=cluster,
            strategy=STRATEGIES[a.strategy](durability=durability),
        )
        self.data = np.ones((64, 500), np.float32)

    def fit(self, directory: Path, callback: Callable[[Any, Any], None]) -> Any:
        """Trains until the callback stops it."""
        return self.trainer.fit(
            self.data,
            steps=10**9,
            batch_size=8,
            checkpoint=jg.Checkpoints(directory, every=self.every),
            callbacks=[callback],
            progress=False,
        )

    def timed(
        self, directory: Path, seconds: float, disturb: Callable[[], None] | None = None
    ) -> float:
        """Returns updates per second over so long, from the first report on."""
        first: list[tuple[float, int]] = []
        last = [(0.0, 0)]
        stop = threading.Event()

        def watch(run: Any, report: Any) -> None:
            now = time.perf_counter()
            last[0] = now, report.step
            if not first:
                first.append(last[0])
                if disturb is not None:
                    threading.Thread(target=disturb, daemon=True).start()
            if now - first[0][0] > seconds and not stop.is_set():
                stop.set()
                run.stop()

        self.fit(directory, watch)
        return (last[0][1] - first[0][1]) / (last[0][0] - first[0][0])


@contextmanager
def told_by_the_run(name: str) -> Iterator[list[float]]:
    """Gives the times of what a log says of a recovery."""

    class Times(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(time.perf_counter())

    found: list[float] = []
    log, handler = logging.getLogger(name), Times(logging.WARNING)
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def lose(bench: Bench, directory: Path, task: str) -> dict[str, Any]:
    """Kills a task when there is a checkpoint; returns what followed."""
    killed: list[float] = []
    went_on: list[float] = []
    back: list[float] = []

    def wait_until_back() -> None:
        bench.cluster.wait_for_tasks(60)
        back.append(time.perf_counter())

    waiting = threading.Thread(target=wait_until_back)
    seen = [0]

    def watch(run: Any, report: Any) -> None:
        now = time.perf_counter()
        if not killed and steps_in(directory):
            bench.cluster.kill(task)
            killed.append(time.perf_counter())
            waiting.start()
        elif killed and not went_on:
            # Some may be on their way: a run that lost its ps has gone back, and one
            # that lost its master has another.
            if task == WORKER or run.recoveries() or (task == MASTER and told):
                went_on.append(now)
                seen[0] = report.step
        elif went_on and back and report.step > seen[0] + 20:
            run.stop()

    with told_by_the_run(LOG[task]) as told:
        run = bench.fit(directory, watch)
    waiting.join()
    return {
        "task": task,
        # Of a ps: until the loss was noticed, and until all was restored.
        "parts_s": [round(at - killed[0], 2) for at in told],
        "went_on_s": round(went_on[0] - killed[0], 2),
        "process_back_s": round(back[0] - killed[0], 2),
        "steps_again": sum(r.again for r in run.recoveries()),
    }


def kills(
    cluster: jg.LocalCluster, every_s: float, seconds: float, seed: int
) -> tuple[Callable[[], None], list[str]]:
    """Returns what kills random tasks, and whom it has killed."""
    chance, done = np.random.default_rng(seed), list[str]()

    def disturb() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() + every_s <= end:
            time.sleep(every_s)
            done.append(chance.choice(cluster.tasks()))
            cluster.kill(done[-1])

    return disturb, done


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--strategy", choices=STRATEGIES, default="async")
    parser.add_argument("--mb", type=float, default=100, help="of state")
    parser.add_argument("--every", type=int, default=50, help="steps per checkpoint")
    parser.add_argument("--seconds", type=float, default=90, help="of goodput")
    parser.add_argument("--kill-every-s", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", action="store_true", help="three rows, as JSON")
    parser.add_argument("--rounds", type=int, default=3, help="of --rows")
    a = parser.parse_args(args)
    if a.rows:
        print_rows(a)
        return
    about = {"strategy": a.strategy, "mb": a.mb, "ps": 2, "workers": 2}
    about["checkpoint_every"] = a.every
    with tempfile.TemporaryDirectory() as root:
        for case in LOSSES:
            if case in a.cases:
                found = measure_loss(a, case, Path(root))
                measure.emit("recovery", case=case, **about, **found)
        if "goodput" in a.cases:
            with jg.LocalCluster(ps=2, workers=2, restarts=100) as cluster:
                found = goodput(Bench(cluster, a), Path(root), a)
            measure.emit("recovery", case="goodput", **about, **found)


def measure_loss(a: argparse.Namespace, case: str, root: Path) -> dict[str, Any]:
    """Loses a task of a cluster that is made for it."""
    task, durability = LOSSES[case]
    env = {"JGRAPH_RECORDS_DIR": str(root / "records")}
    with jg.LocalCluster(ps=2, workers=2, restarts=5, env=env) as cluster:
        return lose(Bench(cluster, a, durability), root / case, task)


def print_rows(a: argparse.Namespace) -> None:
    """Prints a row for the loss of each kind of task."""
    for number, cases in enumerate(ROWS, 1):
        figures = []
        for case in cases:
            seconds = []
            for _ in range(a.rounds):
                with tempfile.TemporaryDirectory() as root:
                    seconds.append(measure_loss(a, case, Path(root))["went_on_s"])
            figures.append(statistics.median(seconds))
        measure.emit_row(number, figures if len(figures) > 1 else figures[0], "s")


def goodput(bench: Bench, root: Path, a: argparse.Namespace) -> dict[str, Any]:
    """Returns what lasted of the work under kills, beside the same run without."""
    calm = bench.timed(root / "calm", a.seconds)
    disturb, killed = kills(bench.cluster, a.kill_every_s, a.seconds, a.seed)
    rough = bench.timed(root / "rough", a.seconds, disturb)
    return {
        "kill_every_s": a.kill_every_s,
        "seed": a.seed,
        "killed": killed,
        "seconds": a.seconds,
        "undisturbed_per_s": round(calm, 2),
        "disturbed_per_s": round(rough, 2),
        "goodput": round(rough / calm, 3),
    }


if __name__ == "__main__":
    main()
