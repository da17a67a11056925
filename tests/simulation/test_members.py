"""Runs whose workers join, leave, freeze and die, each by its number.

What must hold: a batch counts as in a run whose workers stay (M1); one that joins has
no part in an update that was begun before its round (M2); one that fails before it is
ready changes nothing for others (M3); an index is held by one process, the newest that
the registrar took (M4); with too few workers the run waits, and loses nothing (M5).
"""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.support.simulation.faulty_run import FIRST, RUNS
from tests.support.simulation.member_faults import (
    Faults,
    at_random,
    failing,
    frozen,
    too_few,
)
from tests.support.simulation.members import ElasticWorld
from tests.support.simulation.run_faults import DURABILITIES, Injected, check
from tests.support.simulation.run_world import in_world
from tests.support.simulation.virtual_loop import run_virtually


async def run_of(seed: int, faults: Faults, least: int) -> ElasticWorld:
    """Runs one to its end while something happens, and checks it."""
    strategy, durability = seed % 3, DURABILITIES[seed // 3 % 3]
    world = ElasticWorld(
        seed,
        strategy == 2,
        durability,
        has_client=durability == "checkpoint" or seed % 4 != 0,
        max_staleness=4 if strategy == 1 else None,
        ps=2 + seed % 2,
        least=least,
        updates=80,
    )
    with in_world(world):
        await world.begin()
        happens = asyncio.ensure_future(faults(world))
        state = await world.to_its_end()
        happens.cancel()
        if world.is_suspicious(state):
            return world
        try:
            check(world, Injected(world), state)
            assert not world.broken, world.broken
        except AssertionError as error:
            error.add_note("\n".join(world.story[-40:]))
            raise
    return world


def simulated(seed: int, faults: Faults = at_random, least: int = 1) -> ElasticWorld:
    """Runs and checks the run of this number."""
    try:
        return run_virtually(run_of(seed, faults, least))
    except AssertionError as error:
        error.add_note(f"JGRAPH_SIMULATION={seed} repeats it")
        raise


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
