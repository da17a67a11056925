"""Small exported models for tests."""

from pathlib import Path
from typing import Any

import numpy as np

import jgraph as jg

ROOT = Path(__file__).resolve().parents[2]


def half_plus_three(models: Path, **options: Any) -> jg.ExportedModel:
    """The model of TensorFlow Serving's documentation."""
    x = np.zeros(1, np.float32)
    path = models / "half_plus_three"
    exported: jg.ExportedModel = jg.export(lambda x: x / 2 + 3, x, path, **options)
    return exported


def ask(models: Path) -> list[float]:
    """What it answers in this process."""
    model = jg.ExportedModel(models / "half_plus_three")
    answer: list[float] = model.predict([1, 2, 5])["y"].tolist()
    return answer
