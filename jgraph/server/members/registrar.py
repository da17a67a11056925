"""Registrar of a cluster's members: the shell of ``coordination.liveness.members``.

All tasks know who the registrar is (``registrar_of``), and the arrangement, and any
passes on to it what concerns it. So a registrar that was started again learns from the
others what there is: one that joins is not answered before another task knows of it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Final, Protocol, final

from jgraph.cluster.deadlines import CONTROL_S
from jgraph.cluster.events import EventLog
from jgraph.cluster.methods import Answer
from jgraph.cluster.transport_choice import is_loopback
from jgraph.coordination.liveness.members import (
    LEASE_S,
    Adopted,
    Answered,
    Event,
    Give,
    Gone,
    Knocked,
    LeaveAsked,
    Left,
    Member,
    Members,
    Publish,
    Refuse,
    Served,
    TimePassed,
    registrar_of,
)
from jgraph.errors import (
    ClusterUnreachableError,
    JGError,
    RescaleError,
    TaskLostError,
    VersionError,
)
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import is_refused
from jgraph.rpc.frames import body_of, frame, installed_version
from jgraph.rpc.transport import Address, Frame
from jgraph.server.members.messages import arrangement_in, members_message
from jgraph.server.task_context import TaskContext

_LOG = logging.getLogger("jgraph.members")
_LOOK_S: Final = 2.0
"""Between two looks: that a task is gone, or begun anew, shows only by asking it."""
_GONE_S: Final = 1.0
"""Nobody waits longer for members that may be gone: one that is refuses at once."""
_TOLD_S: Final = 2.0
"""Nor for others to hear of who joins: they may all be out of reach."""
_TEXTS: Final[Mapping[str, str]] = {
    "joined": "{task} joined the cluster at {address}",
    "leaves": "{task} was told to leave the cluster",
    "left": "{task} left the cluster",
    "lost": "{task} is lost, and no member of the cluster any more",
}


class Calls(Protocol):
    """Calls other tasks; see ``Master``."""

    async def call(
        self, task: TaskName, method: str, request: Frame, *, timeout_s: float = ...
    ) -> Frame:
        """Calls a task."""


@final
class Registrar:
    """Adds the calls about members to a task, which may be the registrar.

    Args:
      context: of the task.
      peers: calls other tasks.
      events: of the task.
      lease_s: see ``Members``.

    Attributes:
      methods: the calls, by name.
    """

    def __init__(
        self,
        context: TaskContext,
        peers: Calls,
        events: EventLog,
        lease_s: float = LEASE_S,
    ) -> None:
        self._context = context
        self._peers = peers
        self._events = events
        self._lease_s = lease_s
        self._machine: Members | None = None
        self._learning: asyncio.Task[None] | None = None
        self._watched: dict[tuple[TaskName, Address], asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._known_numbers: dict[
            TaskName, int
        ] = {}  # the newest arrangement that each has
        self._hears = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.methods: Mapping[str, Answer] = {
            "Members": self._members,
            "Master.Join": self._join,
            "Master.Leave": self._leave,
        }
        context.rearranged.append(self._rearranged)

    def close(self) -> None:
        """Looks after nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
        for watching in [*self._watched.values(), self._learning]:
            if watching is not None:
                watching.cancel()

    async def say_left(self, *, ended: bool) -> None:
        """Says that this task leaves, or has ended, unless it may come back."""
        context = self._context
        member = context.arrangement.members.get(context.task)
        if member is None or not (member.incarnation or member.leaves):
            return
        if member.incarnation not in {0, context.incarnation}:  # another has its place
            return
        request = pb.LeaveRequest(
            task=context.task, incarnation=member.incarnation, ended=ended
        )
        with suppress(JGError):  # who looks after it finds out
            async for _ in self._leave(frame(leave_request=request)):
                continue

    # ------------------------------------------------------------ calls

    async def _members(self, request: Frame) -> AsyncIterator[Frame]:
        self._context.arrange(arrangement_in(body_of(request)))
        yield frame(members=self._mine())

    async def exchange(self, task: TaskName) -> None:
        """Tells a task the arrangement, and learns a newer one from it."""
        with suppress(JGError):
            request = frame(members=self._mine())
            reply = await self._peers.call(task, "Members", request)
            self._context.arrange(arrangement_in(body_of(reply)))

    def _mine(self) -> pb.Members:
        context = self._context
        return members_message(context.arrangement, context.task, context.incarnation)

    async def _join(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        if (registrar := self._registrar) != self._context.task:
            yield await self._pass_on(registrar, "Master.Join", request)
            return
        _check_version(body)
        await self._learn()
        event: Event
        if body.task:
            task = TaskName(body.task)
            await self._check_serves(task, body.address, body.incarnation)
            event = Served(task, body.incarnation, body.address)
        else:
            await self._find_gone(body.job)
            event = Knocked(body.job, body.incarnation, tuple(body.indices) or None)
        name = self._handle(event)
        if body.task:
            await self._wait_told(TaskName(body.task))
        yield frame(
            join_reply=pb.JoinReply(
                task=name or body.task,
                members=self._mine(),
                lease_s=self._lease_s,
                tasks=[
                    pb.Member(task=task, address=address)
                    for task, address in self._context.addresses.items()
                ],
            )
        )

    async def _leave(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        if (registrar := self._registrar) != self._context.task:
            yield await self._pass_on(registrar, "Master.Leave", request)
            return
        await self._learn()
        task = TaskName(body.task)
        if task == self._context.task:
            raise RescaleError(
                f"{task} cannot leave its cluster: it numbers the tasks that join",
                task=task,
            )
        self._handle(Left(task, body.incarnation) if body.ended else LeaveAsked(task))
        yield frame(empty=pb.Empty())

    @property
    def _registrar(self) -> TaskName:
        context = self._context
        return registrar_of(context.addresses, context.arrangement)

    async def _pass_on(self, registrar: TaskName, method: str, request: Frame) -> Frame:
        try:
            return await self._peers.call(
                registrar, method, request, timeout_s=2 * CONTROL_S
            )
        except (ClusterUnreachableError, TaskLostError) as error:
            raise RescaleError(
                f"{registrar} numbers the tasks that join this cluster, and does not "
                f"answer {self._context.task} now ({error.message.rstrip('.')}); try "
                "again when it is back",
                task=registrar,
            ) from error

    # ------------------------------------------------------------ who joins

    async def _check_serves(
        self, task: TaskName, address: Address, incarnation: int
    ) -> None:
        """Raises ``RescaleError`` where a process is not the task that it says."""
        nothing, why = frame(empty=pb.Empty()), ""
        try:
            reply = await self._context.transport.ask(
                address, "TaskStatus", nothing, timeout_s=CONTROL_S
            )
        except JGError as error:
            why = error.message.rstrip(".")
        else:
            status: pb.TaskStatus = body_of(reply)
            if (status.task, status.incarnation) != (task, incarnation):
                why = f"{status.task}, another process, is there"
        if why:
            remedy = "give an address that all tasks reach: --host"
            if is_loopback(address.rpartition(":")[0]):
                remedy = (
                    "it listens for its own host alone; let it listen for others with "
                    "--bind 0.0.0.0, and --tls-dir"
                )
            raise RescaleError(
                f"{task} would join, and {self._context.task} does not reach it at "
                f"{address}: {why}; {remedy}",
                address=address,
            )

    async def _find_gone(self, job: str) -> None:
        """Looks whether tasks that joined are gone: their indices are free then."""
        assert self._machine is not None
        joined = self._machine.joined.items()
        looks = [
            self._look(task, member)
            for task, member in joined
            if task.startswith(f"/job:{job}/")
        ]
        if not looks:
            return
        working = [asyncio.ensure_future(look) for look in looks]
        done, late = await asyncio.wait(working, timeout=_GONE_S)
        for one in late:  # a process that hangs is a member until its lease is over
            one.cancel()
        for one in done:
            one.result()

    async def _wait_told(self, joiner: TaskName) -> None:
        """Waits until a task that a registrar asks when it begins knows who joined."""
        arrangement = self._context.arrangement
        apart = {self._context.task, joiner}
        described = arrangement.members.keys() & self._context.described
        others = described - apart
        with suppress(TimeoutError):
            async with asyncio.timeout(_TOLD_S):
                while others and not any(
                    self._known_numbers.get(task, 0) >= arrangement.number
                    for task in others
                ):
                    hears = self._hears
                    await hears.wait()

    async def _learn(self) -> None:
        """Learns once from the others who has joined before this registrar began."""
        if self._machine is not None:
            return
        if self._learning is None:
            self._learning = asyncio.ensure_future(self._ask_all())
        await asyncio.shield(self._learning)

    async def _ask_all(self) -> None:
        asked = {self._context.task}
        # Those who joined may know of others.
        while others := [t for t in self._context.addresses if t not in asked]:
            asked.update(others)
            await asyncio.gather(*map(self.exchange, others))
        self._begin()

    def _begin(self) -> None:
        if self._machine is None:
            self._machine = Members(self._context.described, self._lease_s)
            self._handle(Adopted(self._context.arrangement))

    # ------------------------------------------------------------ decisions

    def _handle(self, event: Event) -> TaskName | None:
        """Carries out what an event brings; returns the task that was given.

        Raises:
          JGError: what was asked is refused.
        """
        assert self._machine is not None
        name: TaskName | None = None
        for instruction in self._machine.handle(event, self._context.clock.now()):
            match instruction:
                case Give(task):
                    name = task
                case Refuse(error):
                    raise error
                case Publish():
                    self._publish(instruction)
        return name

    def _publish(self, news: Publish) -> None:
        before = self._context.arrangement.members
        self._context.arrange(news.arrangement)
        self._watch_all()
        if news.task is None:
            return
        members = {**before, **news.arrangement.members}
        address = members[news.task].address
        text = _TEXTS[news.kind].format(task=news.task, address=address)
        is_loss = news.kind == "lost"
        # What is "lost" is a connection, and several of these are one.
        self._events.note(
            "joined" if news.kind == "joined" else "left",
            f"{text} (arrangement {news.arrangement.number})",
            level=logging.WARNING if is_loss else logging.INFO,
        )

    def _rearranged(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
        if self._registrar != self._context.task:
            return
        if self._machine is None:  # others told it
            self._begin()
        elif self._context.arrangement.number > self._machine.arrangement.number:
            self._handle(Adopted(self._context.arrangement))
        self._watch_all()

    # ------------------------------------------------------------ the others

    def _watch_all(self) -> None:
        for task, member in self._context.arrangement.members.items():
            if task == self._context.task or (task, member.address) in self._watched:
                continue
            watching = asyncio.ensure_future(self._watch(task, member))
            self._watched[task, member.address] = watching
        if self._timer is None:
            self._pass_time()

    def _pass_time(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LOOK_S, self._pass_time)
        self._handle(TimePassed())

    async def _watch(self, task: TaskName, member: Member) -> None:
        """Tells a task each arrangement, and sees whether it is there.

        One that is no member any more is told of that too, if it can be.
        """
        farewells = self._lease_s
        while farewells > 0:
            news, member_now = self._news, self._member(task)
            is_member = member_now is not None and member_now.address == member.address
            # Another process may be the task now, elsewhere.
            looked = member_now if member_now is not None and is_member else member
            is_told = await self._look(task, looked)
            if not is_member:
                if is_told is not False:  # it knows, or nobody is there
                    break
                farewells -= _LOOK_S
            if news is self._news:
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), _LOOK_S)
        self._watched.pop((task, member.address), None)

    def _member(self, task: TaskName) -> Member | None:
        return self._context.arrangement.members.get(task)

    async def _look(self, task: TaskName, member: Member) -> bool | None:
        """Tells a task the arrangement; whether it was told, None: nobody is there."""
        request = frame(members=self._mine())
        ask = self._context.transport.ask
        try:
            reply = await ask(member.address, "Members", request, timeout_s=CONTROL_S)
        except JGError:
            if not await is_refused(member.address):
                return False
            self._handle(Gone(task, member.incarnation))
            return None
        members: pb.Members = body_of(reply)
        if members.task != task or member.incarnation not in {0, members.incarnation}:
            self._handle(Gone(task, member.incarnation))
            return None
        self._handle(Answered(task, member.incarnation))
        try:
            self._context.arrange(arrangement_in(members))
        except JGError as error:  # or nobody would look at it any more
            _LOG.warning("%s tells strange members: %s", task, error.message)
            return False
        self._known_numbers[task] = members.arrangement
        hears, self._hears = self._hears, asyncio.Event()
        hears.set()
        return True


def _check_version(request: pb.JoinRequest) -> None:
    """Refuses a process of another version than that of this task.

    Raises:
      VersionError: names both.
    """
    mine = installed_version("jgraph")
    if mine != request.jgraph:
        raise VersionError(
            f"a process with jgraph {request.jgraph} would join a cluster with jgraph "
            f"{mine}; install this where it runs, and start it again"
        )
