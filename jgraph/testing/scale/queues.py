"""Queues in virtual time: a task's event loop, a host's cores, a ps's network."""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, final

from jgraph.testing.virtual_time import Simulation

Act: TypeAlias = Callable[[], None]


class Processor(Protocol):
    """What does the work of one task, one piece after the other.

    Attributes:
      busy_s: how long it worked.
    """

    busy_s: float

    def run(self, seconds: float, then: Act) -> None:
        """Works so long after what was asked before, and calls ``then``."""


@final
class OwnHost:
    """The event loop of a task that shares its host with nobody.

    Example:
      >>> sim = Simulation(0)
      >>> task = OwnHost(sim)
      >>> for name in "ab":
      ...     task.run(1.5, partial(sim.note, name))
      >>> sim.run()
      >>> sim.trace
      ['1.500000 a', '3.000000 b']
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._free_at = 0.0
        self.busy_s = 0.0

    def run(self, seconds: float, then: Act) -> None:
        """See ``Processor``."""
        self.busy_s += seconds
        self._free_at = max(self._free_at, self._sim.now) + seconds
        self._sim.at(self._free_at, then)


@final
class SharedHost:
    """The cores of a host that several tasks want, first come, first served.

    Pieces of work that are all as long as each other fall into step: each begins as
    another ends, and nobody waits. With ``chance`` each takes as long as it costs on
    average only, and is spread exponentially, which assumes no more than that average.

    Args:
      sim: time.
      cores: how many; of a part of one, work takes so much longer.
      chance: draws how long a piece takes; None: all take what they cost.

    Attributes:
      waiting: tasks with work to do.
    """

    def __init__(
        self, sim: Simulation, cores: float, chance: random.Random | None = None
    ) -> None:
        self.sim = sim
        self._chance = chance
        self.waiting: deque[SharingTask] = deque()
        whole = max(1, round(cores))
        self._free = whole
        self._speed = cores / whole

    def task(self) -> "SharingTask":
        """Returns a task of this host."""
        return SharingTask(self)

    def go_on(self) -> None:
        """Gives free cores to tasks that wait."""
        while self._free and self.waiting:
            self._free -= 1
            task = self.waiting.popleft()
            seconds, then = task.work.popleft()
            if seconds and self._chance is not None:
                seconds = self._chance.expovariate(1 / seconds)
            task.busy_s += seconds
            done = partial(self._done, task, then)
            self.sim.later(seconds / self._speed, done)

    def _done(self, task: "SharingTask", then: Act) -> None:
        self._free += 1
        if task.work:
            self.waiting.append(task)
        else:
            task.is_active = False
        self.go_on()
        then()


@final
class SharingTask:
    """A task of a ``SharedHost``; a ``Processor``."""

    def __init__(self, host: SharedHost) -> None:
        self._host = host
        self.work: deque[tuple[float, Act]] = deque()
        self.is_active = False
        self.busy_s = 0.0

    def run(self, seconds: float, then: Act) -> None:
        """See ``Processor``."""
        self.work.append((seconds, then))
        if not self.is_active:
            self.is_active = True
            self._host.waiting.append(self)
            self._host.go_on()


@final
class Pipe:
    """One direction of a ps's network, which the bytes of all workers share equally.

    The shares are those of max-min fairness, as every flow has the same limit at its
    other end: what a worker's network leaves for this ps. All flows have then moved as
    far since they began together, so a flow costs a look at a heap, not at the others.

    Args:
      sim: time.
      bytes_per_s: of the ps; infinite on one host.
      most: of one flow.

    Attributes:
      sent: bytes that were to go.
      arrived: bytes that are there.
      busy_s: how long there were any.

    Example:
      >>> sim = Simulation(0)
      >>> pipe = Pipe(sim, bytes_per_s=10.0, most=8.0)
      >>> pipe.send(10.0, partial(sim.note, "short"))
      >>> pipe.send(16.0, partial(sim.note, "long"))
      >>> sim.run()
      >>> sim.trace
      ['2.000000 short', '2.750000 long']
    """

    def __init__(self, sim: Simulation, bytes_per_s: float, most: float) -> None:
        self._sim = sim
        self._rate = bytes_per_s
        self._most = most
        self._moved = 0.0  # of each flow, since the beginning
        self._at = 0.0
        self._flows: list[tuple[float, int, float, Act]] = []
        self._numbers = itertools.count()
        self._looks_at = float("inf")
        self.sent = self.arrived = self.busy_s = 0.0

    def send(self, nbytes: float, then: Act) -> None:
        """Sends bytes; calls ``then`` when all are there."""
        self.sent += nbytes
        if not nbytes or math.isinf(self._rate):
            self.arrived += nbytes
            self._sim.later(0.0, then)
            return
        self._advance()
        flow = self._moved + nbytes, next(self._numbers), nbytes, then
        heapq.heappush(self._flows, flow)
        self._plan()

    def later(self, seconds: float, then: Act) -> None:
        """Calls ``then`` after a while."""
        self._sim.later(seconds, then)

    def _speed(self) -> float:
        return min(self._most, self._rate / len(self._flows))

    def _advance(self) -> None:
        passed = self._sim.now - self._at
        self._at = self._sim.now
        if self._flows:
            self.busy_s += passed
            self._moved += passed * self._speed()

    def _plan(self) -> None:
        """Comes back when the next flow ends, unless it comes back before."""
        if not self._flows:
            return
        remaining = max(0.0, self._flows[0][0] - self._moved)
        when = self._sim.now + remaining / self._speed()
        if when < self._looks_at:
            self._looks_at = when
            self._sim.at(when, partial(self._look, when))

    def _look(self, when: float) -> None:
        if when != self._looks_at:
            return
        self._looks_at = float("inf")
        self._advance()
        if not self._flows:
            return
        # What rounding leaves: far less than a byte, or what there is no moment for.
        moment = max(math.ulp(self._sim.now), math.ulp(self._moved) / self._speed())
        near = self._moved + max(1e-3, 4 * self._speed() * moment)
        while self._flows and self._flows[0][0] <= near:
            _, _, nbytes, then = heapq.heappop(self._flows)
            self.arrived += nbytes
            then()
        self._plan()


@final
@dataclass(frozen=True, slots=True)
class MessageCost:
    """What a message costs one of its sides: so much, and so much for each byte."""

    fixed_s: float
    byte_s: float


@final
class Flow:
    """The bytes of one message on their way: sender, network, receiver.

    A socket takes bytes as the network has room, and gives them as they come. So of a
    large message, in parts, one part costs its sender CPU while the one before is on
    the network and that before costs its receiver.

    Args:
      pipe: the network.
      sender: who sends.
      receiver: who gets it.
      parts: how many; a part enters the network after the one before has left it.

    Example:
      >>> sim = Simulation(0)
      >>> pipe = Pipe(sim, bytes_per_s=10.0, most=10.0)
      >>> flow = Flow(pipe, OwnHost(sim), OwnHost(sim), parts=2)
      >>> each = MessageCost(0.0, 0.1)  # as fast as the network
      >>> flow.begin(10, each, each, partial(sim.note, "there"))
      >>> sim.run()
      >>> sim.trace
      ['2.000000 there']
    """

    def __init__(
        self,
        pipe: Pipe,
        sender: Processor,
        receiver: Processor,
        parts: int = 1,
        latency_s: float = 0.0,
    ) -> None:
        self._pipe, self._sender, self._receiver = pipe, sender, receiver
        self._parts, self._latency_s = parts, latency_s
        self._ready = self._arrived = 0
        self._is_sending = False

    def begin(
        self,
        nbytes: float,
        says: MessageCost,
        hears: MessageCost,
        then: Act,
        onward: Act | None = None,
    ) -> None:
        """Sends a message; ``then`` when its receiver has taken all of it.

        Args:
          nbytes: of it.
          says: what it costs the sender.
          hears: what it costs the receiver.
          then: called once.
          onward: called when all of it has left the network, before that.
        """
        self._part = nbytes / self._parts
        self._hears, self._then, self._onward = hears, then, onward
        seconds = self._part * says.byte_s
        self._sender.run(says.fixed_s + seconds, self._is_ready)
        for _ in range(self._parts - 1):
            self._sender.run(seconds, self._is_ready)

    def _is_ready(self) -> None:
        self._ready += 1
        self._go_on()

    def _go_on(self) -> None:
        if self._ready and not self._is_sending:
            self._ready -= 1
            self._is_sending = True
            self._pipe.send(self._part, self._came)

    def _came(self) -> None:
        self._is_sending = False
        self._arrived += 1
        seconds = self._part * self._hears.byte_s
        is_last = self._arrived == self._parts
        if is_last:
            seconds += self._hears.fixed_s
        then = self._then if is_last else nothing
        take = partial(self._receiver.run, seconds, then)
        self._pipe.later(self._latency_s, take)
        self._go_on()
        if is_last and self._onward is not None:
            self._onward()


def nothing() -> None:
    """What follows a part that is not the last."""
