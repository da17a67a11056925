"""From nothing to the first training step: ``python -m benchmarks.startup``.

Runs ``jgraph up``, and then a fresh client process that imports jgraph, connects and
trains. Prints one JSON line: seconds of each part, and the memory of each process
before and after.

``--model transformer --layers 8 24 48`` instead: how long a first step of a cluster of
one ps and one worker takes, beside the first call of ``jax.jit`` of the same step, in
turns, each in a fresh process. One JSON line for each number of layers, with ``--rows``
as rows.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import measure

ROOT = Path(__file__).resolve().parent.parent
JGRAPH = [sys.executable, "-c", "from jgraph.cli import main; main()"]
PARTS = ("up_s", "import_s", "connect_s", "first_step_s", "second_fit_s", "down_s")


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=["mlp", "transformer"], default="mlp")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 24, 48])
    parser.add_argument("--rows", action="store_true", help="only the rows, as JSON")
    parser.add_argument("--client", metavar="TARGET", help="used inside")
    parser.add_argument("--first", choices=sorted(FIRST), help="used inside")
    a = parser.parse_args(args)
    if a.first:
        print(json.dumps({"seconds": FIRST[a.first](a.layers[0])}))
        return
    if a.model == "transformer":
        for row, layers in enumerate(a.layers, 1):
            first_steps(row, layers, a.rounds, rows=a.rows)
        return
    if a.client:
        client(a.client)
        return
    rounds = [once(a.ps, a.workers) for _ in range(a.rounds)]
    total = [r["total_s"] for r in rounds]
    measure.emit(
        "startup",
        ps=a.ps,
        workers=a.workers,
        rounds=a.rounds,
        **measure.spread("up_to_first_step_s", total, 2),
        **{p: measure.spread(p, [r[p] for r in rounds], 2)[p] for p in PARTS},
        idle_rss_mb=rounds[-1]["idle_rss_mb"],
        trained_rss_mb=rounds[-1]["trained_rss_mb"],
    )


def first_steps(row: int, layers: int, rounds: int, *, rows: bool) -> None:
    """Prints how long first steps take, on a cluster and by ``jax.jit``."""

    def first(way: str) -> float:
        command = [sys.executable, "-m", "benchmarks.startup", "--first", way]
        line = call([*command, "--layers", str(layers)], dict(os.environ))
        return float(json.loads(line.splitlines()[-1])["seconds"])

    found = measure.take_turns({way: lambda w=way: first(w) for way in FIRST}, rounds)  # type: ignore[misc]
    ratio = measure.ratio("ratio", found["cluster"], found["plain"])
    seconds = {way: measure.spread(f"{way}_s", found[way], 2) for way in FIRST}
    if rows:
        figures = {f"{way}_s": seconds[way][f"{way}_s"] for way in FIRST}
        unit = f"cluster to plain jax.jit, first step, {layers} layers"
        measure.emit_row(row, ratio["ratio"], unit, **figures)
        return
    measure.emit(
        "startup",
        model="transformer",
        layers=layers,
        rounds=rounds,
        **seconds["cluster"],
        **seconds["plain"],
        **ratio,
    )


def first_of_cluster(layers: int) -> float:
    """Returns the seconds of a first ``fit``, from the model to its end."""
    import optax

    import jgraph as jg
    from benchmarks.models import narrow_transformer as narrow

    data, model = narrow.make_data(64), narrow.make_model(layers)
    with jg.LocalCluster(ps=1, workers=1) as cluster:
        began = time.perf_counter()
        trainer = jg.Trainer(model, narrow.loss_fn, optax.adam(1e-3), cluster=cluster)
        trainer.fit(data, steps=1, batch_size=narrow.BATCH, progress=False)
        return time.perf_counter() - began


def first_of_plain(layers: int) -> float:
    """Returns the seconds of a first call of ``jax.jit``: tracing and compiling."""
    from benchmarks.models import narrow_transformer as narrow
    from benchmarks.train import ByHand

    data, model = narrow.make_data(64), narrow.Narrow(layers)
    by_hand = ByHand(model, data, narrow.BATCH)
    began = time.perf_counter()
    by_hand.run(1)
    return time.perf_counter() - began


FIRST: dict[str, Callable[[int], float]] = {
    "cluster": first_of_cluster,
    "plain": first_of_plain,
}


def once(ps: int, workers: int) -> dict[str, Any]:
    """One cluster, one client, from start to end."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "JGRAPH_HOME": home}
        options = ["--ps", str(ps), "--workers", str(workers), "--json"]
        began = time.perf_counter()
        facts = json.loads(call([*JGRAPH, "up", *options], environment))
        up = time.perf_counter() - began
        try:
            idle = resident(facts["pids"])
            command = [sys.executable, "-m", "benchmarks.startup"]
            told = json.loads(
                call([*command, "--client", facts["target"]], environment)
            )
            trained = resident(facts["pids"])
        finally:
            began = time.perf_counter()
            call([*JGRAPH, "down", "--json"], environment)
            down = time.perf_counter() - began
    parts = {"up_s": up, **told, "down_s": down}
    first = ("up_s", "import_s", "connect_s", "first_step_s")
    return {
        **parts,
        "total_s": sum(parts[p] for p in first),
        "idle_rss_mb": idle,
        "trained_rss_mb": trained,
    }


def call(command: Sequence[str], environment: dict[str, str]) -> str:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def resident(pids: dict[str, int]) -> dict[str, float]:
    """Returns the memory of each task now, in MB."""
    infos = {task: psutil.Process(pid).memory_info() for task, pid in pids.items()}
    return {task: round(info.rss / 1e6, 1) for task, info in infos.items()}


def client(target: str) -> None:
    """What a user's script does; prints the seconds of its parts."""
    laps = [psutil.Process().create_time() - time.time() + time.perf_counter()]
    import optax

    import jgraph as jg
    from benchmarks.models.mlp import loss_fn, make_data, make_model

    data, model = make_data(1024), make_model()
    laps.append(time.perf_counter())
    cluster = jg.connect(target)
    laps.append(time.perf_counter())
    workers = len(cluster.tasks("worker"))
    trainer = jg.Trainer(model, loss_fn, optax.adam(1e-3), cluster=cluster)
    for _ in range(2):
        trainer.fit(data, steps=workers, progress=False)
        laps.append(time.perf_counter())
    cluster.close()
    seconds = [b - a for a, b in itertools.pairwise(laps)]
    print(json.dumps(dict(zip(PARTS[1:], seconds, strict=False))))


if __name__ == "__main__":
    main()
