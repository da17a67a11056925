"""A federated client in a process that can import neither Flax nor optax."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jgraph.launch.local.cluster import LocalCluster
from jgraph.train.data.source import Source
from jgraph.train.strategies.federated import Federated
from jgraph.train.trainer import Trainer

SITE = """
import sys

sys.modules["flax"] = sys.modules["optax"] = None  # importing them is an error
"""
OWN = """
import importlib
import sys

import numpy as np


def own():
    for name in ("flax", "optax"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        raise AssertionError(f"{name} is there")
    assert not any(name.startswith(("flax.", "optax.")) for name in sys.modules)
    x = np.random.default_rng(0).normal(size=(32, 2)).astype(np.float32)
    return [{"x": row, "y": row[:1] - row[1:]} for row in x]
"""


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.procs
def test_a_client_trains_without_flax_and_optax(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "clients_own.py").write_text(OWN)
    source = "clients_own:own"
    with LocalCluster(
        ps=1, workers=1, allow_sources=[source], env={"PYTHONPATH": str(tmp_path)}
    ) as cluster:
        trainer = Trainer(
            nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
            loss,
            optax.adam(0.05),
            cluster=cluster,
            strategy=Federated(local_epochs=5, inner_state="keep"),
        )
        run = trainer.fit(Source.grain(source), steps=20, batch_size=8, progress=False)
        assert run.metrics("loss")["value"][-1] < 1e-3
