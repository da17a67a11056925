"""A client that begins a detached run: ``… TARGET STRATEGY CHECKPOINTS FILES EVERY``.

It says so when the run has begun, and does not end by itself. Others look
at the run now and then, and follow it at its end.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jgraph.client.cluster import Cluster, connect
from jgraph.client.runs.runs import RunInfo
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.data.source import Source
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, after, trainer
from tests.support.fault import Stopwatch

STRATEGIES: dict[str, Strategy] = {
    "async": AsyncPS(),
    "int8": AsyncPS(gradient_dtype="int8", max_staleness=8),
    "replica": AsyncPS(durability="replica"),
    "log": AsyncPS(durability="log"),
    "sync replica": SyncPS(durability="replica"),
    "sync log": SyncPS(durability="log"),
    "sync": SyncPS(),
    "sync int8": SyncPS(gradient_dtype="int8"),
    "workers": SyncPS(dense="workers"),
}


@contextmanager
def begun(
    target: str,
    strategy: str,
    saved_in: Path | None = None,
    files: Path | None = None,
    every: int = 10**6,
) -> Iterator[None]:
    """Lets such a client begin a run that makes some steps; kills it at the end."""
    command = [sys.executable, "-m", __name__, target, strategy]
    command += ["" if path is None else str(path) for path in (saved_in, files)]
    command += [str(every)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    try:
        assert client.stdout.readline() == "begun\n"
        yield
    finally:
        client.kill()
        client.wait(10)
        client.stdout.close()


def begin_and_kill(target: str, strategy: str, *saved: Any, **options: Any) -> None:
    """Lets such a client begin a run, and kills it; see ``begun``."""
    with begun(target, strategy, *saved, **options):
        pass


def until(cluster: Cluster, what: Callable[[RunInfo], object]) -> RunInfo:
    """Waits until the run is as it is wanted; nobody lists it while masters change."""
    clock = Stopwatch()
    while True:
        for run in cluster.runs():
            assert run.state == "running", run
            if what(run):
                return run
        assert clock.seconds < 60, f"{what} does not come: {cluster.runs()}"


def until_further(cluster: Cluster, steps: int = 100) -> None:
    """Waits until the run has made so many steps more."""
    end = until(cluster, lambda run: True).step + steps
    until(cluster, lambda run: run.step >= end)


def main(target: str, strategy: str, saved_in: str, files: str, every: str) -> None:
    """Begins it."""

    def tell() -> None:
        sys.stdout.write("begun\n")
        sys.stdout.flush()

    options: Any = {"batch_size": BATCH, "progress": False, "detached": True}
    if saved_in:
        options["checkpoint"] = Checkpoints(saved_in, every=int(every), keep=1000)
    data = Source.parquet(f"{files}/*.parquet") if files else IDS
    trainer(connect(target), STRATEGIES[strategy]).fit(
        data, steps=10**6, callbacks=[after(50, tell)], **options
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
