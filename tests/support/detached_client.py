"""A client that begins a detached run: ``… TARGET STRATEGY CHECKPOINTS FILES EVERY``.

It says so when the run has begun, and does not end by itself.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from jgraph.client.cluster import connect
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.data.source import Source
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, after, trainer

STRATEGIES: dict[str, Strategy] = {
    "async": AsyncPS(),
    "int8": AsyncPS(gradient_dtype="int8", max_staleness=8),
    "replica": AsyncPS(durability="replica"),
    "log": AsyncPS(durability="log"),
    "sync replica": SyncPS(durability="replica"),
    "sync log": SyncPS(durability="log"),
    "sync": SyncPS(),
    "sync int8": SyncPS(gradient_dtype="int8"),
}


def begin_and_kill(
    target: str,
    strategy: str,
    saved_in: Path | None = None,
    files: Path | None = None,
    every: int = 10**6,
) -> None:
    """Lets such a client begin a run, and kills it when that has made some steps."""
    command = [sys.executable, "-m", __name__, target, strategy]
    command += ["" if path is None else str(path) for path in (saved_in, files)]
    command += [str(every)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "begun\n"
    client.kill()
    client.wait(10)
    client.stdout.close()


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
