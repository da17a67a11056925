"""Servers of small models."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jgraph as jg
from tests.support.exported import half_plus_three


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    half_plus_three(path, label="stable")
    x = {"user": np.zeros(2, np.int32), "dense": np.zeros((2, 3), np.float32)}
    w = np.arange(3, dtype=np.float32)
    jg.export(
        lambda w, x: {"score": x["dense"] @ w + x["user"], "twice": x["user"] * 2},
        x,
        path / "ctr",
        params=w,
    )
    jg.export(lambda x: x - x.mean(0), np.zeros((2, 2), np.float32), path / "mean")
    return path


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[jg.ModelServer]:
    with jg.serve(models, allow_control=True, watch_s=3600) as server:
        yield server
