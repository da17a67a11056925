"""How large a Poisson sample may be."""

import pytest
from scipy.stats import binom  # type: ignore[import-untyped]

from jgraph.coordination.data.poisson import capacity, population, sampling_rate
from jgraph.coordination.data.slots import Lease, Part, SlotPlan


@pytest.mark.parametrize(
    ("examples", "batch_size", "workers"),
    [(60_000, 256, 1), (1500, 32, 2), (40, 16, 2), (100, 1, 1), (10**6, 2048, 8)],
)
def test_a_sample_that_is_too_large_comes_never(
    examples: int, batch_size: int, workers: int
) -> None:
    room = capacity(examples, batch_size, workers)
    most = population(examples, workers, 0)
    rate = sampling_rate(examples, batch_size, workers)
    assert binom.sf(room, most, rate) <= 2.0**-80
    assert min(most, batch_size) <= room <= most
    # Chernoff's bound is not far from that: half of what is above the mean is needed.
    if room < most:
        halfway = batch_size + (room - batch_size) // 2
        assert binom.sf(halfway, most, rate) > 2.0**-80


def test_all_examples_are_in_a_sample_of_all() -> None:
    assert capacity(100, 100, 1) == 100
    assert capacity(100, 50, 2) == 50


def test_a_plan_of_samples_travels_with_who_draws_them() -> None:
    plan = SlotPlan([Part("data", 100)], 10, 0, workers=4)
    again = SlotPlan.from_dict(plan.to_dict())
    assert (again.rate, again.capacity) == (plan.rate, plan.capacity) == (0.4, 25)
    assert again.is_that_of({"plan": plan.to_dict()})
    other = SlotPlan([Part("data", 100)], 10, 0, workers=2)
    assert not other.is_that_of({"plan": plan.to_dict()})


def test_nobody_knows_the_examples_of_a_sample_that_ended_workers() -> None:
    plan = SlotPlan([Part("data", 100)], 10, 0, workers=4)
    error = plan.deadly(Lease(0, 0, 3, 1), 3)
    assert "they were drawn there" in str(error)
    assert error.details["examples"] == []
