"""What simulated runs have in common: how tasks and masters die, how a run may end."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from jgraph.coordination.data.slots import DEATHS, Lease
from jgraph.coordination.run.recovery import ATTEMPTS
from jgraph.graph.ir import TaskName
from jgraph.testing.virtual_time import Simulation
from tests.support.simulation.master import Master
from tests.support.simulation.network import Network, Process
from tests.support.simulation.tasks import Loop, Worker

RUNS: Final = int(os.environ.get("JGRAPH_SIMULATIONS", "40"))
FIRST: Final = int(os.environ.get("JGRAPH_SIMULATION", "0"))
RESTART_S: Final = 2.0
TAKEOVER_S: Final = 2.0
REJOIN_S: Final = 0.5
ACCOUNTS_S: Final = 12.0


class Mortal(Protocol):
    """A ps that can die."""

    process: Process

    def forget(self) -> None:
        """Loses what it holds."""


ShardT = TypeVar("ShardT", bound=Mortal)


class FaultyRun(ABC, Generic[ShardT]):
    """A run whose tasks die and come back, and whose master is replaced.

    Attributes:
      master: who orders and hears the loops.
      life: of the variables; each going back begins another.
      loops: those that go on, and where.
      accounts: what loops told another master that asks; None: nobody asks.
      state: "running", or how it ended.
      restored: how often it went back to its checkpoint.
      takeovers: how often another became the master.
      losses: how many loops it lost.
    """

    loops_with: Any = Loop
    sim: Simulation
    net: Network
    workers: dict[TaskName, Worker]
    shards: dict[TaskName, ShardT]
    master: Master
    life: int
    loops: dict[str, TaskName]
    accounts: dict[str, Any] | None
    waiting: set[str]
    state: str
    going_back: bool
    restored: int
    takeovers: int
    losses: int

    # ------------------------------------------------------------ what a master tells

    @abstractmethod
    def reported(self, loop: str, told: Any, state: str, lost: str) -> None:
        """The master passes a report on."""

    @abstractmethod
    def loop_lost(self, loop: str) -> None:
        """A loop is gone."""

    @abstractmethod
    def look(self) -> None:
        """Looks whether a task is not the one that it was."""

    def dealt(self, leases: tuple[Lease, ...]) -> None:
        """The master has dealt out these."""

    def opened(self, gate: int, shard: TaskName) -> None:
        """A ps has opened a gate that the master was told to open."""

    def lost(self, task: TaskName) -> None:
        """The master does not reach a task any more."""
        if self.accounts is not None:
            for loop in [n for n in self.accounts if self.loops.get(n) == task]:
                self.accounted(loop, None)
            return
        for loop in [name for name, at in self.loops.items() if at == task]:
            self.loop_lost(loop)
        self.look()

    # ------------------------------------------------------------ another master

    @property
    def is_led(self) -> bool:
        """Whether there is a master that knows of all loops."""
        there = self.master.process.alive and self.master.is_heard
        return there and self.accounts is None

    def lose_master(self, *, kill: bool) -> None:
        """The client hears no more of the master, which is dead or goes on alone."""
        old = self.master
        if self.state != "running" or not old.is_heard:
            return
        self.sim.note(f"lose {old.task}")
        old.is_heard = False
        if kill:
            self.net.kill(old.process)
        wait = self.sim.chance.random() * (TAKEOVER_S if kill else REJOIN_S)
        self.sim.later(wait, partial(self.take_over, old))

    def take_over(self, old: Master) -> None:
        """Ends the loops through another master, and asks what they did."""
        if self.master is not old or self.state != "running" or self.going_back:
            return
        self.master = Master(self, old.term + 1)
        self.takeovers += 1
        self.accounts = {}
        for loop, task in self.loops.items():
            self.accounts[loop] = None
            self.master.send(task, ("account", loop, self.master.term))
        self.waiting = set(self.accounts)
        self.old = old
        if not self.waiting:
            self.all_accounted(self.master)
        else:
            self.sim.later(ACCOUNTS_S, partial(self.all_accounted, self.master))

    def accounted(self, loop: str, told: Any) -> None:
        """A loop has told what it did (None: its task knows nothing of it)."""
        if self.accounts is None or loop not in self.waiting:
            return
        self.accounts[loop] = told
        self.waiting.remove(loop)
        if not self.waiting:
            self.all_accounted(self.master)

    def all_accounted(self, master: Master) -> None:
        """Goes on from what all loops have told, or did not in time."""
        if self.master is not master or self.accounts is None or self.going_back:
            return
        accounts, self.accounts = self.accounts, None
        self.go_on(accounts)

    @abstractmethod
    def go_on(self, accounts: dict[str, Any]) -> None:
        """Goes on with another master; who has told nothing is lost."""

    # ------------------------------------------------------------ faults

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

    # ------------------------------------------------------------ the oracle

    def check(self) -> None:
        """What must hold when the run is over."""
        try:
            self._check()
        except AssertionError as error:
            error.add_note("the end of the run:\n" + "\n".join(self.sim.trace[-30:]))
            raise

    def _check(self) -> None:
        if self.state.startswith("gave up: it went back"):
            assert self.recovered >= ATTEMPTS
        elif self.state.startswith("failed: JG-215"):  # a batch that all had is blamed
            assert self.holders_lost >= DEATHS
        elif not self.may_end():
            assert self.state == "done", self.state
            self.check_updates()

    @property
    def recovered(self) -> int:
        """How often it went on from a state that might be what ends it."""
        return self.restored

    @property
    def holders_lost(self) -> int:
        """How many replicas were lost to who deals the batches."""
        return self.losses  # the master does

    def may_end(self) -> bool:
        """Whether the run may have ended as it did, for a reason of its own."""
        return False

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
