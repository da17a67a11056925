"""The census income data: its files, and the features of a Wide & Deep model.

Source: Kohavi, "Scaling up the accuracy of naive-Bayes classifiers", 1996 (the "Adult"
data); the features follow TensorFlow's tutorial on wide and deep learning.
"""

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jgraph.errors import DataError
from jgraph.runtime.data.batches import Array

COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status"),
    *("occupation", "relationship", "race", "sex", "capital-gain", "capital-loss"),
    *("hours-per-week", "native-country", "income"),
)
NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_SKEWED = {"capital-gain", "capital-loss"}  # mostly 0, else thousands
CATEGORIES = (
    *("workclass", "education", "marital-status", "occupation", "relationship"),
    *("race", "sex", "native-country"),
)
MISSING = "?"
_LABELS = {"<=50K": 0.0, ">50K": 1.0}

BOUNDARIES: Mapping[str, tuple[int, ...]] = {
    "age": (18, 25, 30, 35, 40, 45, 50, 55, 60, 65),
    "hours-per-week": (20, 35, 40, 41, 50, 60),
    "capital-gain": (1, 3000, 5000, 7000, 10000, 20000),
    "capital-loss": (1, 1500, 1800, 2000, 2300),
}
"""Where the buckets of a number begin; the first bucket is what is below."""

CROSSES: tuple[tuple[str, ...], ...] = (
    ("education", "occupation"),
    ("age", "education", "occupation"),
    ("native-country", "occupation"),
    ("marital-status", "education"),
    ("relationship", "occupation"),
    ("age", "hours-per-week"),
)
WIDE_ROWS = 100_000
DEEP_ROWS = 4_000

Table: TypeAlias = dict[str, Array]
"""A column by name: text for categories, float64 for numbers and the label."""


def read_table(path: Path) -> Table:
    """Reads ``adult.data`` or ``adult.test``.

    A line has 15 fields with commas between them. Empty lines, a line of column names
    and lines that begin with ``|`` are left out; a label may end with a period.

    Raises:
      DataError: no such file, or a line that is no such record; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise DataError(
            f"{path} is not there; give --data the directory with adult.data and "
            "adult.test of the census income data, which are at "
            "https://archive.ics.uci.edu/dataset/2/adult"
        ) from None
    rows = [
        _fields(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith(("|", "age,"))
    ]
    if not rows:
        raise DataError(f"{path} has no records")
    table: Table = dict(zip(COLUMNS, np.array(rows).T, strict=True))
    numeric = (*NUMBERS, "income")
    return {k: v.astype(np.float64) if k in numeric else v for k, v in table.items()}


def _fields(line: str, where: str) -> list[str]:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(COLUMNS):
        raise DataError(f"{where} has {len(fields)} fields; there must be 15")
    label = _LABELS.get(fields[-1].removesuffix("."))
    if label is None:
        raise DataError(f"{where} has the label {fields[-1]!r}; it is <=50K or >50K")
    for name in NUMBERS:
        text = fields[COLUMNS.index(name)]
        if not text.isdecimal():
            raise DataError(f"{where} has {name} {text!r}, which is not a number")
    return [*fields[:-1], str(label)]


def load(directory: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns the features of (training data, test data) in a directory.

    Raises:
      DataError: a file is not there, or has a line that is no record.
    """
    train = read_table(directory / "adult.data")
    test = read_table(directory / "adult.test")
    scales = {name: (column.mean(), column.std()) for name, column in _scaled(train)}
    return features(train, scales), features(test, scales)


def features(
    table: Table, scales: Mapping[str, tuple[float, float]]
) -> dict[str, Array]:
    """Returns what the model takes, ``n`` examples.

    Args:
      table: as ``read_table`` returns it.
      scales: mean and standard deviation of each number in the training data.

    Returns:
      ``wide`` int32[n, k]: rows of categories, buckets and crosses, -1 where a value
      is missing; ``deep`` int32[n, 12]: rows of categories and buckets, where
      "missing" is a category too; ``numbers`` float32[n, 5]: near -1 … 1;
      ``label`` float32[n]: 1 for an income above 50,000 dollars.
    """
    texts = {name: table[name] for name in CATEGORIES} | {
        name: np.searchsorted(boundaries, table[name], side="right").astype(str)
        for name, boundaries in BOUNDARIES.items()
    }
    singles = [(name,) for name in texts]
    numbers = [
        (column - scales[name][0]) / max(scales[name][1], 1e-6)
        for name, column in _scaled(table)
    ]
    return {
        "wide": _hashed(texts, [*singles, *CROSSES], WIDE_ROWS, missing=-1),
        "deep": _hashed(texts, singles, DEEP_ROWS),
        "numbers": np.stack(numbers, axis=1).astype(np.float32),
        "label": table["income"].astype(np.float32),
    }


def _scaled(table: Table) -> Iterable[tuple[str, Array]]:
    for name in NUMBERS:
        yield name, np.log1p(table[name]) if name in _SKEWED else table[name]


def _hashed(
    texts: Mapping[str, Array],
    crosses: Sequence[tuple[str, ...]],
    rows: int,
    missing: int | None = None,
) -> Array:
    """Returns int32[n, crosses]: the row of each combination of values, by hash."""
    columns = [_hash_cross(texts, names, rows, missing) for names in crosses]
    return np.stack(columns, axis=1)


def _hash_cross(
    texts: Mapping[str, Array], names: tuple[str, ...], rows: int, missing: int | None
) -> Array:
    known: dict[tuple[str, ...], int] = {}
    values = list(zip(*(texts[name].tolist() for name in names), strict=True))
    for value in dict.fromkeys(values):
        if missing is not None and MISSING in value:
            known[value] = missing
        else:
            pairs = itertools.chain.from_iterable(zip(names, value, strict=True))
            # CRC-32: the same on every machine and in every run, unlike Python's hash.
            known[value] = zlib.crc32("\0".join(pairs).encode()) % rows
    return np.array([known[value] for value in values], np.int32)
