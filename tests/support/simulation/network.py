"""A network in virtual time: delays, connections that are cut, links that fall silent.

Frames go as between real tasks: numbered, kept until acknowledged, sent again over the
next connection, and dropped where they were here already. That bookkeeping is the
transport's own (``Inbound``, ``SentFrames``); simulated is what can go wrong.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from jgraph.errors import TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.rpc.exchange.inbound import Inbound, InboundStream
from jgraph.rpc.resumable.accepting import RETURN_S
from jgraph.rpc.resumable.dialing import RESUME_POLL_S, RESUME_S
from jgraph.rpc.resumable.numbers import ACK_FRAMES, SentFrames
from jgraph.testing.virtual_time import Simulation

Message: TypeAlias = tuple[Any, ...]
KEEPALIVE_S: Final = 15.0
_HELD_S: Final = 0.2


@dataclass(eq=False)
class Process:
    """One start of a task."""

    task: TaskName
    incarnation: int
    receive: Callable[[TaskName, Message], None]
    lost: Callable[[TaskName], None]
    inbound: Inbound = field(default_factory=Inbound)
    links: dict[TaskName, "_Link"] = field(default_factory=dict)
    numbers: dict[TaskName, Iterator[int]] = field(default_factory=dict)
    alive: bool = True


@dataclass(eq=False)
class _Link:
    """The sending half of a pair of tasks."""

    src: Process
    dst: TaskName
    kept: SentFrames[Message]
    to: Process | None = None  # the process that accepted the first connection
    connection: "_Connection | None" = None
    until: float = 0.0
    over: bool = False


@dataclass(eq=False)
class _Connection:
    link: _Link
    to: Process
    stream: InboundStream
    under_way: deque[tuple[int, Message]] = field(default_factory=deque)
    is_cut: bool = False
    untold: int = 0


class Network:
    """Connects processes.

    Args:
      sim: time and chance.
      delay_s: the longest that a message takes, at random.
    """

    def __init__(self, sim: Simulation, delay_s: float) -> None:
        self._sim = sim
        self._delay_s = delay_s
        self._at: dict[TaskName, Process] = {}
        self._incarnations = itertools.count(1)
        self._silent: set[tuple[TaskName, TaskName]] = set()
        self.duplicates = 0.0
        """How likely it is that a frame comes twice."""

    def start(
        self,
        task: TaskName,
        receive: Callable[[TaskName, Message], None],
        lost: Callable[[TaskName], None],
    ) -> Process:
        """Starts a process of a task, which is not running."""
        made = Process(task, next(self._incarnations), receive, lost)
        self._at[task] = made
        return made

    def kill(self, process: Process) -> None:
        """Ends a process; its kernel resets its connections."""
        process.alive = False
        if self._at.get(process.task) is process:
            del self._at[process.task]
        for link in process.links.values():
            link.over = True
            if link.connection is not None:
                self._cut(link.connection)
        for other in list(self._at.values()):
            self.cut(other.task, process.task)

    def is_up(self, task: TaskName) -> bool:
        """Whether a process of the task runs."""
        return task in self._at

    def cut(self, src: TaskName, dst: TaskName) -> None:
        """Resets the connection of one task to another, if there is one."""
        process = self._at.get(src)
        link = process.links.get(dst) if process is not None else None
        if link is not None and link.connection is not None:
            self._cut(link.connection)

    def silence(self, a: TaskName, b: TaskName, seconds: float) -> None:
        """Passes nothing on between two tasks for a while, in either direction."""
        pairs = {(a, b), (b, a)}
        self._silent |= pairs
        self._sim.later(seconds, partial(self._silent.difference_update, pairs))
        if seconds >= KEEPALIVE_S:
            for src, dst in sorted(pairs):
                self._sim.later(KEEPALIVE_S, partial(self.cut, src, dst))

    def send(self, src: Process, dst: TaskName, message: Message) -> None:
        """Sends a message, in order after those before."""
        if not src.alive:
            return
        link = src.links.get(dst)
        if link is None:
            numbers = src.numbers.setdefault(dst, itertools.count(1))
            link = src.links[dst] = _Link(src, dst, SentFrames(numbers))
            link.until = self._sim.now + RESUME_S
            self._sim.later(self._delay(), partial(self._connect, link))
        number = link.kept.add(message, 1)
        if link.connection is not None:
            self._transmit(link.connection, number, message)

    # ------------------------------------------------------------ sending

    def _delay(self) -> float:
        return self._sim.chance.random() ** 2 * self._delay_s

    def _connect(self, link: _Link) -> None:
        """Makes the first connection of a link, or resumes it."""
        if link.over or link.connection is not None:
            return
        to = self._at.get(link.dst)
        if to is None or (link.to is not None and link.to is not to):
            self._give_up(link)  # refused, or started again since
            return
        if (link.src.task, link.dst) in self._silent:
            if self._sim.now >= link.until:
                self._give_up(link)
            else:
                self._sim.later(RESUME_POLL_S, partial(self._connect, link))
            return
        try:
            who, was_there = (link.src.task, link.src.incarnation), False
            if link.to is None:
                stream, was_there = to.inbound.connect(*who)
            else:
                stream = to.inbound.resume(*who)
        except TaskLostError:
            self._give_up(link)
            return
        link.to = to
        connection = link.connection = _Connection(link, to, stream)
        if was_there:
            to.lost(link.src.task)
        link.kept.acknowledge(stream.received.last)
        for number, message in list(link.kept):
            self._transmit(connection, number, message)

    def _transmit(self, connection: _Connection, number: int, message: Message) -> None:
        for _ in range(1 + (self._sim.chance.random() < self.duplicates)):
            connection.under_way.append((number, message))
            self._sim.later(self._delay(), partial(self._arrive, connection))

    def _give_up(self, link: _Link) -> None:
        link.over = True
        if link.src.links.get(link.dst) is link:
            del link.src.links[link.dst]
        if link.src.alive:
            link.src.lost(link.dst)

    def _cut(self, connection: _Connection) -> None:
        if connection.is_cut:
            return
        connection.is_cut = True
        link = connection.link
        link.connection = None
        link.until = self._sim.now + RESUME_S
        self._sim.later(RESUME_POLL_S, partial(self._connect, link))
        # The receiver notices by itself, sooner or later than the sender.
        self._sim.later(self._delay() * 3, partial(self._noticed, connection))

    # ------------------------------------------------------------ receiving

    def _arrive(self, connection: _Connection) -> None:
        to, src = connection.to, connection.link.src
        if connection.is_cut or not to.alive:
            return
        if (src.task, to.task) in self._silent:  # TCP holds it back until it is not
            self._sim.later(_HELD_S, partial(self._arrive, connection))
            return
        number, message = connection.under_way.popleft()
        if not to.inbound.accept(connection.stream, number):
            return
        connection.untold += 1
        if connection.untold >= ACK_FRAMES // 16:
            connection.untold = 0
            told = partial(self._acknowledge, connection, number)
            self._sim.later(self._delay(), told)
        self._sim.note(f"{src.task} -> {to.task} {message}")
        to.receive(src.task, message)

    def _acknowledge(self, connection: _Connection, number: int) -> None:
        if not connection.is_cut:
            connection.link.kept.acknowledge(number)

    def _noticed(self, connection: _Connection) -> None:
        to = connection.to
        if to.alive and to.inbound.is_current(connection.stream):
            gone = self._at.get(connection.link.src.task) is not connection.link.src
            wait = self._delay() if gone else RETURN_S
            self._sim.later(wait, partial(self._missed, connection))

    def _missed(self, connection: _Connection) -> None:
        to, stream = connection.to, connection.stream
        if to.alive and to.inbound.disconnect(stream):
            to.lost(connection.link.src.task)
