"""Dense parameters on the workers beside the ps: ``python -m benchmarks collectives``.

Whole synchronous steps of SGD whose gradient takes next to no computing, on one
cluster, in turns: with ``dense="ps"``, ``dense="workers"``, and beside PyTorch's DDP
(gloo) where ``make peers-torch`` has installed it. One JSON line for each number of
workers: milliseconds of a step, and the ratio of each way to ``workers``, by rounds.
With ``--xla`` XLA's own collectives (``dense="xla"``) take a turn as well.
With ``--model wide_deep`` two tables of 100,000 rows lie on the ps beside the dense
part. With ``--line 200`` each task, the ps too, is behind a line of its own of so many
Mbit/s each way, as on a host of its own.

``--kill``: a worker is killed, of whose part the next one has a copy: milliseconds
between the updates before and after.

``--rows`` prints the table of figures, with those of ``apart`` and ``secure_sum``, and
``--only 1 4`` these rows of it.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure
from benchmarks.peer_process import Peer, installed
from benchmarks.rows import Line, Lines, Row, print_rows
from jgraph.client.cluster import Cluster
from jgraph.cluster import event_loop
from jgraph.cluster.spec import ClusterSpec
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.train.run.run import Run
from jgraph.train.strategies.options import Dense

BATCH, EXAMPLES, TABLE_ROWS, WIDTH, IDS = 32, 1024, 100_000, 64, 26
PEER = "torch_ddp"


class Dense100(nnx.Module):
    """One weight vector of so many megabytes."""

    def __init__(self, mb: float) -> None:
        self.weights = nnx.Param(jnp.zeros(int(mb * 1e6 / 4)))

    def __call__(self, ids: Any) -> Any:
        return (self.weights[...] ** 2).sum() + ids.mean()


class WideDeep(nnx.Module):
    """Two tables of which rows travel, and a dense part of so many megabytes."""

    def __init__(self, mb: float) -> None:
        rngs = nnx.Rngs(0)
        self.user = nnx.Embed(TABLE_ROWS, WIDTH, rngs=rngs)
        self.ads = nnx.Embed(TABLE_ROWS, WIDTH, rngs=rngs)
        width = int(mb * 1e6 / 4 / (2 * WIDTH + 1))
        self.hidden = nnx.Linear(2 * WIDTH, width, rngs=rngs)
        self.last = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        rows = self.user(ids[:, 0]).mean(1), self.ads(ids[:, 1]).mean(1)
        hidden = nnx.relu(self.hidden(jnp.concatenate(rows, axis=1)))
        return (self.last(hidden) ** 2).mean()


MODELS: dict[str, Callable[[float], nnx.Module]] = {
    "dense": Dense100,
    "wide_deep": WideDeep,
}


def loss(model: Any, ids: Any) -> Any:
    return model(ids)


def trainer(
    cluster: Cluster, model: str, mb: float, dense: Dense, **options: Any
) -> jg.Trainer:
    """Returns a Trainer whose update needs no state: bytes are what it costs."""
    strategy = jg.SyncPS(dense=dense, **options)
    made, tx = MODELS[model](mb), optax.sgd(1e-3)
    return jg.Trainer(made, loss, tx, cluster=cluster, strategy=strategy)


def ids() -> Any:
    random = np.random.default_rng(0)
    return random.integers(0, TABLE_ROWS, (EXAMPLES, 2, IDS)).astype(np.int32)


def step_ms(there: jg.Trainer, data: Any, steps: int) -> float:
    """Trains for some steps; returns the milliseconds of one, without the first two."""
    run = there.fit(data, steps=steps + 2, batch_size=BATCH, progress=False)
    seconds = run.metrics("loss")["seconds"]
    return float(seconds[-1] - seconds[1]) / (len(seconds) - 2) * 1e3


def peer_ms(peer: Peer, workers: int, steps: int) -> float:
    (first, *_) = peer.run(workers, steps + 2)
    return float(first[-1] - first[1]) / (len(first) - 2) * 1e3


def compare(a: Any, workers: int) -> None:
    """Lets all ways take turns; prints a line."""
    data, figures = ids(), dict[str, Any]()
    with ExitStack() as stack:
        cluster = stack.enter_context(
            jg.connect(stack.enter_context(behind_lines(a.ps, workers, a.line)))
            if a.line
            else jg.LocalCluster(ps=a.ps, workers=workers, transport=a.transport)
        )
        ways: dict[str, Callable[[], float]] = {}
        kinds: list[Dense] = ["workers", "ps"]
        if a.xla:
            kinds.append("xla")
        for dense in kinds:
            there = trainer(cluster, a.model, a.mb, dense)
            there.fit(data, steps=3, batch_size=BATCH, progress=False)
            ways[dense] = partial(step_ms, there, data, a.steps)
        if a.model == "dense" and not a.line and PEER in installed():
            options = ["--kind=dense", f"--mb={a.mb}", f"--workers={workers}"]
            peer = stack.enter_context(Peer(PEER, [*options, "--ps=0"]))
            peer.run(workers, 3)
            ways["torch_ddp"] = partial(peer_ms, peer, workers, a.steps)
        found = measure.take_turns(ways, a.rounds)
    for way, times in found.items():
        figures |= measure.spread(f"{way}_ms", times)
        if way != "workers":
            figures |= measure.ratio(f"{way}_over_workers", times, found["workers"])
    measure.emit(
        "collectives",
        model=a.model,
        mb=a.mb,
        ps=a.ps,
        workers=workers,
        transport="network" if a.line else a.transport,
        line=a.line,
        rounds=a.rounds,
        steps=a.steps,
        **figures,
    )


@contextmanager
def behind_lines(ps: int, workers: int, mbit: float) -> Iterator[str]:
    """Tasks in this process, each behind a line; gives what a client connects to."""
    names = [*(("ps", n) for n in range(ps)), *(("worker", n) for n in range(workers))]
    with ExitStack() as stack:
        line = partial(_line, stack, mbit)
        servers = [
            stack.enter_context(
                jg.Server({job: {n: "127.0.0.1:0"}}, job, n, transport="network")
            )
            for job, n in names
        ]
        towards = [line(server.address) for server in servers]
        for own, server in enumerate(servers):
            # What leaves a task takes turns, and then turns of where it arrives.
            leaving: TcpProxy | None = None
            spec: dict[str, list[str]] = {}
            for other, (job, _) in enumerate(names):
                address = server.address
                if other != own:
                    leaving = line(towards[other].address, leaving)
                    address = leaving.address
                spec.setdefault(job, []).append(address)
            server.set_cluster(ClusterSpec(spec))
        yield servers[0].target


def _line(
    stack: ExitStack, mbit: float, address: str, beside: TcpProxy | None = None
) -> TcpProxy:
    """Returns a line to an address, or more of the line of another one."""
    proxy = TcpProxy(address)
    proxy.bytes_per_s = mbit * 1e6 / 8
    if beside is not None:
        proxy.free_at = beside.free_at
    event_loop.run(proxy.__aenter__())
    stack.callback(lambda: event_loop.run(proxy.__aexit__()))
    return proxy


class Killer:
    """A callback that kills a worker, and stops the run when it has gone on."""

    def __init__(self, cluster: jg.LocalCluster, task: str) -> None:
        self._cluster, self._task = cluster, task
        self._has_killed = False

    def __call__(self, run: Run, report: Any) -> None:
        if run.recoveries():
            run.stop()
        elif report.step >= 20 and not self._has_killed:
            self._has_killed = True
            self._cluster.kill(self._task)


def kill(a: Any) -> None:
    """Kills a worker whose part has a copy, once a round; prints a line."""
    pauses_ms, again = list[float](), list[int]()
    for _ in range(a.rounds):
        with jg.LocalCluster(ps=0, workers=2, restarts=3) as cluster:
            there = trainer(cluster, "dense", a.mb, "workers", durability="replica")
            act = Killer(cluster, "/job:worker/task:1")
            run = there.fit(
                ids(), steps=10**6, batch_size=BATCH, callbacks=act, progress=False
            )
            # The longest pause is that of the loss.
            pauses_ms.append(float(np.diff(run.metrics("loss")["seconds"]).max()) * 1e3)
            again += [recovery.again for recovery in run.recoveries()]
    measure.emit(
        "collectives-kill",
        mb=a.mb,
        rounds=a.rounds,
        repeated=max(again),
        **measure.spread("pause_ms", pauses_ms),
    )


def ratios(key: str, **wanted: Any) -> Callable[[Lines], list[Any]]:
    """Returns what takes one figure of each line; None where the peer is not there."""

    def figures(lines: Lines) -> list[Any]:
        chosen: list[Line] = [
            line for line in lines if all(line.get(k) == v for k, v in wanted.items())
        ]
        return [line.get(key) for line in chosen]

    return figures


def of_one(*keys: str) -> Callable[[Lines], list[Any]]:
    """Returns what takes these figures of the only line."""

    def figures(lines: Lines) -> list[Any]:
        (line,) = lines
        return [line.get(key) for key in keys]

    return figures


def both_ratios(lines: Lines) -> list[Any]:
    """Returns how many times as long the ps take by numbers of workers, and DDP."""
    return [
        line.get(key)
        for key in ("ps_over_workers", "torch_ddp_over_workers")
        for line in lines
    ]


TABLE = [
    Row(["collectives --workers 2 4"], both_ratios),
    Row(
        ["collectives --workers 2 4 --transport network"],
        ratios("torch_ddp_over_workers"),
    ),
    Row(
        [
            "collectives --model wide_deep --mb 20 --workers 2",
            "collectives --model wide_deep --mb 20 --workers 2 --line 200 --steps 3",
        ],
        ratios("ps_over_workers"),
    ),
    Row(["collectives --kill --mb 8"], ratios("pause_ms"), "ms"),
    Row(
        ["apart --kind diloco"],
        of_one("every_50_more", "every_500_more"),
        "of the loss more",
    ),
    Row(
        ["apart --kind digits"],
        of_one("fedavg_accuracy", "diloco_accuracy"),
        "accuracy",
    ),
    Row(
        ["apart --kind link"],
        of_one("speed_at_500", "sync_speed"),
        "of the speed alone",
    ),
    Row(
        ["apart --kind privacy"],
        of_one("accuracy", "epsilon_off"),
        "accuracy; epsilon off",
    ),
    Row(
        ["secure_sum"],
        lambda lines: [statistics.median([line["member_s"] for line in lines])],
        "s of a member and round",
    ),
]
"""One host, between hosts, tables beside (on one host, then with each task behind a
line of 200 Mbit/s), a worker lost; then by workers that talk seldom: DiLoCo, clients
with two digits each, a slow line, privacy, secure sums."""


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="dense")
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--transport", choices=["auto", "network"], default="auto")
    parser.add_argument("--line", type=float, default=0, help="Mbit/s of each task")
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--xla", action="store_true", help="XLA's collectives, too")
    parser.add_argument("--kill", action="store_true", help="a worker, with a copy")
    parser.add_argument("--rows", action="store_true", help="rows of a table")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="rows")
    a = parser.parse_args(args)
    if a.rows:
        print_rows(TABLE, a.only)
    elif a.kill:
        kill(a)
    else:
        for workers in a.workers:
            compare(a, workers)


if __name__ == "__main__":
    main()
