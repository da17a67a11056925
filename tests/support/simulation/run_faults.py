"""Faults of simulated runs, and what must hold when such a run is over."""

import asyncio
from dataclasses import dataclass
from typing import Final

from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.train.state.durability import Durability
from tests.support.simulation.run_tasks import RUN
from tests.support.simulation.run_world import LEASE_S, RunWorld

DURABILITIES: Final[tuple[Durability, ...]] = ("checkpoint", "replica", "log")
ACCOUNTS_S: Final = 20.0
"""Another master waits so long for what loops did, before it waits for the client."""
FAULTS: Final = (
    "worker",
    "ps",
    "master",
    "master and another",
    "two masters",
    "cut",
    "cut and master",
    "away",
    "away for long",
    "gone",
    "halts",
    "named",
    "stop",
)


@dataclass
class Injected:
    """Brings the faults of one run about.

    Attributes:
      gone_at: when the client left for longer than its lease.
      stops: the run was told to stop.
      kinds: of faults.
    """

    world: RunWorld
    gone_at: float | None = None
    stops: bool = False
    kinds: tuple[str, ...] = FAULTS

    async def all(self) -> None:
        """Brings some about, at such distances that standbys are found again."""
        chance = self.world.chance
        fault = self.kinds[self.world.seed // 9 % len(self.kinds)]
        for _ in range(chance.randrange(1, 5)):
            await asyncio.sleep(chance.uniform(0.2, 6.0))
            if self.world.state() != "running":
                return
            await self.one(fault)
            fault = chance.choice(self.kinds)
            await asyncio.sleep(4.0)  # until there are two standbys again

    async def one(self, fault: str) -> None:
        """Brings one about."""
        world, chance = self.world, self.world.chance
        master = world.master()
        if master is None or world.state() != "running":
            return
        away_s = chance.uniform(0.1, 3.0)
        others = [task for task in world.tasks if task != master.task]
        match fault:
            case "worker" | "ps":
                of_kind = [t for t in world.tasks if is_ps(t) == (fault == "ps")]
                world.kill(chance.choice(of_kind), away_s)
            case "master" | "master and another":
                if fault != "master":
                    world.kill(chance.choice(others), away_s)
                world.kill(master.task, away_s)
            case "two masters":
                await self.lose_masters(away_s)
            case "cut":
                world.cut(master.task, chance.choice(others), chance.uniform(0.1, 8.0))
            case "cut and master":  # as it waits for a ps that it does not reach
                cut = chance.choice([t for t in others if is_ps(t)])
                world.cut(master.task, cut, 14.0)
                await asyncio.sleep(chance.uniform(3.0, 14.0))
                world.kill(master.task, away_s)
            case "halts":
                world.losing_halts_until = world.clock.now() + chance.uniform(2.0, 6.0)
            case _:
                await self.of_client(fault, master.task, others[0])

    async def of_client(self, fault: str, master: TaskName, other: TaskName) -> None:
        """Brings about what a client may do."""
        world = self.world
        query = pb.RunQuery(run=RUN, master=master)
        if fault == "named":  # it does not reach the master, which is there
            world.named = True
            request = frame(run_query=query)
            await world.ask(None, other, "Master.SucceedRun", request)
        elif fault == "stop":
            self.stops = True
            await world.ask(None, master, "Master.StopRun", frame(run_query=query))
        elif self.gone_at is None:
            await self.lose_client(fault)

    async def lose_masters(self, away_s: float) -> None:
        """Kills the master, and its standby as soon as that is the master."""
        world = self.world
        master = world.masters[-1]
        world.kill(master.task, 30.0)
        for _ in range(40):
            await asyncio.sleep(0.1)
            if world.masters[-1] is not master:
                break
        world.kill(world.masters[-1].task, away_s)

    async def lose_client(self, fault: str) -> None:
        """Lets the client go, and come back or not."""
        world, chance = self.world, self.world.chance
        if not world.has_client:
            return
        if fault == "away":
            await world.client.away(chance.uniform(0.1, LEASE_S - 1.0))
            return
        self.gone_at = world.clock.now()
        long_s = chance.uniform(1.5, 3.0) * LEASE_S
        await world.client.away(None if fault == "gone" else long_s)


def check(world: RunWorld, injected: Injected, state: str) -> None:
    """What must hold when a run is over."""
    over_at, gone_at = world.clock.now(), injected.gone_at
    if world.all_died:
        assert state in {"lost", "failed"}, f"it is {state}, and nobody knew of it"
        return
    if gone_at is not None and over_at > gone_at + LEASE_S:
        waits = gone_at < world.led_since  # another master waits for the client, too
        until = world.led_since + ACCOUNTS_S if waits else gone_at
        until = max([until, *world.cuts.values()])  # the loops hear of it then
        is_late = world.updated_at > until + LEASE_S + 1.0
        may_be = {"stopped", "failed", "stopped" if is_late else "done"}
        assert state in may_be, f"it is {state} without its client"
    elif injected.stops:
        assert state in {"stopped", "done"}, world.why()
    else:
        assert state == "done", world.why()
        assert world.client.has_finished or not world.has_client, "it was not asked"
    if state != "failed":
        world.check(state)
