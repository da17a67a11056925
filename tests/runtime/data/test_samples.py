"""Batches that are Poisson samples, drawn where they are read."""

from typing import Any

import numpy as np
import pytest

from jgraph.coordination.data.slots import Lease, Part, Shuffle, SlotPlan
from jgraph.runtime.data.batches import SAMPLED, ArrayReader, LeasedBatches

EXAMPLES = 103
LEASE = Lease(0, 0, 0, 1)


def reader() -> ArrayReader:
    rows = np.arange(1, EXAMPLES + 1)  # what pads a sample is 0
    return ArrayReader({"x": rows, "y": np.stack([rows, -rows], axis=1)})


def plan(batch_size: int, workers: int) -> SlotPlan:
    parts = [Part("one", 40), Part("two", EXAMPLES - 40)]
    return SlotPlan(parts, batch_size, 0, workers=workers)


class TwoParts:
    """The same examples in two files."""

    shuffle: Shuffle = "slots"

    def __init__(self) -> None:
        self._whole = reader()
        self.fields = self._whole.fields
        self.parts = plan(1, 1).parts

    def read(self, part: int, rows: Any) -> dict[str, Any]:
        return self._whole.read(0, rows + 40 * part)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_sample_has_examples_of_its_worker_and_is_padded_with_zeros(
    workers: int,
) -> None:
    slots = plan(8, workers)
    for replica in range(workers):
        source = LeasedBatches(TwoParts(), slots, replica)
        for _ in range(50):
            batch = source.read(LEASE, 0)
            sampled, x = batch[SAMPLED], batch["x"]
            count = int(sampled.sum())
            assert sampled.shape == x.shape == (slots.capacity,)
            assert sampled[:count].all()
            assert not x[count:].any()
            rows = x[:count] - 1
            assert len(set(rows.tolist())) == count
            assert (rows % workers == replica).all()
            assert (batch["y"][:count] == np.stack([x, -x], axis=1)[:count]).all()


def test_each_example_is_in_a_sample_as_often_as_the_rate_says() -> None:
    slots, draws = plan(8, 2), 4000
    counts = np.zeros(EXAMPLES)
    pairs = 0
    for replica in range(2):
        generator = np.random.default_rng(replica)
        source = LeasedBatches(TwoParts(), slots, replica, generator)
        for _ in range(draws):
            rows = source.read(LEASE, 0)["x"]
            rows = rows[rows > 0] - 1
            counts[rows] += 1
            pairs += {replica, replica + 2} <= set(rows.tolist())
    rate = slots.rate
    deviation = np.sqrt(draws * rate * (1 - rate))
    assert np.abs(counts - draws * rate).max() < 5 * deviation
    # Two examples are in it independently of each other.
    each = rate**2
    assert abs(pairs - 2 * draws * each) < 5 * np.sqrt(2 * draws * each)


def test_nobody_can_tell_the_next_sample() -> None:
    first, second = (LeasedBatches(TwoParts(), plan(30, 1)) for _ in range(2))
    samples = [s.read(LEASE, 0)["x"].tolist() for s in (first, first, second)]
    assert len({tuple(sample) for sample in samples}) == 3
