"""What workers that join and leave cost a run: ``python -m benchmarks elastic``.

A model of 3 MB with SGD trains on real processes. One JSON line each:

- ``joins``: from the moment at which another worker serves until its loop begins; the
  longest pause between two updates of worker 0 meanwhile, and its longest before.
- ``leaves``: how long ``scale`` takes to let a worker leave, and the batches that were
  done again for that.
- ``moves``: 2 to 3 to 2 parameter servers, while a table of ``--mb`` with its optimizer
  state trains by rows: the longest pause between two updates of worker 0 (median, 99th
  percentile and longest of all rescales), what it is made of, the bytes that moved, of
  all, and the rate of updates while programs are prepared over the rate before.
- ``changes``: joins and leaves of workers, and rescales of ps, in simulated runs whose
  workers, ps and masters are killed, frozen and cut off meanwhile, and in how many of
  these runs a batch or an update was lost, or came twice and was not told of, by what
  each ps has applied.
- ``unequal``: 3 workers, one of which takes twice as long: how often as many updates a
  second ``SyncPS(batch_share="measured")`` makes as even shares do, and by how much the
  parameters differ then. Computing is emulated, as a wait for each example.
- ``policy``: ``jg.AutoScale`` begins with one ps of at most three and one worker of at
  most eight, whose computing is a wait: the rate at which it rests over the best of 1,
  2 and 3 ps, each with 1, 2, 4, 6 and 8 workers.
- ``cost``: steps per second of a run with ``elastic=`` over those of one without,
  while nobody joins or leaves; in alternating rounds.
- ``pauses``: as ``moves``, with ``--pauses-mb`` and ``--pauses`` times 2 to 3 to 2 ps:
  enough rescales for a 99th percentile.
- ``balance``: time of a pipeline's step with layers in halves over that with
  ``balance=jg.auto(cluster)``, where one of two workers is slow, as in
  ``python -m benchmarks pipeline --slowed``.

``--rows`` prints them as rows of a table, and ``--only`` measures one of them.
"""

import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure, pipeline
from jgraph.coordination.data.shares import pieces_of
from jgraph.train.strategies.sync_runner import SyncRunner
from tests.support.simulation.member_runs import simulated
from tests.support.simulation.ps_runs import rescaled

STRATEGIES = {"async": jg.AsyncPS, "sync": jg.SyncPS}
ELASTIC = jg.Elastic(workers=(1, 8))
WAIT_S = 60.0
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
"""Numbers of the rows: a worker joins, leaves, ps come and go, what is lost, unequal
workers, a policy, what elasticity costs, many rescales, unequal stages."""
WIDTH, LOOKUPS = 64, 8
BATCH, EXAMPLE_S, UPDATES = 128, 0.002, 40
GRID, COMPUTE_S, WINDOW_S = (1, 2, 4, 6, 8), 0.2, 4.0
PS_GRID = (1, 2, 3)
CHANGES = 200
UNITS = {
    "changes": "runs with a lost or doubled batch",
    "unequal": "of the rate of even shares",
    "policy": "of the best rate",
    "cost": "of the rate without",
    "balance": "of the time of a balanced step",
}


class Model(nnx.Module):
    """Three layers of 1 MB."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(500, 500, rngs=rngs) for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def loss(model: Any, batch: Any) -> Any:
    return (model(batch) ** 2).mean()


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits until something holds.

    Raises:
      SystemExit: it does not.
    """
    ends = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > ends:
            sys.exit(f"it did not come about within {WAIT_S:g} s")
        time.sleep(0.01)


def begun(cluster: jg.LocalCluster, strategy: str, elastic: Any) -> Any:
    """A Trainer whose run goes on until it is stopped, and that run."""
    kind = STRATEGIES[strategy]
    trainer = jg.Trainer(
        Model(),
        loss,
        optax.sgd(1e-4),
        cluster=cluster,
        strategy=kind(elastic=elastic),
    )
    data = np.ones((512, 500), np.float32)
    run = trainer.fit(data, steps=10**7, batch_size=16, block=False, progress=False)
    wait_until(lambda: run.steps > 50)
    return trainer, run


def longest_pause(run: Any, since_s: float, until_s: float) -> float:
    """The longest time between two updates of worker 0 within a span of the run."""
    told = run.metrics("loss")
    seconds = told["seconds"][told["replica"] == 0]
    within = seconds[(seconds >= since_s) & (seconds <= until_s)]
    return float(np.diff(np.sort(within)).max(initial=0.0))


def members(strategy: str) -> tuple[dict[str, float], dict[str, float]]:
    """Lets a worker join a run and leave it; returns what both cost."""
    with jg.LocalCluster(ps=1, workers=2, elastic=True) as cluster:
        trainer, run = begun(cluster, strategy, ELASTIC)
        time.sleep(2.0)
        worker = cluster.scale(workers="+1", wait=True)[-1]
        wait_until(lambda: any(m.batches for m in run.members() if m.task == worker))
        took_part_s = next(m.since_s for m in run.members() if m.task == worker)
        events = [e for e in cluster.events() if e.subject == worker]
        served = next(e.time_s for e in events if "listens on" in e.text)
        ready = next(e.time_s for e in events if "takes part in run" in e.text)
        time.sleep(2.0)
        began = time.monotonic()
        cluster.scale(workers="-1")
        left_s = time.monotonic() - began
        time.sleep(1.0)
        run.stop()
        run.wait(30)
        joins = {
            "joins_s": ready - served,
            "pause_s": longest_pause(run, took_part_s - 1.0, took_part_s + 1.0),
            "pause_before_s": longest_pause(run, 1.0, took_part_s - 1.5),
        }
        leaves = {"leaves_s": left_s, "repeated": float(run.repeated())}
        trainer.close()
    return joins, leaves


class Table(nnx.Module):
    """A table, of which a batch uses some rows, and a layer."""

    def __init__(self, rows: int) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(rows, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.out(self.table(ids).mean(1))


def moves(strategy: str, mb: int, rounds: int) -> dict[str, float]:
    """Lets a ps join a run and leave it, with so much state; returns what it costs."""
    rows = mb * 10**6 // (2 * 4 * WIDTH)  # with adagrad's sums
    ids = np.random.default_rng(0).integers(0, rows, (4096, LOOKUPS), np.int32)
    elastic = jg.Elastic(ps=(2, 3))
    pauses: dict[int, list[float]] = {3: [], 2: []}
    ratios = []
    with jg.LocalCluster(ps=2, workers=2, elastic=True) as cluster:
        trainer = jg.Trainer(
            Table(rows),
            loss,
            optax.adagrad(0.1),
            cluster=cluster,
            strategy=STRATEGIES[strategy](elastic=elastic),
            sparse="lazy",
        )
        run = trainer.fit(ids, steps=10**7, batch_size=32, block=False, progress=False)
        wait_until(lambda: run.steps > 200)
        for ps in (3, 2) * rounds:
            time.sleep(2.0)
            first, began_s = run.steps, seconds_of(run)[-1]
            cluster.scale(ps=ps, timeout_s=WAIT_S)
            time.sleep(1.0)
            seconds = seconds_of(run)
            since = seconds[seconds >= began_s]
            gaps = np.diff(since)
            at = int(gaps.argmax())
            pauses[ps].append(float(gaps[at]))
            before = seconds[(seconds >= began_s - 2.0) & (seconds < began_s)]
            meanwhile = at / max(since[at] - began_s, 1e-9)
            ratios.append(meanwhile / max(len(before) / 2.0, 1e-9))
            assert run.steps > first
        rescales = [one for one in run.rescales() if not one.why]
        run.stop()
        run.wait(60)
        repeated = run.repeated()
        trainer.close()
    all_pauses = [*pauses[3], *pauses[2]]
    return {
        "pause_s": round(statistics.median(all_pauses), 3),
        "p99_pause_s": round(float(np.percentile(all_pauses, 99)), 3),
        "longest_pause_s": round(max(all_pauses), 3),
        "pause_joins_s": round(statistics.median(pauses[3]), 3),
        "pause_leaves_s": round(statistics.median(pauses[2]), 3),
        "rescales": len(rescales),
        "at_rest_s": round(statistics.median(r.paused_s for r in rescales), 3),
        "took_s": round(statistics.median(r.took_s for r in rescales), 2),
        "mb_moved": round(statistics.median(r.nbytes for r in rescales) / 1e6, 1),
        "of_bytes": round(max(r.nbytes for r in rescales) / (mb * 1e6), 3),
        "rate_meanwhile": round(statistics.median(ratios), 2),
        "repeated": float(repeated),
    }


def seconds_of(run: Any) -> Any:
    """When worker 0 made its updates, in seconds of the run."""
    told = run.metrics("loss")
    return np.sort(told["seconds"][told["replica"] == 0])


def changes(least: int) -> dict[str, float]:
    """Simulates runs until so much has joined, left and moved; counts wrong ones."""
    logging.disable()  # of what is broken on purpose
    counts = dict.fromkeys(
        ("wrong", "joins", "leaves", "rescales", "kills", "takeovers", "runs"), 0
    )
    while counts["joins"] + counts["leaves"] < least or counts["rescales"] < least:
        simulate = rescaled if counts["rescales"] < least else simulated
        try:
            world = simulate(counts["runs"])
        except AssertionError as error:
            print(error, *error.__notes__, sep="\n", file=sys.stderr)
            counts["wrong"] += 1
        else:
            counts["rescales"] += len(getattr(world, "switches", ()))
            counts["joins"] += world.joined
            counts["leaves"] += world.left
            counts["kills"] += world.kills
            counts["takeovers"] += len(world.masters) - 1
        counts["runs"] += 1
    logging.disable(logging.NOTSET)
    return {name: float(count) for name, count in counts.items()}


def shared(cluster: jg.LocalCluster, share: Any) -> tuple[float, list[Any]]:
    """Updates per second once shares are settled, and the parameters at the end."""
    trainer = jg.Trainer(
        Model(),
        loss,
        optax.sgd(1e-4),
        cluster=cluster,
        strategy=jg.SyncPS(batch_share=share),
    )
    pieces = 1 if share == "even" else pieces_of(BATCH)
    wait_s = BATCH * EXAMPLE_S / pieces
    runner = trainer._build()[1]  # noqa: SLF001
    assert isinstance(runner, SyncRunner)
    runner.compute_wait_s = {0: wait_s, 1: wait_s, 2: 2 * wait_s}
    data = np.random.default_rng(0).normal(size=(8 * BATCH, 500)).astype(np.float32)
    run = trainer.fit(data, steps=UPDATES, batch_size=BATCH, progress=False)
    seconds = run.metrics("loss")["seconds"][UPDATES // 2 :]
    values = jax.tree.leaves(nnx.state(run.model()))
    trainer.close()
    return (len(seconds) - 1) / float(seconds[-1] - seconds[0]), values


def unequal(rounds: int) -> dict[str, float]:
    """Trains on unequal workers with even and with measured shares, in turns."""
    ratios, difference = [], 0.0
    with jg.LocalCluster(ps=1, workers=3) as cluster:
        for _ in range(rounds):
            even, there = shared(cluster, "even")
            measured, here = shared(cluster, "measured")
            ratios.append(measured / even)
            size = max(float(np.abs(a).max()) for a in there)
            pairs = zip(here, there, strict=True)
            most = max(float(np.abs(a - b).max()) for a, b in pairs)
            difference = max(difference, most / size)
    median = statistics.median(ratios)
    return {"of_rate_even": round(median, 3), "difference": float(f"{difference:.1e}")}


def with_waits(cluster: jg.LocalCluster, policy: Any) -> tuple[Any, Any]:
    """A Trainer whose steps take a while, and a run of it that goes on."""
    ps = None if policy is None else (min(PS_GRID), max(PS_GRID))
    elastic = jg.Elastic(workers=(1, 8), ps=ps, policy=policy)
    trainer = jg.Trainer(
        Model(),
        loss,
        optax.sgd(1e-4),
        cluster=cluster,
        strategy=jg.SyncPS(elastic=elastic),
    )
    runner = trainer._build()[1]  # noqa: SLF001
    assert isinstance(runner, SyncRunner)
    runner.compute_wait_s = {0: COMPUTE_S}  # who joins has the order of another
    data = np.ones((512, 500), np.float32)
    run = trainer.fit(data, steps=10**7, batch_size=16, block=False, progress=False)
    wait_until(lambda: run.steps > 5)
    return trainer, run


def batch_rate(run: Any) -> float:
    """Batches per second from now on, for a while."""
    time.sleep(1.0)
    first, began = run.steps, time.monotonic()
    time.sleep(WINDOW_S)
    counts = run.metrics("contributions")["value"]
    return float(counts[first:].sum() / (time.monotonic() - began))


def policy() -> dict[str, float]:
    """Lets a policy find out how many tasks pay, and compares with the best."""
    with jg.LocalCluster(ps=1, workers=1, elastic=True) as cluster:
        scale = jg.AutoScale(window_s=WINDOW_S, pause_s=0.0)
        trainer, run = with_waits(cluster, scale)

        def acts() -> int:
            return sum(event.kind == "scaled" for event in cluster.notes.newest())

        quiet = 0
        while quiet < 3 * WINDOW_S and acts() < 12:
            before = acts()
            time.sleep(1.0)
            here = len(cluster.tasks("worker")) == run_workers(run)
            here &= len(cluster.tasks("ps")) == run_ps(cluster)
            quiet = quiet + 1 if acts() == before and here else 0
        found, count = batch_rate(run), acts()
        ps, workers = run_ps(cluster), run_workers(run)
        run.stop()
        run.wait(60)
        trainer.close()
        rates = {(ps, workers): found}
        for point in itertools.product(PS_GRID, GRID):
            cluster.scale(ps=point[0], workers=point[1])
            trainer, run = with_waits(cluster, None)
            rates[point] = max(rates.get(point, 0.0), batch_rate(run))
            run.stop()
            run.wait(60)
            trainer.close()
    best = max(rates, key=rates.__getitem__)
    return {
        "of_best": round(found / rates[best], 3),
        "ps": ps,
        "workers": workers,
        "best_ps": best[0],
        "best_workers": best[1],
        "acts": count,
        "batches_per_s": round(found, 1),
        "best_per_s": round(rates[best], 1),
    }


def run_ps(cluster: jg.LocalCluster) -> int:
    """On how many ps the variables of the run of a cluster lie."""
    return next(run.ps for run in cluster.runs() if run.state == "running")


def run_workers(run: Any) -> int:
    """How many workers take part in a run."""
    return sum(member.state == "takes part" for member in run.members())


def rate(strategy: str, elastic: Any, seconds: float) -> float:
    """Steps per second of a run, while nobody joins or leaves."""
    with jg.LocalCluster(ps=1, workers=2, elastic=True) as cluster:
        trainer, run = begun(cluster, strategy, elastic)
        first, began = run.steps, time.monotonic()
        time.sleep(seconds)
        done = (run.steps - first) / (time.monotonic() - began)
        run.stop()
        run.wait(30)
        trainer.close()
    return float(done)


def joins_and_leaves(a: Any) -> dict[str, dict[str, float]]:
    """Lets workers join and leave in turns; returns the medians of both."""
    pairs = [members(a.strategy) for _ in range(a.rounds)]
    cases: dict[str, dict[str, float]] = {}
    for name, found in zip(("joins", "leaves"), zip(*pairs, strict=True), strict=True):
        median = {k: statistics.median(one[k] for one in found) for k in found[0]}
        cases[name] = {k: round(value, 3) for k, value in median.items()}
    return cases


def cost(a: Any) -> dict[str, float]:
    """Trains with ``elastic=`` and without, in turns, while nobody comes or goes."""
    ratios = [
        rate(a.strategy, ELASTIC, a.seconds) / rate(a.strategy, None, a.seconds)
        for _ in range(a.rounds)
    ]
    return {"of_rate_without": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--strategy", choices=[*STRATEGIES], default="async")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--mb", type=int, default=1000, help="state of `moves`")
    parser.add_argument("--pauses", type=int, default=16, help="rounds of `pauses`")
    parser.add_argument("--pauses-mb", type=int, default=100)
    parser.add_argument("--only", help="this case alone, as: moves")
    parser.add_argument("--rows", action="store_true", help="rows of a table")
    a = parser.parse_args()
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "moves": lambda: moves(a.strategy, a.mb, a.rounds),
        "changes": lambda: changes(CHANGES),
        "unequal": lambda: unequal(a.rounds),
        "policy": policy,
        "cost": lambda: cost(a),
        "pauses": lambda: moves(a.strategy, a.pauses_mb, a.pauses),
        "balance": lambda: pipeline.balanced(pipeline.arguments([])),
    }
    about = {"strategy": a.strategy, "rounds": a.rounds}
    numbers = dict(zip(("joins", "leaves", *cases), ROWS, strict=True))
    if a.only not in (None, *numbers):
        parser.error(f"--only is one of {', '.join(numbers)}")

    def tell(name: str, case: dict[str, Any]) -> None:
        if a.rows:
            value, *_ = case.values()
            unit = UNITS.get(name, "s")
            measure.emit_row(numbers[name], value, unit, case=name, **about, **case)
        else:
            measure.emit("elastic", case=name, **about, **case)

    if a.only in (None, "joins", "leaves"):
        for name, found in joins_and_leaves(a).items():
            tell(name, found)
    for name, measured in cases.items():
        if a.only in (None, name):
            tell(name, measured())


if __name__ == "__main__":
    main()
