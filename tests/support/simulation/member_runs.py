"""Runs whose workers join and leave, each by its number, from begin to end."""

import asyncio

from tests.support.simulation.member_faults import Faults, at_random
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
