"""What simulated runs have in common: how tasks die, and how a run may end."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from jgraph.coordination.recovery import ATTEMPTS
from jgraph.coordination.slots import DEATHS
from jgraph.graph.ir import TaskName
from tests.simulation.network import Network, Process, Simulation
from tests.simulation.tasks import Worker

RUNS: Final = int(os.environ.get("JGRAPH_SIMULATIONS", "200"))
FIRST: Final = int(os.environ.get("JGRAPH_SIMULATION", "0"))
RESTART_S: Final = 2.0


class Mortal(Protocol):
    """A ps that can die."""

    process: Process

    def forget(self) -> None:
        """Loses what it holds."""


ShardT = TypeVar("ShardT", bound=Mortal)


class FaultyRun(ABC, Generic[ShardT]):
    """A run whose tasks die and come back.

    Attributes:
      state: "running", or how it ended.
      restored: how often it went back to its checkpoint.
      losses: how many loops it lost.
    """

    sim: Simulation
    net: Network
    workers: dict[TaskName, Worker]
    shards: dict[TaskName, ShardT]
    state: str
    restored: int
    losses: int

    def kill(self, task: TaskName) -> None:
        """SIGKILL; the launcher starts it again, empty."""
        there = self.workers.get(task) or self.shards.get(task)
        assert there is not None
        if not self.net.is_up(task) or self.state != "running":
            return
        self.sim.note(f"kill {task}")
        self.net.kill(there.process)
        if isinstance(there, Worker):
            there.loops.clear()
        else:
            there.forget()
        wait = RESTART_S * self.sim.chance.random()
        self.sim.later(wait, partial(self.restart, task))

    @abstractmethod
    def restart(self, task: TaskName) -> None:
        """The launcher starts it."""

    def check(self) -> None:
        """What must hold when the run is over."""
        try:
            self._check()
        except AssertionError as error:
            error.add_note("the end of the run:\n" + "\n".join(self.sim.trace[-30:]))
            raise

    def _check(self) -> None:
        if self.state.startswith("gave up: it went back"):
            assert self.restored >= ATTEMPTS
        elif self.state.startswith("failed: JG-215"):  # a batch that all had is blamed
            assert self.losses >= DEATHS
        else:
            assert self.state == "done", self.state
            self.check_updates()

    @abstractmethod
    def check_updates(self) -> None:
        """What must hold of the updates of a run that is done."""


def check_each(simulated: Callable[[int], FaultyRun[ShardT]]) -> None:
    """Simulates and checks as many runs as are asked for."""
    for seed in range(FIRST, FIRST + RUNS):
        try:
            simulated(seed).check()
        except AssertionError as error:
            error.add_note(f"JGRAPH_SIMULATION={seed} repeats it")
            raise
