"""A large embedding on parameter servers: a worker pulls and pushes only its rows.

Run: ``python -m benchmarks.embedding --rows 1000000 --dim 64 --batch 512 --ids 26 --ps
1 --workers 1``. A plain ``nnx`` model and ``jg.Trainer``: every example has ``--ids``
ids, all of one table; their rows, side by side, go through a dense net of 256 hidden
units to one logit. Adagrad for all. Prints one JSON line for each number of rows, which
take turns: ``step_ms_ratio`` is the time of a step over that with the first number.
With ``--peer`` TensorFlow's between-graph parameter servers take turns with the first
number too (needs ``make peers``).
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure
from benchmarks.null_step import configuration
from benchmarks.on_cluster import Training
from benchmarks.peer_process import Peer

HIDDEN, RATE, BATCHES = 256, 0.01, 20
PEER = ["tensorflow_ps"]


class Model(nnx.Module):
    """Rows of one table, side by side, through a dense net to one logit."""

    def __init__(self, a: Any, rows: int) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(rows, a.dim, rngs=rngs)
        self.hidden = nnx.Linear(a.ids * a.dim, HIDDEN, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.table(ids).reshape(len(ids), -1)
        return self.last(nnx.relu(self.hidden(x)))[:, 0]


def loss_fn(model: Any, batch: Any) -> Any:
    """Returns the mean logistic loss of a batch."""
    ids, labels = batch
    logits = model(ids)
    return jnp.mean(jax.nn.softplus(logits) - labels * logits)


def training(a: Any, rows: int) -> Training:
    """Makes a cluster, and a Trainer of a table of ``rows`` on it."""

    def cut(shape: Sequence[int], _: Any) -> list[int]:
        return [a.ps if shape[0] == rows else 1, *(1 for _ in shape[1:])]

    rng = np.random.default_rng(0)
    examples = BATCHES * a.batch * a.workers
    ids = rng.integers(0, rows, (examples, a.ids), dtype=np.int32)
    labels = rng.integers(0, 2, examples).astype(np.float32)
    cluster = jg.LocalCluster(ps=a.ps, workers=a.workers, transport=a.transport)
    trainer = jg.Trainer(
        lambda: Model(a, rows),
        loss_fn,
        optax.adagrad(RATE),
        cluster=cluster,
        strategy=jg.AsyncPS(variable_partitioner=cut if a.ps > 1 else None),
    )
    return Training(cluster, trainer, (ids, labels), a.batch)


def busy(work: Training, workers: int, steps: int) -> dict[str, Any]:
    """Returns what the CPU time of a step of one worker goes to.

    ``cpu_ms_per_step`` is that of each task; ``ps_busy_ms`` that of all ps by what it
    is spent on, and ``ps_busy_share`` the part of all but ``"rest"``. XLA's own threads
    count as the update, as far as the system tells which they are.
    """
    before = _spent(work)
    work.run(workers, steps)
    after = _spent(work)
    count = workers * steps
    used = {t: {k: after[t][k] - before[t].get(k, 0) for k in after[t]} for t in after}
    process = {t: kinds.pop("process") for t, kinds in used.items()}
    kinds = [kinds for t, kinds in used.items() if t.startswith("/job:ps")]
    total = sum(s for t, s in process.items() if t.startswith("/job:ps"))
    by_kind = {
        "gather": sum(k.get("lookup", 0) for k in kinds),
        "update": sum(k.get("update", 0) + k["xla"] for k in kinds),
        "bytes": sum(k.get("copy", 0) for k in kinds),
    }
    share = sum(by_kind.values()) / total
    by_kind["rest"] = total - sum(by_kind.values())
    return {
        "cpu_ms_per_step": {t: _ms(s, count) for t, s in process.items()},
        "ps_busy_ms": {kind: _ms(s, count) for kind, s in by_kind.items()},
        "ps_busy_share": round(share, 3),
    }


def _ms(seconds: float, count: int) -> float:
    return round(seconds / count * 1e3, 2)


def _spent(work: Training) -> dict[str, dict[str, float]]:
    """Returns the CPU seconds of each task so far, by kind."""
    return {
        task.task: {**task.busy_s, "xla": measure.thread_seconds(task.pid, "tf_XLA")}
        for task in work.cluster.status().tasks
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--ids", type=int, default=26, help="of one example")
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--transport", choices=["auto", "network"], default="auto")
    parser.add_argument("--steps", type=int, default=100, help="of each worker a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--peer", nargs="?", choices=PEER, const=PEER[0])
    a = parser.parse_args(args)
    with ExitStack() as stack:
        works = {rows: stack.enter_context(training(a, rows)) for rows in a.rows}
        sides: dict[str, Any] = {str(rows): work for rows, work in works.items()}
        if a.peer:
            sides[a.peer] = stack.enter_context(peer(a))
        for side in sides.values():
            side.run(a.workers, 10)
        found = measure.take_turns(
            {
                name: partial(measure.rates_of, side.run, a.workers, a.steps)
                for name, side in sides.items()
            },
            a.rounds,
        )
        for rows, work in works.items():
            report(a, rows, work, found)


def peer(a: Any) -> Peer:
    """Starts TensorFlow's cluster, with the first number of rows."""
    names = ("dim", "batch", "ids", "ps", "workers")
    options = [f"--{name}={getattr(a, name)}" for name in names]
    options.append(f"--rows={a.rows[0]}")
    return Peer(a.peer, ["--kind=embedding", *options])


def report(
    a: Any, rows: int, work: Training, found: dict[str, list[measure.Rates]]
) -> None:
    """Prints the line of one table."""
    mine = found[str(rows)]
    rates = [r.steps_per_s for r in mine]
    beside: dict[str, Any] = {}
    if a.peer and rows == a.rows[0]:
        others = [r.steps_per_s for r in found[a.peer]]
        beside = {
            **measure.spread("peer_examples_per_s", [r * a.batch for r in others], 0),
            **measure.ratio("ratio", rates, others),
        }
    if rows != a.rows[0]:
        first = [r.p50 for r in found[str(a.rows[0])]]
        beside = measure.ratio("step_ms_ratio", [r.p50 for r in mine], first)
    measure.emit(
        "embedding",
        **configuration("embedding", 0, rows, a.ps, a.workers),
        rows=rows,
        dim=a.dim,
        batch=a.batch,
        ids=a.ids,
        transport=a.transport,
        rounds=a.rounds,
        **measure.rate_figures(mine),
        **measure.spread("examples_per_s", [r * a.batch for r in rates], 0),
        **beside,
        **busy(work, a.workers, a.steps),
        bytes_per_step=work.bytes_per_step,
        peak_rss_mb={**work.peaks(), "client": measure.peak_mb(os.getpid())},
    )


if __name__ == "__main__":
    main()
