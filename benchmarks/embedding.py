"""A large embedding on parameter servers: a worker pulls and pushes only its rows.

Run: ``python -m benchmarks.embedding --rows 1000000 --dim 64 --batch 512 --ids 26 --ps
1 --workers 1``. Every example has ``--ids`` ids, all of one table; their rows, side by
side, go through a dense net of 256 hidden units to one logit. Adagrad for all. With
``--peer`` TensorFlow's between-graph parameter servers take turns with ours (needs
``make peers``). Prints one JSON line.
"""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

import jgraph as jg
from benchmarks import measure
from benchmarks.null_step import configuration
from benchmarks.peer_process import Peer
from jgraph.cluster.loops import LoopRequest
from jgraph.graph.device import DeviceSpec
from jgraph.graph.rows import Layout, merge_rows, route_rows, split_rows
from jgraph.graph.trace import trace
from jgraph.plan.plan import plan

HIDDEN, RATE, FIRST_SUM = 256, 0.01, 0.1
BATCHES, PIECE = 20, 1 << 14


class Embedding:
    """A cluster whose first workers train the model when asked.

    Args:
      a: rows, dim, batch, ids, ps, transport.
      workers: the most workers that will run.
    """

    def __init__(self, a: Any, workers: int) -> None:
        self.cluster = jg.LocalCluster(ps=a.ps, workers=workers, transport=a.transport)
        try:
            self._prepare(a)
        except BaseException:
            self.cluster.close()
            raise

    def _prepare(self, a: Any) -> None:
        variables = model_variables(a)
        self.session = self.cluster.session()
        self.session.initialize(list(itertools.chain(*variables.values())))
        workers = self.cluster.tasks("worker")
        planned = plan(
            trace_step(variables, a),
            tasks=self.cluster.tasks(),
            driver=workers[0],
            default=DeviceSpec.from_string(workers[0]),
        )
        self.bytes_per_step = planned.nbytes_per_step
        self.plan = planned
        self.batch = a.batch
        self._handles = {}
        for number, worker in enumerate(workers):
            rng = np.random.default_rng(number)
            examples = BATCHES * a.batch
            ids = rng.integers(0, a.rows, (examples, a.ids), dtype=np.int32)
            labels = rng.integers(0, 2, examples).astype(np.float32)
            program = planned.program.rename_task(planned.program.driver, worker)
            self.session.put_data(worker, "data", {"ids": ids, "labels": labels})
            self._handles[worker] = self.session.register(program)

    def run(self, workers: int, steps: int) -> measure.Times:
        """Runs ``steps`` steps on each of the first ``workers`` workers."""
        requests = [
            LoopRequest(
                task=worker,
                handle=self._handles[worker],
                data="data",
                steps=steps,
                batch_size=self.batch,
                seed=replica,
                replica=replica,
            )
            for replica, worker in enumerate(self.cluster.tasks("worker")[:workers])
        ]
        reports = list(self.session.run_loops(requests))
        return [
            np.concatenate([r.seconds for r in reports if r.replica == replica])
            for replica in range(workers)
        ]

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU time that each task has used."""
        tasks = self.cluster.tasks()
        return {t: measure.cpu_seconds(self.cluster.pid(t)) for t in tasks}

    def peaks(self) -> dict[str, float]:
        """Returns the peak memory of each task, in MB."""
        return {t: measure.peak_mb(self.cluster.pid(t)) for t in self.cluster.tasks()}

    def close(self) -> None:
        self.cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def layout_of(a: Any) -> Layout:
    """Returns how the rows lie on the parameter servers."""
    return Layout(tuple(len(part) for part in np.array_split(range(a.rows), a.ps)))


def model_variables(a: Any) -> dict[str, list[jg.Variable]]:
    """Returns the shards of the table and the net's weights, and Adagrad's sums."""
    homes = [f"/job:ps/task:{i}" for i in range(a.ps)]
    table = [(size, a.dim) for size in layout_of(a).sizes]
    net = [(a.ids * a.dim, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]

    def made(name: str, shapes: Sequence[tuple[int, ...]], fn: Any) -> Any:
        return [
            jg.Variable(f"{name}_{i}", (shape, jnp.float32, fn), device=home)
            for i, (shape, home) in enumerate(
                zip(shapes, itertools.cycle(homes), strict=False)
            )
        ]

    sums = partial(jnp.full, fill_value=FIRST_SUM)
    return {
        "table": made("table", table, small_numbers),
        "table_sums": made("table_sums", table, lambda s, d: sums(s, dtype=d)),
        "net": made("net", net, small_numbers),
        "net_sums": made("net_sums", net, lambda s, d: sums(s, dtype=d)),
    }


def small_numbers(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns numbers between -0.05 and 0.05.

    Made piece by piece: in one go they would take three times their own memory more.
    """
    piece = min(shape[0], PIECE), *shape[1:]

    def put(i: Any, made: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), i)
        numbers = jax.random.uniform(key, piece, dtype, -0.05, 0.05)
        return jax.lax.dynamic_update_slice_in_dim(made, numbers, i * piece[0], 0)

    pieces = -(-shape[0] // piece[0])  # the last begins early enough to fit
    return jax.lax.fori_loop(0, pieces, put, jnp.zeros(shape, dtype))


def trace_step(variables: dict[str, list[jg.Variable]], a: Any) -> jg.Graph:
    """Returns the graph of one step: the loss and its gradients, then Adagrad."""
    layout = layout_of(a)
    worker = partial(jg.device, "/job:worker")

    def step(ids: Any, labels: Any) -> Any:
        with worker():
            positions, local = route_rows(ids.reshape(-1), layout=layout, feature="ids")
        rows = [t[p] for t, p in zip(variables["table"], local, strict=True)]
        net = [w[...] for w in variables["net"]]
        with worker():
            merged = merge_rows(local, rows, layout=layout)
            loss, (row_gradient, gradients) = jax.value_and_grad(
                loss_of, argnums=(0, 1)
            )(merged, net, positions, labels)
            parts = split_rows(row_gradient, local, layout=layout)
        for table, total, part, gradient in zip(
            *(variables["table"], variables["table_sums"], local, parts), strict=True
        ):
            new_sum = total[part] + gradient * gradient
            total[part] = new_sum
            table[part] = table[part] - RATE * gradient * jax.lax.rsqrt(new_sum)
        for weight, total, gradient in zip(
            variables["net"], variables["net_sums"], gradients, strict=True
        ):
            new_sum = total[...] + gradient * gradient
            total[...] = new_sum
            weight[...] = weight[...] - RATE * gradient * jax.lax.rsqrt(new_sum)
        return loss

    types = (
        jax.ShapeDtypeStruct((a.batch, a.ids), jnp.int32),
        jax.ShapeDtypeStruct((a.batch,), jnp.float32),
    )
    flat = list(itertools.chain(*variables.values()))
    return trace(step, *types, variables=flat)[0]


def loss_of(merged: Any, net: Sequence[Any], positions: Any, labels: Any) -> Any:
    """Returns the mean logistic loss of a batch."""
    w1, b1, w2, b2 = net
    x = merged[positions].reshape(len(labels), -1)
    logits = (jax.nn.relu(x @ w1 + b1) @ w2 + b2)[:, 0]
    return jnp.mean(jax.nn.softplus(logits) - labels * logits)


def busy(work: Embedding, workers: int, steps: int) -> dict[str, float]:
    """Returns the milliseconds of CPU that a step of one worker costs each task."""
    before = work.cpu_seconds()
    work.run(workers, steps)
    after = work.cpu_seconds()
    count = workers * steps
    return {t: round((after[t] - before[t]) / count * 1e3, 2) for t in after}


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--ids", type=int, default=26, help="of one example")
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--transport", choices=["auto", "grpc"], default="auto")
    parser.add_argument("--steps", type=int, default=100, help="of each worker a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--peer", action="store_true", help="TensorFlow in turns")
    a = parser.parse_args(args)
    with ExitStack() as stack:
        work = stack.enter_context(Embedding(a, a.workers))
        sides: dict[str, Any] = {"jgraph": work}
        if a.peer:
            sides["tensorflow"] = stack.enter_context(peer(a))
        for side in sides.values():
            side.run(a.workers, 10)
        found = measure.take_turns(
            {
                name: partial(lambda s: measure.rates(s.run(a.workers, a.steps)), side)
                for name, side in sides.items()
            },
            a.rounds,
        )
        report(a, work, found)


def peer(a: Any) -> Peer:
    """Starts TensorFlow's cluster."""
    names = ("rows", "dim", "batch", "ids", "ps", "workers")
    options = [f"--{name}={getattr(a, name)}" for name in names]
    return Peer("tensorflow_ps", ["--kind=embedding", *options])


def report(a: Any, work: Embedding, found: dict[str, list[measure.Rates]]) -> None:
    """Prints the line."""
    rates = [r.steps_per_s for r in found["jgraph"]]
    theirs: dict[str, Any] = {}
    if "tensorflow" in found:
        others = [r.steps_per_s for r in found["tensorflow"]]
        theirs = {
            **measure.spread("peer_examples_per_s", [r * a.batch for r in others], 0),
            **measure.ratio("ratio", rates, others),
        }
    measure.emit(
        "embedding",
        **configuration("embedding", 0, a.rows, a.ps, a.workers),
        rows=a.rows,
        dim=a.dim,
        batch=a.batch,
        ids=a.ids,
        transport=a.transport,
        rounds=a.rounds,
        **measure.rate_figures(found["jgraph"]),
        **measure.spread("examples_per_s", [r * a.batch for r in rates], 0),
        **theirs,
        cpu_ms_per_step=busy(work, a.workers, a.steps),
        bytes_per_step=work.bytes_per_step,
        peak_rss_mb=work.peaks(),
    )


if __name__ == "__main__":
    main()
