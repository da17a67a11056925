"""Hundreds of runs that exchange a fragment of the model at a time, and go wrong."""

from functools import partial

import pytest

from jgraph.train.state.durability import Durability
from tests.support.simulation.faulty_run import FIRST, RUNS
from tests.support.simulation.fragment_world import FragmentWorld


def simulated(seed: int, durability: Durability, overlap: float) -> FragmentWorld:
    """Runs one cluster, with the faults that the seed chooses, to its end."""
    workers = 2 + seed % 3
    world = FragmentWorld(
        *(seed,),
        count=2 + seed % 3,
        overlap=overlap,
        shards=1 + seed % 3,
        workers=workers,
        backups=seed // 2 % 2,
        steps=30,
        delay_s=0.02,
        durability=durability,
    )
    chance = world.sim.chance
    world.net.duplicates = chance.choice([0.0, 0.1])
    tasks = [*world.workers, *world.shards, world.master.task]
    for _ in range(seed % 7):
        at = chance.random() * chance.choice([0.5, 3.0])
        src, dst = chance.sample(tasks, 2)
        acts = [
            partial(world.kill, chance.choice(list(world.workers))),
            partial(world.kill, chance.choice(list(world.shards))),
            partial(world.lose_master, kill=chance.random() < 0.5),
            partial(world.net.cut, src, dst),
            partial(world.net.silence, src, dst, 0.5),
        ]
        world.sim.later(at, chance.choice(acts))
    for i in range(6):
        world.sim.later(chance.random() * (i + 1) * 0.5, world.save)
    world.sim.run(lambda: world.state != "running", until=600.0)
    return world


@pytest.mark.parametrize("overlap", [0.0, 0.5])
@pytest.mark.parametrize("durability", ["checkpoint", "replica"])
def test_each_fragment_is_applied_to_what_its_workers_read_of_it(
    durability: Durability, overlap: float
) -> None:
    """Whoever is lost, is late, or missed an update: and no batch counts twice."""
    contributions = unsure = 0
    for seed in range(FIRST, FIRST + max(5, RUNS // 20)):
        try:
            run = simulated(seed, durability, overlap)
            run.check()
        except AssertionError as error:
            error.add_note(f"JGRAPH_SIMULATION={seed} repeats it")
            raise
        contributions += run.contributions
        unsure += run.unsure
    assert unsure < contributions / 50
