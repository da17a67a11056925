"""Thousands of runs on a cluster that goes wrong, each decided by its number.

``make sim`` runs thousands. A run that fails is repeated by its number alone.
"""

from functools import partial

import pytest

from tests.support.simulation.faulty_run import check_each
from tests.support.simulation.world import World


def simulated(seed: int) -> World:
    """Runs one cluster, with the faults that the seed chooses, to its end."""
    size = {"shards": 1 + seed % 3, "workers": 1 + seed % 4}
    world = World(seed, **size, batches=40, delay_s=0.02)
    chance, faults = world.sim.chance, 2 + seed % 7
    tasks = [*world.workers, *world.shards]
    world.net.duplicates = chance.choice([0.0, 0.1])
    if seed % 5 == 2:
        world.net.duplicates = 0.5
    for _ in range(faults):
        at = chance.random() * chance.choice([0.3, 3.0])
        src, dst = chance.sample([*tasks, world.master.task], 2)
        acts = [
            partial(world.kill, chance.choice(list(world.workers))),
            partial(world.net.cut, src, dst),
            partial(world.net.silence, src, dst, chance.choice([0.5, 5.0, 20.0])),
        ]
        if seed % 2:
            acts.append(partial(world.kill, chance.choice(list(world.shards))))
        acts.append(partial(world.lose_master, kill=chance.random() < 0.5))
        world.sim.later(at, chance.choice(acts))
    world.sim.later(0.0, world.save)
    for i in range(4):
        world.sim.later(chance.random() * (i + 1), world.save)
    world.sim.run(lambda: world.state != "running", until=600.0)
    return world


@pytest.mark.row(7)
def test_no_batch_is_left_out_and_no_update_lost_or_applied_twice() -> None:
    check_each(simulated)


@pytest.mark.parametrize("seed", [3, 4])
def test_same_seed_is_the_same_run(seed: int) -> None:
    first, second = simulated(seed), simulated(seed)
    assert first.sim.trace == second.sim.trace
    assert len(first.sim.trace) > 100
    assert simulated(seed + 8).sim.trace != first.sim.trace
