"""Thousands of runs whose masters, standbys, ps and clients die, each by its number.

What looks after the runs is what servers have, in virtual time; see ``run_tasks``.
"""

import asyncio

import pytest

from tests.support.simulation.faulty_run import FIRST, RUNS
from tests.support.simulation.run_faults import DURABILITIES, Injected, check
from tests.support.simulation.run_world import RunWorld, in_world
from tests.support.simulation.virtual_loop import run_virtually


async def run_of(seed: int) -> RunWorld:
    """Runs one to its end, and checks it."""
    strategy, durability = seed % 3, DURABILITIES[seed // 3 % 3]
    world = RunWorld(
        seed,
        strategy == 2,
        durability,
        has_client=durability == "checkpoint" or seed % 4 != 0,
        max_staleness=4 if strategy == 1 else None,
        ps=2 + seed % 2,
        workers=2 + seed // 2 % 2,
    )
    with in_world(world):
        await world.begin()
        injected = Injected(world)
        faults = asyncio.ensure_future(injected.all())
        state = await world.to_its_end()
        faults.cancel()
        try:
            check(world, injected, state)
        except AssertionError as error:
            error.add_note("\n".join(world.story[-30:]))
            raise
    return world


def simulated(seed: int) -> RunWorld:
    """Runs and checks the run of this number."""
    try:
        return run_virtually(run_of(seed))
    except AssertionError as error:
        error.add_note(f"JGRAPH_SIMULATION={seed} repeats it")
        raise


@pytest.mark.row(34, 35)
def test_a_run_goes_on_or_ends_as_it_should_whoever_dies() -> None:
    for seed in range(FIRST, FIRST + max(1, RUNS // 2)):
        simulated(seed)


@pytest.mark.parametrize("seed", [2, 9, 24])
def test_same_number_is_the_same_run(seed: int) -> None:
    first, second = simulated(seed), simulated(seed)
    assert first.story == second.story
    assert first.story
