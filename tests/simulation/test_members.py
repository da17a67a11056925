"""Runs whose workers join, leave, freeze and die, each by its number.

What must hold: a batch counts as in a run whose workers stay (M1); one that joins has
no part in an update that was begun before its round (M2); one that fails before it is
ready changes nothing for others (M3); an index is held by one process, the newest that
the registrar took (M4); with too few workers the run waits, and loses nothing (M5).
"""

from collections.abc import Callable, Iterator

import pytest

from tests.support.simulation.faulty_run import FIRST, RUNS
from tests.support.simulation.member_faults import failing, frozen, leaving, too_few
from tests.support.simulation.member_runs import simulated
from tests.support.simulation.members import ElasticWorld


def each(share: int, run: Callable[[int], ElasticWorld]) -> Iterator[ElasticWorld]:
    """Runs one of so many simulations."""
    for seed in range(FIRST, FIRST + max(3, RUNS // share)):
        yield run(seed)


@pytest.mark.row(38, 42)
def test_no_batch_is_lost_or_comes_twice_whoever_joins_and_leaves() -> None:
    joined = left = 0
    for world in each(8, simulated):
        joined += world.joined
        left += world.left
    assert joined
    assert left


@pytest.mark.row(38)
def test_a_worker_that_fails_before_it_is_ready_changes_nothing_for_others() -> None:
    for world in each(20, lambda seed: simulated(seed, failing)):
        loops = world.workers + world.synchronous
        assert sorted(world.begun) == [f"run-{n}" for n in range(loops)]


@pytest.mark.row(42)
def test_a_worker_that_leaves_as_another_task_is_lost_costs_no_batch() -> None:
    runs = each(20, lambda seed: simulated(seed, leaving))
    assert sum(world.left for world in runs)


@pytest.mark.row(41)
def test_a_worker_that_wakes_when_another_has_its_index_adds_nothing() -> None:
    runs = each(20, lambda seed: simulated(seed, frozen))
    assert sum(len(world.replaced) for world in runs)


@pytest.mark.row(42)
def test_a_run_with_too_few_workers_waits_and_loses_nothing() -> None:
    for world in each(20, lambda seed: simulated(seed, too_few, least=2)):
        assert world.short_s < 3.0, world.story


def test_same_number_is_the_same_run_of_members() -> None:
    first, second = simulated(4), simulated(4)
    assert first.story == second.story
    assert first.story
