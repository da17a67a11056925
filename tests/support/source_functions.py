"""What tests name as data sources by import path."""

import os
import signal
import sys
from typing import Any

import numpy as np


def squares(count: int = 12) -> Any:
    import grain

    numbers = grain.MapDataset.range(count)
    return numbers.map(
        lambda i: {"x": np.array([i, i * i], np.float32), "y": np.int64(i)}
    )


def deadly(count: int, at: int) -> Any:
    """Ends the process that reads example ``at``, as too large a record would."""
    import grain

    def example(i: int) -> Any:
        if i == at:
            sys.stderr.write(f"example {at} is too large\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": np.full(4, i, np.float32), "y": np.int32(i % 2)}

    return grain.MapDataset.range(count).map(example)


def ragged() -> Any:
    return [np.zeros(2), np.zeros(2), np.zeros(3)]


def nothing() -> Any:
    return 3


def broken() -> Any:
    raise ZeroDivisionError("no data today")
