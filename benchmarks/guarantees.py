"""What the guarantees cost while nothing fails: ``python -m benchmarks guarantees``.

Asynchronous training of an MLP 784-512-512-10 (Adam, batch 128) on two clusters in
turns: one as it is, and one whose processes run a copy of the package from which the
guarantees are cut out: frames are neither kept, acknowledged nor told apart from
repeats, workers ask no leases of their master, and no failpoint is left. One JSON line:
the share of steps per second that is left with the guarantees, as the median of the
rounds, and CPU seconds per step, which depend less on what else the machine does.

``--transport network`` (the default) is what tasks on several hosts have; between tasks
of one host (``auto``) a socket that cannot lose frames needs most of this not at all.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import jgraph as jg
from benchmarks import measure
from benchmarks.durability import data, trainer_of

CUTS: Final = (
    ("rpc/resumable/numbers.py", "        if keep:\n", "        if False:\n"),
    (
        "rpc/resumable/numbers.py",
        "return new >= ACK_FRAMES or (new > 0 and self.untold_bytes >= ACK_BYTES)",
        "return False",
    ),
    (
        "rpc/exchange/receiver.py",
        "if self.inbound.accept(stream, arrived.header.sequence):",
        "if True:",
    ),
    ("server/loops/task_loops.py", "supervised=supervised", "supervised=False"),
)
"""Where in the package a guarantee is, the code, and what is there without it."""
_FAILPOINT: Final = re.compile(r"^( +)failpoint\(\"[a-z_.]+\"\)$", re.MULTILINE)


def without_guarantees(where: Path) -> Path:
    """Makes a copy of the package without them; returns where to import it from."""
    package = Path(jg.__file__).parent
    shutil.copytree(package, where / "jgraph", ignore=shutil.ignore_patterns("*.pyc"))
    for name, code, instead in CUTS:
        file = where / "jgraph" / name
        text = file.read_text(encoding="utf-8")
        if text.count(code) != 1:
            raise SystemExit(f"{name} has changed; say anew what to cut out")
        file.write_text(text.replace(code, instead), encoding="utf-8")
    for file in (where / "jgraph").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if _FAILPOINT.search(text):
            file.write_text(_FAILPOINT.sub(r"\1pass", text), encoding="utf-8")
    asked = subprocess.run(
        [sys.executable, "-c", "import jgraph; print(jgraph.__file__)"],
        env=environment(where),
        cwd=where,
        capture_output=True,
        text=True,
        check=True,
    )
    if not Path(asked.stdout.strip()).is_relative_to(where):
        raise SystemExit(f"{asked.stdout.strip()} is imported rather than the copy")
    return where


def environment(where: Path) -> dict[str, str]:
    """Returns variables with which a process imports the package from there."""
    return {"PYTHONPATH": str(where)}


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--transport", choices=("network", "auto"), default="network")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each round")
    a = parser.parse_args(args)
    with ExitStack() as stack:
        copy = without_guarantees(
            Path(stack.enter_context(tempfile.TemporaryDirectory()))
        )
        envs = {"with": dict[str, str](), "without": environment(copy)}
        clusters = {
            name: stack.enter_context(cluster(a.transport, a.workers, env))
            for name, env in envs.items()
        }
        measured(clusters, a)


def cluster(
    transport: Literal["network", "auto"], workers: int, env: dict[str, str]
) -> jg.LocalCluster:
    """Starts a cluster whose processes have these variables."""
    return jg.LocalCluster(ps=2, workers=workers, env=env, transport=transport)


def timed(
    trainer: jg.Trainer, cluster: jg.LocalCluster, seconds: float
) -> tuple[float, float]:
    """Returns steps per second over so long, and CPU seconds of the tasks per step."""
    pids = [cluster.pid(task) for task in cluster.tasks()]
    seen: list[tuple[float, float, int]] = []

    def watch(run: Any, report: Any) -> None:
        used = sum(map(measure.cpu_seconds, pids))
        seen.append((time.perf_counter(), used, report.step))
        if seen[-1][0] - seen[0][0] > seconds:
            run.stop()

    trainer.fit(data(), steps=10**9, batch_size=128, callbacks=[watch], progress=False)
    (began, used, first), (ended, used_then, last) = seen[0], seen[-1]
    steps = last - first
    return steps / (ended - began), (used_then - used) / steps


def measured(clusters: dict[str, jg.LocalCluster], a: argparse.Namespace) -> None:
    """Prints what the first of two clusters does of what the other does."""
    trainers = {name: trainer_of(c, "checkpoint", 8) for name, c in clusters.items()}
    for trainer in trainers.values():  # compiles
        trainer.fit(data(), steps=20, batch_size=128, progress=False)
    rates: dict[str, list[float]] = {name: [] for name in clusters}
    cpu: dict[str, list[float]] = {name: [] for name in clusters}
    for number in range(a.rounds):
        names = list(clusters)[:: 1 if number % 2 else -1]
        for name in names:
            per_s, cpu_s = timed(trainers[name], clusters[name], a.seconds)
            rates[name].append(per_s)
            cpu[name].append(cpu_s)
    shares = [x / y for x, y in zip(rates["with"], rates["without"], strict=True)]
    costs = [x / y for x, y in zip(cpu["with"], cpu["without"], strict=True)]
    measure.emit(
        "guarantees",
        transport=a.transport,
        workers=a.workers,
        steps_per_s=round(statistics.median(rates["with"]), 1),
        without_per_s=round(statistics.median(rates["without"]), 1),
        of_without=round(statistics.median(shares), 3),
        rounds=[round(x, 3) for x in shares],
        cpu_ms_per_step=round(statistics.median(cpu["with"]) * 1e3, 3),
        cpu_of_without=round(statistics.median(costs), 3),
    )


if __name__ == "__main__":
    main()
