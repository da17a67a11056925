"""The Python with the other JAX that jgraph supports, and what a client does there."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from tests.support.exported import ROOT


def newest_python() -> str:
    """The Python with the other JAX, which ``make test`` has; else skips."""
    given = os.environ.get("JGRAPH_SECOND_PYTHON")
    python = Path(given) if given else ROOT / ".venv-newest" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no Python with another JAX at {python}: make test looks for one")
    return str(python)


def run_there(code: str, argument: object, home: Path) -> list[str]:
    """Returns what a program of the other Python prints, by lines."""
    done = subprocess.run(
        [newest_python(), "-c", code, str(argument)],
        check=False,
        timeout=100,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class Table(nnx.Module):
    """Rows, statistics of batches and a layer: some of each kind of variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rows = nnx.Embed(40, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.out(self.norm(self.rows(ids)))[:, 0]


def _loss(model: Table, batch: Any) -> Any:
    ids, target = batch
    return ((model(ids) - target) ** 2).mean()


def losses_of_training(cluster: Any) -> list[float]:
    """Trains a model of constants on a cluster, synchronously."""
    model = Table(nnx.Rngs(0))
    model.rows.embedding[...] = np.linspace(-1, 1, 160, dtype=np.float32).reshape(40, 4)
    model.out.kernel[...] = np.ones((4, 1), np.float32)
    ids = np.arange(160, dtype=np.int32) % 40
    target = np.sin(ids, dtype=np.float32)
    optimizer = optax.adam(0.01)
    trainer = jg.Trainer(model, _loss, optimizer, cluster=cluster, strategy=jg.SyncPS())
    run = trainer.fit((ids, target), batch_size=20, steps=12, progress=False)
    losses = [float(loss) for loss in run.metrics("loss")["value"]]
    trainer.close()
    return losses
