"""Clicks in the format of Criteo's display advertising data.

A line per example, with a tab between fields: a label, 13 whole numbers, 26 hashed
categories in hexadecimal; of numbers and categories any may be missing. The lines are
in the order of time.

Source: Criteo, "Display Advertising Challenge", Kaggle 2014: ``train.txt``.
"""

import itertools
import math
from pathlib import Path

import numpy as np

from jgraph.errors import DataError
from jgraph.examples.clicks import BAG, BAGS, FEATURES, NUMBERS, ONE_HOT, Clicks
from jgraph.graph.rows.hash_keys import NO_KEY, split_keys

FILE = "train.txt"
MOST_LINES = 1_000_000
"""Of a longer file the first ones are read: it would not fit memory."""

_FIELDS = 1 + NUMBERS + FEATURES
_DIGITS = 8  # of a category
_MISSING = [NO_KEY] * (BAG - 1)


def load(directory: Path, most: int = MOST_LINES) -> tuple[Clicks, Clicks]:
    """Returns examples to train on, and the last tenth of them to test on.

    Numbers are scaled by a logarithm. The categories are laid out as ``make_clicks``
    lays out its own, the last three as bags of one id.

    Args:
      directory: with ``train.txt``.
      most: lines to read.

    Raises:
      DataError: no such file, a line that is no example, or nothing to learn or test;
        names file and line.
    """
    path = directory / FILE
    labels, numbers, keys = [], [], []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(itertools.islice(file, most), start=1):
                label, *rest = _fields(line, f"{path}:{number}")
                labels.append(label)
                numbers.append(_numbers(rest[:NUMBERS], f"{path}:{number}"))
                keys.append(_keys(rest[NUMBERS:], f"{path}:{number}"))
    except FileNotFoundError:
        raise DataError(
            f"{path} is not there; give --data the directory with {FILE} of Criteo's "
            "display advertising data, or leave it out for clicks that are made up"
        ) from None
    clicks: Clicks = {
        "numbers": np.array(numbers, np.float32),
        "ids": split_keys(np.array(keys, np.int64)),
        "label": np.array(labels, np.float32),
    }
    first = len(labels) - len(labels) // 10
    for part in (clicks["label"][:first], clicks["label"][first:]):
        if len(np.unique(part)) < 2:
            raise DataError(
                f"{path} has {len(labels)} examples; clicks and others must be among "
                "the last tenth, which is tested on, and among those before"
            )
    return (
        {name: values[:first] for name, values in clicks.items()},
        {name: values[first:] for name, values in clicks.items()},
    )


def _fields(line: str, where: str) -> list[str]:
    fields = line.rstrip("\r\n").split("\t")
    if len(fields) != _FIELDS:
        raise DataError(
            f"{where} has {len(fields)} fields with tabs between; there must be "
            f"{_FIELDS}: a label, {NUMBERS} numbers, {FEATURES} categories"
        )
    if fields[0] not in {"0", "1"}:
        raise DataError(f"{where} has the label {fields[0]!r:.40}; it is 0 or 1")
    return fields


def _numbers(fields: list[str], where: str) -> list[float]:
    values = []
    for place, text in enumerate(fields, start=1):
        try:
            value = int(text or "0")
        except ValueError:
            raise DataError(
                f"{where} has {text!r:.40} as number {place}; it is a whole number, or "
                "nothing where it is missing"
            ) from None
        # Some numbers of the real data are -1 or -2.
        values.append(math.copysign(math.log1p(abs(value)), value))
    return values


def _keys(fields: list[str], where: str) -> list[int]:
    keys = []
    for feature, text in enumerate(fields):
        try:
            key = int(text, 16) if text else NO_KEY
        except ValueError:
            key = -1
        if text and (len(text) > _DIGITS or key < 0):
            raise DataError(
                f"{where} has {text!r:.40} as category {feature + 1}; it is a number "
                f"of up to {_DIGITS} hexadecimal digits, or nothing where it is missing"
            )
        # The same number means another category in another feature.
        keys.append(key << 5 | feature if text else key)
        if feature >= ONE_HOT:
            keys += _MISSING
    assert len(keys) == ONE_HOT + BAGS * BAG
    return keys
