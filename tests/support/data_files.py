"""Files that sources of data read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

FUNCTIONS = "tests.support.source_functions"


def write_parquet(path: Path, first: int, count: int, **columns: Any) -> Path:
    pa = pytest.importorskip("pyarrow", reason="needs jgraph[data]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs jgraph[data]")
    numbers = np.arange(first, first + count)
    table = pa.table(
        {
            "y": numbers,
            "x": [[float(n), n / 2] for n in numbers],
            **columns,
        }
    )
    parquet.write_table(table, path, row_group_size=4)
    return path
