"""A client that trains until it is killed: ``… fit_forever TARGET DIRECTORY``."""

import sys
from pathlib import Path
from typing import Any

from jgraph.client.cluster import connect
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.strategies.async_runner import AsyncPS
from tests.support.counting import BATCH, IDS, trainer


def main(target: str, directory: str) -> None:
    """Says so when there is a checkpoint."""
    told: list[bool] = []

    def tell(run: Any, report: Any) -> None:
        if not told and steps_in(Path(directory)):
            told.append(True)
            sys.stdout.write("saved\n")
            sys.stdout.flush()

    trainer(connect(target), AsyncPS()).fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=Checkpoints(directory, every=50),
        callbacks=[tell],
        progress=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
