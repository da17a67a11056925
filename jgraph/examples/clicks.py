"""Clicks: synthetic ones, and those in the format of Criteo's data.

Synthetic clicks have ids by a law of Zipf, and labels by a fixed teacher. A file of
Criteo's display advertising data has a line per example, with a tab between fields: a
label, 13 whole numbers, 26 hashed categories in hexadecimal; of numbers and categories
any may be missing. The lines are in the order of time.

Source: Criteo, "Display Advertising Challenge", Kaggle 2014: ``train.txt``.
"""

import itertools
import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jgraph.errors import DataError
from jgraph.graph.rows.hash_keys import NO_KEY, Keys, hash_keys, split_keys

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Clicks: TypeAlias = dict[str, np.ndarray[Any, Any]]
"""``numbers`` float32[n, NUMBERS], ``ids`` uint32[n, PLACES, 2] and ``label``."""

NUMBERS = 13
ONE_HOT = 23
BAGS, BAG = 3, 5
FEATURES = ONE_HOT + BAGS
PLACES = ONE_HOT + BAGS * BAG

_FEATURE_OF = np.r_[np.arange(ONE_HOT), ONE_HOT + np.repeat(np.arange(BAGS), BAG)]
_ZIPF = 1.5
_TEACHER = 7


def make_clicks(examples: int, seed: int) -> Clicks:
    """Returns examples to train or test on; other seeds give others of the same law.

    Args:
      examples: how many.
      seed: decides which.
    """
    random = np.random.default_rng(seed)
    numbers = random.normal(size=(examples, NUMBERS)).astype(np.float32)
    keys = draw_keys(random, examples)
    chance = 1 / (1 + np.exp(-teach(numbers, keys)))
    label = (random.random(examples) < chance).astype(np.float32)
    return {"numbers": numbers, "ids": split_keys(keys), "label": label}


def draw_keys(random: np.random.Generator, examples: int) -> Keys:
    """Returns int64[examples, PLACES]: a place per one-hot feature, then the bags.

    A key is the rank of a value among those of its feature, and the feature, so that
    one table has them all. A bag has one id or more; ``NO_KEY`` is in its other places.
    """
    # Ranks have no bound but that of the key: a new batch brings new ids.
    ranks = random.zipf(_ZIPF, (examples, PLACES)) % (1 << 57)
    keys = (ranks << 5) | _FEATURE_OF
    sizes = random.integers(1, BAG + 1, (examples, BAGS, 1))
    bags = keys[:, ONE_HOT:].reshape(examples, BAGS, BAG)
    bags[np.arange(BAG) >= sizes] = NO_KEY
    return np.concatenate([keys[:, :ONE_HOT], bags.reshape(examples, -1)], axis=1)


def teach(numbers: Floats, keys: Keys) -> Floats:
    """Returns float[n]: the logit of a click.

    Each id has a value of its own, by its hash. The logit is linear in the numbers and
    in the features' values, and has products of neighbouring features.
    """
    random = np.random.default_rng(_TEACHER)
    values = hash_keys(keys, _TEACHER).astype(np.float64) / 2**63 - 1
    values[keys == NO_KEY] = 0
    bags = values[:, ONE_HOT:].reshape(-1, BAGS, BAG).sum(axis=2)
    each = np.concatenate([values[:, :ONE_HOT], bags], axis=1)
    linear = numbers @ random.normal(size=NUMBERS) + each @ random.normal(size=FEATURES)
    pairs = (each[:, 1:] * each[:, :-1]) @ random.normal(size=FEATURES - 1)
    # By this number about four in ten are clicks.
    return linear + pairs + 1.5  # type: ignore[no-any-return]


FILE = "train.txt"
MOST_LINES = 1_000_000
"""Of a longer file the first ones are read: it would not fit memory."""

_FIELDS = 1 + NUMBERS + FEATURES
_DIGITS = 8  # of a category
_MISSING = [NO_KEY] * (BAG - 1)


def load_criteo(directory: Path, most: int = MOST_LINES) -> tuple[Clicks, Clicks]:
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
