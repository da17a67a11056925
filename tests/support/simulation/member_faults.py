"""Faults of runs whose workers join and leave: by chance, or one kind after another."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from jgraph.coordination.data.slots import DEATHS
from tests.support.simulation.members import WAYS, ElasticWorld
from tests.support.simulation.run_faults import Injected

Faults: TypeAlias = Callable[[ElasticWorld], Awaitable[None]]

STANDBYS_S: Final = 4.0
"""After so long a run has two standbys again."""
BEFORE_READY: Final = tuple(way for way in WAYS if way != "begins")
"""How one fails of which no run has heard yet."""
OF_MEMBERS: Final = (
    "join",
    "two join",
    "one fails as it joins",
    "leave",
    "leave and join",
    "leave and master",
    "freeze",
    "freeze for long",
    "registrar",
)
KILLS: Final = ("worker", "ps", "master", "master and another", "cut", "halts", "named")


@dataclass
class ElasticFaults(Injected):
    """Brings about what may become of members, and other faults."""

    kinds: tuple[str, ...] = (*OF_MEMBERS, *KILLS, *OF_MEMBERS)
    asked_s: float = -math.inf
    """When a worker was told to leave, or the registrar killed: a standby, perhaps."""

    async def all(self) -> None:
        """Brings more about than may happen to a run whose workers stay."""
        chance, world = self.world.chance, self.world
        for _ in range(chance.randrange(2, 10)):
            await asyncio.sleep(chance.uniform(0.2, 4.0))
            if world.state() != "running":
                return
            fault = chance.choice(self.kinds)
            if fault in KILLS and world.clock.now() < self.asked_s + STANDBYS_S:
                continue  # a standby may have left
            await self.one(fault)
            if fault in KILLS:
                await asyncio.sleep(STANDBYS_S)

    async def one(self, fault: str) -> None:
        """Brings one about."""
        world, chance = self.world, self.world.chance
        assert isinstance(world, ElasticWorld)
        if world.state() != "running":
            return
        match fault:
            case "join" | "two join":
                for _ in range(2 if fault == "two join" else 1):
                    world.do(world.join())
            case "one fails as it joins":
                world.do(world.join(chance.choice(WAYS)))
            case "leave" | "leave and join" | "leave and master":
                await self.leave(world, fault)
            case "freeze" | "freeze for long":
                self.freeze(world, chance.uniform(*FROZEN_S[fault]))
            case "registrar":
                self.asked_s = world.clock.now()
                world.kill(world.registrar, chance.uniform(0.1, 3.0))
            case _:
                await super().one(fault)

    async def leave(self, world: ElasticWorld, fault: str) -> None:
        """Lets a worker leave, and something else happen at that moment."""
        staying = world.staying()
        if len(staying) < 2:
            return
        self.asked_s = world.clock.now()
        world.asks_to_leave(world.chance.choice(staying))
        await asyncio.sleep(world.chance.uniform(0.0, 2.0))
        if fault == "leave and join":
            world.do(world.join())
        elif fault == "leave and master" and (master := world.master()) is not None:
            world.kill(master.task, 1.0)

    async def leave_and_lose(self, world: ElasticWorld) -> None:
        """Lets a worker leave and kills another task, whichever comes first."""
        staying, master = world.staying(), world.master()
        if len(staying) < 2 or master is None:
            return
        leaver = world.chance.choice(staying)
        others = [t for t in world.tasks if t not in {leaver, master.task}]
        lost, away_s = world.chance.choice(others), world.chance.uniform(0.1, 3.0)
        self.asked_s = world.clock.now()
        acts: list[Callable[[], None]] = [
            lambda: world.asks_to_leave(leaver),
            lambda: world.kill(lost, away_s),
        ]
        world.chance.shuffle(acts)
        acts[0]()
        await asyncio.sleep(world.chance.uniform(0.0, 1.0))
        acts[1]()

    def freeze(self, world: ElasticWorld, seconds: float) -> None:
        """Freezes a worker that has joined, and looks after no run."""
        leads = world.led_by()
        joined = [
            task
            for task in world.staying()
            if world.processes[task].joined and task not in leads
        ]
        if joined:
            world.do(world.freeze(world.chance.choice(joined), seconds))


FROZEN_S: Final = {"freeze": (0.5, 5.0), "freeze for long": (6.0, 20.0)}


async def at_random(world: ElasticWorld) -> None:
    """Anything happens, at any time."""
    await ElasticFaults(world).all()


async def failing(world: ElasticWorld) -> None:
    """Whoever joins fails before it is ready."""
    for way in world.chance.sample(BEFORE_READY, len(BEFORE_READY)):
        world.do(world.join(way))
        await asyncio.sleep(world.chance.uniform(0.2, 4.0))


async def frozen(world: ElasticWorld) -> None:
    """One that has joined freezes, is given up, and wakes when others have joined."""
    await world.join()
    await asyncio.sleep(3.0)
    faults = ElasticFaults(world)
    for _ in range(2):
        faults.freeze(world, world.chance.uniform(6.0, 12.0))
        await asyncio.sleep(world.chance.uniform(0.0, 12.0))
        await world.join()
        await asyncio.sleep(2.0)


async def leaving(world: ElasticWorld) -> None:
    """Workers leave as others are lost, from the beginning of the run on."""
    faults = ElasticFaults(world)
    for _ in range(2):
        await asyncio.sleep(world.chance.uniform(0.0, 0.5))
        await faults.leave_and_lose(world)
        await world.join()
        await asyncio.sleep(STANDBYS_S)


async def too_few(world: ElasticWorld) -> None:
    """Workers die, and each time it takes a while until there are enough again."""
    for _ in range(DEATHS - 1):  # or a batch would be suspected
        await asyncio.sleep(world.chance.uniform(1.0, 4.0))
        workers = [task for task in world.staying() if task not in world.led_by()]
        world.kill(world.chance.choice(workers), world.chance.uniform(3.0, 9.0))
        await asyncio.sleep(world.chance.uniform(3.0, 9.0))
