"""What tests name as data sources by import path."""

from typing import Any

import numpy as np


def squares(count: int = 12) -> Any:
    import grain

    numbers = grain.MapDataset.range(count)
    return numbers.map(
        lambda i: {"x": np.array([i, i * i], np.float32), "y": np.int64(i)}
    )


def ragged() -> Any:
    return [np.zeros(2), np.zeros(2), np.zeros(3)]


def nothing() -> Any:
    return 3


def broken() -> Any:
    raise ZeroDivisionError("no data today")
