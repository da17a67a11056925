"""Synthetic clicks: ids by a law of Zipf, labels by a fixed teacher."""

from typing import Any, TypeAlias

import numpy as np

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
