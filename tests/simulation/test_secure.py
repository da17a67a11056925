"""Hundreds of runs of secure rounds on a cluster that goes wrong."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.support.simulation.faulty_run import FIRST, RUNS
from tests.support.simulation.secure_world import SecureWorld


def simulated(seed: int, *, faults: int, steps: int = 10) -> SecureWorld:
    """Runs rounds of four to six members, some of whom are lost, to their end."""
    workers = 4 + seed % 3
    world = SecureWorld(
        *(seed,),
        fraction=1.0 if seed % 3 else 0.7,
        shards=1 + seed % 2,
        workers=workers,
        steps=steps,
        delay_s=0.02,
    )
    chance = world.sim.chance
    world.net.duplicates = chance.choice([0.0, 0.2])
    members, shards = list(world.workers), list(world.shards)

    def kill_three() -> None:
        for member in chance.sample(members, 3):
            world.kill(member)

    for _ in range(faults):
        at = chance.random() * chance.choice([0.3, 2.0])
        src = chance.choice([*members, *shards])
        dst = chance.choice([one for one in (*shards, world.master.task) if one != src])
        acts: list[Callable[[], None]] = [
            partial(world.kill, chance.choice(members)),
            kill_three,
            partial(world.net.cut, src, dst),
            partial(world.net.silence, src, dst, chance.choice([0.5, 5.0])),
            partial(world.lose_master, kill=chance.random() < 0.5),
        ]
        if seed % 4 == 3:
            acts.append(partial(world.kill, chance.choice(shards)))
        act = chance.choice(acts)
        world.sim.later(at, act)
    world.sim.later(chance.random() * 2, world.save)
    world.sim.run(lambda: world.state != "running", until=900.0)
    return world


def check(run: SecureWorld, seed: int) -> None:
    try:
        run.check()
    except AssertionError as error:
        error.add_note(f"JGRAPH_SIMULATION={seed} repeats it")
        raise


@pytest.mark.row(47)
@pytest.mark.parametrize("faults", [2, 6])
def test_each_sum_is_of_who_was_decided_and_no_batch_counts_twice(faults: int) -> None:
    """Of a round that is given up nothing is known, and it begins again."""
    runs = [
        (seed, simulated(seed, faults=faults))
        for seed in range(FIRST, FIRST + max(5, RUNS // 20))
    ]
    for seed, run in runs:
        check(run, seed)
    done = [run for _, run in runs if run.state == "done"]
    assert len(done) > len(runs) / 2
    assert sum(len(run.voids) for run in done) > len(runs) / 10
