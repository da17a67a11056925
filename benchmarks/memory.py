"""Peak memory of a ps beside the bytes it must hold: ``python -m benchmarks.memory``.

One ps, one worker, an MLP of about 100 MB trained with adam. Prints one JSON line:
``ratio`` is (peak - 250 MB) / (bytes of variables and optimizer state). The peak is of
what is resident, where every page counts that the process maps: all of what it and the
worker have in common too, which are libraries and tensors on their way. In the share,
looked at ten times a second, such a page counts for each as its part of it.

``--rows-table 4000000`` trains a table of so many rows, with Adam about 1 GB, instead:
the peak of each phase (init, training with saves, restore), and of a ps that takes the
place of one that was killed, from a replica and from a log.
"""

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure
from benchmarks.models.mlp import MLP, loss_fn, make_data
from jgraph.train.state.durability import Durability

BASE_MB = 250
_EVERY_S = 0.1


def run(width: int, steps: int) -> None:
    """Trains an MLP with two hidden layers of ``width``."""
    with jg.LocalCluster(ps=1, workers=1) as cluster:
        (ps,) = cluster.tasks("ps")
        idle = measure.peak_mb(cluster.pid(ps))
        model = MLP((784, width, width, 10), rngs=nnx.Rngs(0))
        trainer = jg.Trainer(model, loss_fn, optax.adam(1e-4), cluster=cluster)
        data = make_data(512)
        with Share(cluster.pid(ps)) as share:
            trainer.fit(data, steps=steps, batch_size=64, progress=False)
        status = next(t for t in cluster.status().tasks if t.task == ps)
        held = status.variable_bytes / 1e6
        peak = measure.peak_mb(cluster.pid(ps))
        measure.emit(
            "memory",
            variables_mb=round(held, 1),
            ps_idle_mb=idle,
            ps_peak_mb=peak,
            ps_peak_share_mb=share.peak_mb,
            ratio=round((peak - BASE_MB) / held, 2),
            share_ratio=round((share.peak_mb - BASE_MB) / held, 2),
            steps=steps,
        )


def run_table(rows: int, width: int = 20) -> None:
    """Trains a table with Adam, saves it, restores it, and loses its ps."""
    for durability in ("checkpoint", "replica", "log"):
        count = 2 if durability == "replica" else 1
        with tempfile.TemporaryDirectory() as directory:
            logs = {"JGRAPH_RECORDS_DIR": directory}
            with jg.LocalCluster(ps=count, workers=1, restarts=2, env=logs) as cluster:
                checkpoints = Path(directory, "checkpoints")
                _table_phases(cluster, durability, checkpoints, rows * count, width)


def _table_phases(
    cluster: jg.LocalCluster,
    durability: Durability,
    directory: Path,
    rows: int,
    width: int,
) -> None:
    ps = cluster.tasks("ps")[-1]

    def trainer() -> jg.Trainer:
        return jg.Trainer(
            *(TableModel(rows, width), table_loss, optax.adam(1e-3)),
            cluster=cluster,
            sparse="lazy",
            strategy=jg.AsyncPS(durability=durability),
        )

    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, (4096, 8), np.int32)
    first = trainer()

    def fit(steps: int, callback: Callable[..., None] = lambda *_: None) -> None:
        first.fit(
            (ids, np.ones(len(ids), np.float32)),
            steps=steps,
            batch_size=64,
            progress=False,
            checkpoint=jg.Checkpoints(directory, every=100),
            callbacks=[callback],
        )

    peaks = Peaks(cluster, ps, durability)
    fit(1)
    peaks.end("init")
    fit(300)
    peaks.end("train and save")
    if durability == "checkpoint":
        first.restore(directory)
        peaks.end("restore into its memory")
        first.close()
        other = trainer().restore(directory)
        peaks.end("restore into a new Trainer")
        other.close()
        return
    killed: list[int] = []

    def kill(run: Any, report: Any) -> None:
        if not killed:
            killed.append(cluster.pid(ps))
            cluster.kill(ps)

    fit(600, kill)
    peaks.end("take-over")


class TableModel(nnx.Module):
    """Rows of a table, and one layer."""

    def __init__(self, rows: int, width: int) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(rows, width, rngs=rngs)
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.out(self.table(ids).mean(axis=1))[:, 0]


def table_loss(model: Any, batch: Any) -> Any:
    ids, wanted = batch
    return ((model(ids) - wanted) ** 2).mean()


@final
class Peaks:
    """The peak of what is resident of a task, by phase; one line for each."""

    def __init__(self, cluster: jg.LocalCluster, task: str, durability: str) -> None:
        self._cluster = cluster
        self._task = task
        self._durability = durability
        self._state = 0.0
        measure.forget_peak(cluster.pid(task))

    def end(self, phase: str) -> None:
        """Ends a phase."""
        pid = self._cluster.pid(self._task)
        status = next(t for t in self._cluster.status().tasks if t.task == self._task)
        # A copy that began after a loss goes with the run; it was as large.
        self._state = max(self._state, status.variable_bytes / 1e6)
        state, peak = self._state, measure.peak_mb(pid)
        measure.emit(
            "memory",
            phase=phase,
            durability=self._durability,
            state_mb=round(state, 1),
            peak_mb=peak,
            ratio=round((peak - 300) / state, 2),
        )
        measure.forget_peak(pid)


@final
class Share:
    """Watches the share of memory that a process has, while a block runs.

    Attributes:
      peak_mb: the most that was seen.
    """

    def __init__(self, pid: int) -> None:
        self.peak_mb = 0.0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._ended.wait(_EVERY_S)
            self.peak_mb = max(self.peak_mb, measure.share_mb(self._pid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--width", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows-table", type=int, metavar="ROWS")
    arguments = parser.parse_args(args)
    if arguments.rows_table:
        run_table(arguments.rows_table)
    else:
        run(arguments.width, arguments.steps)


if __name__ == "__main__":
    main()
