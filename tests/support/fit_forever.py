"""A client that trains until it is killed: ``… TARGET DIRECTORY STRATEGY LEASE_S``."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jgraph.client.cluster import connect
from jgraph.cluster.deadlines import CLIENT_S
from jgraph.runtime.files.step_files import steps_in
from jgraph.train import trainer as trainers
from jgraph.train.checkpoint.checkpoints import Checkpoints
from tests.support.counting import BATCH, IDS, trainer
from tests.support.detached_client import STRATEGIES


@contextmanager
def fitting(
    target: str, directory: Path, strategy: str = "async", lease_s: float = CLIENT_S
) -> Iterator["subprocess.Popen[str]"]:
    """Lets such a client train, and has it once there is a checkpoint; kills it then.

    It says how its run ended, if it does.
    """
    arguments = [target, str(directory), strategy, str(lease_s)]
    command = [sys.executable, "-m", __name__, *arguments]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    try:
        assert client.stdout.readline() == "saved\n"
        yield client
    finally:
        client.kill()
        client.wait(10)
        client.stdout.close()


def fit_and_kill(target: str, directory: Path, *how: Any, **more: Any) -> None:
    """Lets such a client train, and kills it when there is a checkpoint."""
    with fitting(target, directory, *how, **more):
        pass


def main(target: str, directory: str, strategy: str, lease_s: str) -> None:
    """Says so when there is a checkpoint."""
    vars(trainers)["CLIENT_S"] = float(lease_s)
    told: list[bool] = []

    def tell(run: Any, report: Any) -> None:
        if not told and steps_in(Path(directory)):
            told.append(True)
            sys.stdout.write("saved\n")
            sys.stdout.flush()

    run = trainer(connect(target), STRATEGIES[strategy]).fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=Checkpoints(directory, every=50),
        callbacks=[tell],
        progress=False,
    )
    sys.stdout.write(f"{run.state} {run.steps}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
