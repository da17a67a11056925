"""Runs whose ps and workers join, leave and die, each by its number."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from jgraph.coordination.run.recovery import ATTEMPTS
from jgraph.failpoints import armed
from jgraph.graph.ir import TaskName
from tests.support.simulation.member_faults import KILLS, STANDBYS_S, ElasticFaults
from tests.support.simulation.members import WAYS
from tests.support.simulation.ps_moves import MOST, RescaledWorld
from tests.support.simulation.run_faults import Injected, check
from tests.support.simulation.run_world import LEASE_S, in_world
from tests.support.simulation.virtual_loop import run_virtually

OF_PS: Final = (
    "ps joins",
    "two ps join",
    "ps joins",
    "ps fails as it joins",
    "ps leaves",
    "ps leaves",
    "ps joins, and another dies",
    "ps leaves, and another dies",
    "ps joins, and the master dies",
)


UNHEARD_S: Final = 30.0
"""Longer than it waits for them."""
DEAF_S: Final = 3.0
"""Less than it takes until a connection is given up."""
UNREAD_S: Final = 1.5
"""Less than a master waits until its standbys have read its journal."""
GIVEN_UP: Final = f"{ATTEMPTS} times already"
"""A run gives up after so many losses without progress."""


@dataclass
class PsFaults(ElasticFaults):
    """Brings about what may become of ps and workers."""

    kinds: tuple[str, ...] = (*OF_PS, *OF_PS, "join", "leave", *KILLS)

    async def one(self, fault: str) -> None:
        """Brings one about."""
        world, chance = self.world, self.world.chance
        assert isinstance(world, RescaledWorld)
        if world.state() != "running":
            return
        if (
            fault == "master and another"
            and len(list(filter(world.is_up, world.tasks))) < 4
        ):
            fault = "master"  # or nobody has the journal
        match fault:
            case "ps joins" | "two ps join":
                for _ in range(2 if fault == "two ps join" else 1):
                    self.join(world)
            case "ps fails as it joins":
                self.join(world, chance.choice(WAYS))
            case "ps leaves":
                self.leaves(world)
            case "ps joins, and the master dies":
                self.join(world)
                await self.then(world, "master")
            case "ps joins, and another dies" | "ps leaves, and another dies":
                if fault.startswith("ps joins"):
                    self.join(world)
                else:
                    self.leaves(world)
                await self.then(world, chance.choice(["worker", "ps", "cut"]))
            case _:
                await super().one(fault)

    def join(self, world: RescaledWorld, fails: str = "") -> None:
        """Lets a ps join, if there are not as many as there may be."""
        if len(world.staying_ps()) < MOST:
            world.do(world.join(fails, job="ps"))

    def leaves(self, world: RescaledWorld) -> None:
        """Lets the last ps leave."""
        staying = world.staying_ps()
        if len(staying) > 1:
            self.asked_s = world.clock.now()
            world.asks_to_leave(staying[-1])

    async def then(self, world: RescaledWorld, fault: str) -> None:
        """Brings another fault about while variables may be on their way."""
        await asyncio.sleep(world.chance.uniform(0.0, 4.0))
        if world.state() == "running":
            await super().one(fault)
            await asyncio.sleep(STANDBYS_S)


Faults: TypeAlias = Callable[[RescaledWorld], Awaitable[None]]


async def at_random(world: RescaledWorld) -> None:
    """Anything happens, at any time."""
    await PsFaults(world).all()


async def dies_when_switched(world: RescaledWorld) -> None:
    """Nobody hears of a switch at once, and then its master dies."""

    def cut() -> None:
        if world.chance.random() < 0.5:  # its journal alone does not arrive
            world.unread_until = world.clock.now() + UNREAD_S
            return
        if (master := world.master()) is not None:
            for task in list(world.tasks):
                if task != master.task:
                    world.cut(master.task, task, DEAF_S)

    await asyncio.sleep(world.chance.uniform(STANDBYS_S, 2 * STANDBYS_S))
    kill = partial(kill_master, world)
    with armed("rescale.told", cut), armed("rescale.switched", kill):
        PsFaults(world).join(world)
        await asyncio.sleep(4 * STANDBYS_S)


def kill_master(world: RescaledWorld) -> None:
    """Kills a master at a point of its work."""
    if (master := world.master()) is not None:
        world.kill(master.task, DEAF_S)
        raise asyncio.CancelledError  # a process that is gone does nothing more


async def dies_unheard(world: RescaledWorld) -> None:
    """A master dies before any standby has read of a switch; the client may have."""
    points = ["rescale.told", "rescale.switched"]
    if not world.synchronous:  # else the first ps knows of the loop that decides
        points += ["rescale.retired"] * 2
    await dies_with(world, world.chance.choice(points))


async def all_die_that_know(world: RescaledWorld) -> None:
    """As above, and all ps die with the master: the client alone knows."""

    def that_know() -> list[TaskName]:
        ps = world.staying_ps()
        world.moved(len(ps))  # it has just read of it
        return ps

    await dies_with(world, "rescale.switched", that_know)


async def dies_with(
    world: RescaledWorld,
    point: str,
    others: Callable[[], Iterable[TaskName]] = tuple,
) -> None:
    """A master dies, and others, at a point of a rescale that no standby hears of."""
    died = asyncio.Event()

    def deafen() -> None:
        world.unread_until = world.clock.now() + UNHEARD_S
        if point == "rescale.retired":  # loops begin before: who has one is gone
            for task in set(world.staying()).difference(world.led_by()):
                world.kill(task, DEAF_S)

    def kill() -> None:
        died.set()
        world.unread_until = 0.0
        for task in others():
            world.kill(task, DEAF_S)
        kill_master(world)

    await asyncio.sleep(world.chance.uniform(2 * STANDBYS_S, 3 * STANDBYS_S))
    with armed("rescale.moved", deafen), armed(point, kill):
        PsFaults(world).join(world)
        await died.wait()


async def dies_as_loops_end(world: RescaledWorld) -> None:
    """A worker dies, and its last update is made when the others are at rest."""

    def kill() -> None:
        leads = world.led_by()
        for task in world.staying():
            if task not in leads:
                world.kill(task, DEAF_S)

    world.slow_share = 1.0
    await asyncio.sleep(world.chance.uniform(STANDBYS_S, 2 * STANDBYS_S))
    with armed("rescale.ahead", kill):
        PsFaults(world).join(world)
        await asyncio.sleep(2 * STANDBYS_S)


async def nobody_trains(world: RescaledWorld) -> None:
    """All workers die as a ps joins that takes no program, and come back later."""
    await asyncio.sleep(2 * STANDBYS_S)
    PsFaults(world).join(world, "hangs")
    for task in world.staying():
        world.kill(task, 20.0)


async def dies_as_it_goes_back(world: RescaledWorld) -> None:
    """A ps is lost, and then the master that takes the run back for it."""
    await asyncio.sleep(world.chance.uniform(2 * STANDBYS_S, 3 * STANDBYS_S))
    master = world.master()
    assert master is not None
    world.kill(world.chance.choice(world.staying_ps()), world.chance.uniform(0.1, 1.0))
    await asyncio.sleep(world.chance.uniform(0.0, 2.0))
    world.kill(master.task, DEAF_S)


async def client_is_away(world: RescaledWorld) -> None:
    """The client goes while variables move, and is back within its lease."""
    faults = PsFaults(world)
    await asyncio.sleep(world.chance.uniform(STANDBYS_S, 2 * STANDBYS_S))
    for begin in (faults.join, faults.leaves):
        begin(world)
        await asyncio.sleep(world.chance.uniform(0.0, 1.5))
        await world.client.away(world.chance.uniform(0.1, LEASE_S - 1.0))
        await asyncio.sleep(STANDBYS_S)


async def link_is_silent(world: RescaledWorld) -> None:
    """Two ps do not reach each other while variables are to move between them."""
    faults = PsFaults(world)
    await asyncio.sleep(world.chance.uniform(STANDBYS_S, 2 * STANDBYS_S))
    faults.join(world)
    for silent_s in (5.0, 20.0):
        await asyncio.sleep(world.chance.uniform(0.0, 1.5))
        if len(there := world.staying_ps()) > 1:
            world.cut(there[-2], there[-1], silent_s)
        await asyncio.sleep(silent_s + STANDBYS_S)
        faults.leaves(world)


async def master_leaves(world: RescaledWorld) -> None:
    """The last ps is the master, and leaves."""
    faults = PsFaults(world)
    await asyncio.sleep(STANDBYS_S)
    if len(world.staying_ps()) < 2:
        faults.join(world)
        await asyncio.sleep(STANDBYS_S)
    for _ in range(MOST):
        if (master := world.master()) is None or master.task in world.staying_ps()[1:]:
            break
        await faults.one("named")  # so that the next one takes over
        await asyncio.sleep(STANDBYS_S)
    faults.leaves(world)


async def run_of(seed: int, faults: Faults) -> RescaledWorld:
    """Runs one to its end, and checks it."""
    strategy = seed % 3
    world = RescaledWorld(
        seed,
        strategy == 2,
        "checkpoint",
        max_staleness=4 if strategy == 1 else None,
        ps=1 + seed // 3 % 2,
        least=1,
        updates=80,
    )
    with in_world(world):
        await world.begin()
        happens = asyncio.ensure_future(faults(world))
        state = await world.to_its_end()
        happens.cancel()
        if world.is_suspicious(state) or GIVEN_UP in world.why():
            return world
        try:
            check(world, Injected(world), state)
            assert not world.broken, world.broken
        except AssertionError as error:
            error.add_note("\n".join(world.story[-60:]))
            raise
    return world


def rescaled(seed: int, faults: Faults = at_random) -> RescaledWorld:
    """Runs and checks the run of this number."""
    try:
        return run_virtually(run_of(seed, faults))
    except AssertionError as error:
        error.add_note(f"JGRAPH_SIMULATION={seed} repeats it")
        raise
