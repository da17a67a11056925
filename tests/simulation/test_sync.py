"""Thousands of runs of synchronous training on a cluster that goes wrong."""

from functools import partial
from typing import Any

import pytest

from jgraph.graph.ir import TaskName
from jgraph.train.state.durability import Durability
from tests.support.simulation.faulty_run import FIRST, REJOIN_S, RUNS, check_each
from tests.support.simulation.leader import Leader
from tests.support.simulation.survivor_world import SurvivorWorld
from tests.support.simulation.sync_world import SyncWorld


def simulated(seed: int, readers: int = 0) -> SyncWorld:
    """Runs one cluster, with the faults that the seed chooses, to its end."""
    workers = 1 + seed % 4
    world = SyncWorld(
        seed,
        shards=1 + seed % 3,
        workers=workers,
        backups=min(seed // 4 % 3, workers - 1),
        steps=30,
        delay_s=0.02,
        readers=readers,
    )
    chance, faults = world.sim.chance, seed % 7
    tasks = [*world.workers, *world.shards, world.master.task]
    world.net.duplicates = chance.choice([0.0, 0.1])
    if seed % 5 == 2:
        world.net.duplicates = 0.5
    for _ in range(faults):
        at = chance.random() * chance.choice([0.3, 3.0])
        src, dst = chance.sample(tasks, 2)
        acts = [
            partial(world.kill, chance.choice(list(world.workers))),
            partial(world.lose_master, kill=chance.random() < 0.5),
            partial(world.net.cut, src, dst),
        ]
        if seed % 2:  # else nothing that makes a run go back
            seconds = chance.choice([0.5, 5.0, 20.0])
            acts.append(partial(world.net.silence, src, dst, seconds))
            acts.append(partial(world.kill, chance.choice(list(world.shards))))
        world.sim.later(at, chance.choice(acts))
    for i in range(6):
        world.sim.later(chance.random() * (i + 1) * 0.5, world.save)
    world.sim.run(lambda: world.state != "running", until=600.0)
    return world


def test_every_ps_makes_the_same_updates_and_no_batch_counts_twice() -> None:
    check_each(simulated)


def in_turn(seed: int) -> SyncWorld:
    """Runs such a cluster whose workers read in turn."""
    return simulated(seed, readers=1 + seed % 2)


def test_workers_that_read_in_turn_contribute_once_whatever_is_lost_or_silent() -> None:
    """Now and then what was read is not heard of: then the next ones go past it."""
    for seed in range(FIRST, FIRST + RUNS // 4):
        run = in_turn(seed)
        try:
            run.check()
        except AssertionError as error:
            error.add_note(f"JGRAPH_SIMULATION={seed} repeats it")
            raise


def test_a_run_that_loses_workers_and_masters_never_goes_back() -> None:
    for seed in range(FIRST + FIRST % 2, FIRST + RUNS // 4, 2):
        run = simulated(seed)
        assert not run.restored, f"JGRAPH_SIMULATION={seed} repeats it"


class Overtaken(SyncWorld):
    """Loses its master whenever gates open, and an order of that one comes late."""

    def open_gates(self) -> None:
        super().open_gates()
        if self.unopened and self.takeovers < 4:
            late = self.sim.chance.choice(list(self.shards))
            self.net.silence(self.master.task, late, 2 * REJOIN_S)
            self.lose_master(kill=False)


def overtaken(seed: int) -> Overtaken:
    """Runs such a cluster to its end."""
    shards, workers = 1 + seed % 3, 1 + seed % 4
    world = Overtaken(
        *(seed,), shards=shards, workers=workers, backups=0, steps=30, delay_s=0.02
    )
    world.sim.run(lambda: world.state != "running", until=600.0)
    return world


@pytest.mark.row(20)
def test_gates_are_opened_by_the_newest_master_alone() -> None:
    for seed in range(FIRST, FIRST + RUNS // 10):
        run = overtaken(seed)
        run.check()
        assert (run.takeovers, run.restored) == (4, 0), f"{seed} repeats it"


def cut_off(seed: int) -> SyncWorld:
    """Runs a cluster whose master does not reach the arbiter for a while."""
    shards, workers = 1 + seed % 3, 1 + seed % 4
    world = SyncWorld(
        *(seed,), shards=shards, workers=workers, backups=0, steps=80, delay_s=0.3
    )
    chance = world.sim.chance
    seconds = chance.choice([8.0, 14.0, 25.0])  # the connection ends after 15
    ends = world.master.task, world.deciding
    silence = partial(world.net.silence, *ends, seconds)
    world.sim.later(4.0 + chance.random(), silence)  # it decides by then
    world.sim.run(lambda: world.state != "running", until=600.0)
    return world


@pytest.mark.row(22)
def test_a_run_pauses_without_its_master_and_goes_on_when_the_link_heals() -> None:
    for seed in range(FIRST, FIRST + RUNS // 10):
        run = cut_off(seed)
        run.check()
        assert (run.pauses, run.restored) == (1, 0), f"{seed} repeats it"


@pytest.mark.parametrize("seed", [3, 6])
def test_same_seed_is_the_same_synchronous_run(seed: int) -> None:
    first, second = simulated(seed), simulated(seed)
    assert first.sim.trace == second.sim.trace
    assert len(first.sim.trace) > 100
    assert simulated(seed + 84).sim.trace != first.sim.trace


class Lossy(SyncWorld):
    """Loses two tasks at once, while an update is made, time and again."""

    def __init__(
        self,
        seed: int,
        durability: Durability,
        workers: int = 0,
        *,
        shards: int = 0,
        backups: int = 0,
        hosts: int = 0,
    ) -> None:
        self.left = 1 + seed % 3  # pairs of losses
        self.wait = seed % 10  # updates until the next
        super().__init__(
            *(seed,),
            shards=shards or 2 + seed % 2,
            workers=workers or 1 + seed % 3,
            backups=backups,
            hosts=hosts,
            steps=40,
            delay_s=0.02,
            durability=durability,
        )

    def decides(self, leader: Leader) -> None:
        super().decides(leader)
        self.wait -= 1
        if self.left and self.wait <= 0:
            self.left -= 1
            chance = self.sim.chance
            self.wait = chance.randrange(10)
            self.lose_two(chance.random() * 0.05, chance.choice([0.01, 3.0]))

    def lose_two(self, first_s: float, second_s: float) -> None:
        chance, ps = self.sim.chance, list(self.shards)
        one, other = chance.sample([*ps, *self.workers], 2)
        losses = [
            partial(self.kill, self.deciding),
            partial(self.kill, chance.choice(ps[1:])),
            partial(self.kill, chance.choice(list(self.workers))),
            partial(self.lose_master, kill=True),
            partial(self.net.cut, *chance.sample(ps, 2)),
            partial(self.net.silence, one, other, 20.0),
        ]
        first, second = chance.sample(losses, 2)
        self.sim.later(first_s, first)
        self.sim.later(first_s + chance.random() * second_s, second)


def check_updates(run: Lossy, seed: int) -> None:
    """Checks the updates of a run, which its seed repeats."""
    try:
        run.check()
        assert run.state != "done" or run.version == run.steps
    except AssertionError as error:
        error.add_note(f"JGRAPH_SIMULATION={seed} repeats it")
        raise


def lossy(seed: int, durability: Durability) -> Lossy:
    """Runs such a cluster, with checkpoints beside what is kept, to its end."""
    world = Lossy(seed, durability)
    for i in range(6):
        world.sim.later(world.sim.chance.random() * (i + 1) * 0.5, world.save)
    world.sim.run(lambda: world.state != "running", until=600.0)
    return world


@pytest.mark.row(13, 14)
@pytest.mark.parametrize("durability", ["log", "replica"])
def test_all_ps_go_on_from_one_update_after_two_losses(
    durability: Durability,
) -> None:
    """Where one of them made, logged or copied an update that another never heard of.

    The updates of every ps are the same at the end, and as many as the run says.
    """
    kept_on = refused = 0
    for seed in range(FIRST, FIRST + RUNS // 20):
        run = lossy(seed, durability)
        check_updates(run, seed)
        kept_on += run.kept_on
        refused += run.differed
    assert kept_on >= RUNS // 20
    assert refused <= kept_on / 20  # logs that began anew right then


class Owned(Lossy):
    """Workers that hold the variables: whoever is lost is lost as both.

    The two roles of a task are two simulated processes that are killed together; no
    fault is between them.
    """

    def kill(self, task: TaskName) -> None:
        number = int(task.rpartition(":")[2])
        both = f"/job:ps/task:{number}", f"/job:worker/task:{number}"
        roles = {**self.shards, **self.workers}
        for role in filter(roles.__contains__, map(TaskName, both)):
            super().kill(role)


def owned(seed: int, durability: Durability) -> Owned:
    """Runs such a cluster, with checkpoints beside what is kept, to its end."""
    world = Owned(seed, durability, workers=2 + seed % 2)
    for i in range(6):
        world.sim.later(world.sim.chance.random() * (i + 1) * 0.5, world.save)
    world.sim.run(lambda: world.state != "running", until=600.0)
    return world


@pytest.mark.row(13, 14)
@pytest.mark.parametrize("durability", ["checkpoint", "log", "replica"])
def test_workers_that_hold_the_variables_are_lost_with_them(
    durability: Durability,
) -> None:
    """No batch counts twice, and all owners have the same updates at the end."""
    kept_on = restored = 0
    for seed in range(FIRST, FIRST + RUNS // 20):
        run = owned(seed, durability)
        check_updates(run, seed)
        kept_on += run.kept_on
        restored += run.restored
    assert (restored if durability == "checkpoint" else kept_on) >= RUNS // 20


class Survived(Owned, SurvivorWorld):
    """Loses one owner, or two, of which nothing is kept but a checkpoint."""

    def lose_two(self, first_s: float, second_s: float) -> None:
        if self.sim.chance.random() < 0.5:
            super().lose_two(first_s, second_s)
        else:
            lost = self.sim.chance.choice(list(self.shards))
            self.sim.later(first_s, partial(self.kill, lost))


def survived(seed: int) -> Survived:
    """Runs such a cluster, of whose workers some may hold nothing, to its end."""
    owners = 2 + seed % 2
    workers = owners + seed // 2 % 2
    world = Survived(seed, "checkpoint", workers, shards=owners)
    world.net.duplicates = world.sim.chance.choice([0.0, 0.2])
    for i in range(6):
        world.sim.later(world.sim.chance.random() * (i + 1) * 0.5, world.save)
    world.sim.run(lambda: world.state != "running", until=600.0)
    return world


@pytest.mark.row(62)
def test_workers_give_a_lost_owner_what_is_of_the_update_told_of_last() -> None:
    """Nothing is done again then, and all owners have the same updates at the end."""
    given = 0
    for seed in range(FIRST, FIRST + max(10, RUNS // 4)):
        run = survived(seed)
        check_updates(run, seed)
        given += run.given
    assert given >= max(10, RUNS // 4) / 10


def summed_on_hosts(seed: int, durability: Durability) -> Owned:
    """Runs workers that own the variables, two on each of two or three hosts."""
    hosts = 2 + seed % 2
    there: Any = {"workers": 2 * hosts, "shards": 2 * hosts, "hosts": hosts}
    world = Owned(seed, durability, backups=seed // 2 % 2, **there)
    world.net.duplicates = world.sim.chance.choice([0.0, 0.2])
    for i in range(6):
        world.sim.later(world.sim.chance.random() * (i + 1) * 0.5, world.save)
    world.sim.run(lambda: world.state != "running", until=600.0)
    return world


@pytest.mark.row(60)
@pytest.mark.parametrize("durability", ["checkpoint", "log", "replica"])
def test_sums_of_hosts_have_what_was_decided_whoever_is_lost(
    durability: Durability,
) -> None:
    """Late contributions are in no sum, and each owner has the same updates."""
    kept_on = restored = 0
    for seed in range(FIRST, FIRST + max(4, RUNS // 20)):
        run = summed_on_hosts(seed, durability)
        check_updates(run, seed)
        kept_on += run.kept_on
        restored += run.restored
    assert (restored if durability == "checkpoint" else kept_on) >= max(4, RUNS // 20)
