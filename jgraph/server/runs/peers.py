"""Peers: calls from a run's supervisor, on the master, to all tasks of the cluster."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, final

from jgraph.cluster.deadlines import CONTROL_S
from jgraph.errors import FencedError, JGError, TaskLostError
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.transport import Address, Frame
from jgraph.server.loops.dealer import Dealers

_NO_QUESTION: Final = frame(empty=pb.Empty())


class Peers(Protocol):
    """What a run asks of the master that it belongs to."""

    @property
    def task(self) -> TaskName:
        """Where the master is."""

    def tasks(self) -> Iterable[TaskName]:
        """Returns all tasks of the cluster."""

    def address(self, task: TaskName) -> Address:
        """Returns where a task listens."""

    async def call(
        self, task: TaskName, method: str, request: Frame, *, timeout_s: float = ...
    ) -> Frame:
        """Calls a task."""

    def stream(
        self, task: TaskName, method: str, request: Frame
    ) -> AsyncIterator[Frame]:
        """Calls another task for all replies, however long they take."""

    async def register(self, request: Frame) -> Frame:
        """Passes every task its part of a program."""


class LoopPeers(Peers, Protocol):
    """A ``Peers`` through which loops are told and tell."""

    def ps(self) -> Mapping[int, bool]:
        """Returns, for the index of each ps, whether it was not told to leave."""

    def leavers(self) -> Collection[TaskName]:
        """Returns the tasks that do not come back when they are told to end."""

    def workers(self) -> Mapping[TaskName, str]:
        """Returns the workers that stay, each with its process if that joined."""

    def note(self, kind: str, text: str, *, level: int = ...) -> None:
        """Notes an event of the cluster."""

    @property
    def dealers(self) -> Dealers:
        """Deal out the data of runs here."""

    def loop(self, order: pb.RunLoop) -> AsyncIterator[Frame]:
        """Runs a loop on its task; yields its reports."""


async def ready_tasks(
    peers: Peers, leavers: Collection[TaskName] = (), *, within_s: float = CONTROL_S
) -> dict[TaskName, str]:
    """Returns which start answers of each task that takes new work.

    Args:
      peers: to the tasks.
      leavers: those that may have been told to end.
      within_s: how long to wait for those that are silent.
    """
    processes: dict[TaskName, str] = {}

    async def ask(task: TaskName) -> None:
        with suppress(JGError):
            reply = await peers.call(
                task, "TaskStatus", _NO_QUESTION, timeout_s=within_s
            )
            status: pb.TaskStatus = body_of(reply)
            if status.task == task and (status.state == "ready" or task in leavers):
                processes[task] = f"{status.incarnation:x}"

    await asyncio.gather(*map(ask, peers.tasks()))
    return processes


async def is_there(peers: Peers, task: TaskName, incarnation: str) -> bool:
    """Whether a task answers, and is still the process that it was."""
    with suppress(JGError):
        reply = await peers.call(task, "TaskStatus", _NO_QUESTION)
        status: pb.TaskStatus = body_of(reply)
        return status.task == task and f"{status.incarnation:x}" == incarnation
    return False


def holds_state(order: pb.OpenRun, task: str) -> bool:
    """Whether a task may hold variables of a run: a ps, or an owner among the workers.

    Example:
      >>> order = pb.OpenRun(owners=["/job:worker/task:0"])
      >>> tasks = ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"]
      >>> [holds_state(order, task) for task in tasks]
      [True, True, False]
      >>> _ = order.stand_ins.parts.add(task=tasks[1], by=tasks[2])
      >>> [holds_state(order, task) for task in tasks]
      [True, False, True]
    """
    if is_ps(task) and order.HasField("ps"):
        return int(task.rpartition(":")[2]) < order.ps.now
    by = stand_ins_of(order)
    owns = task in order.owners or task in by.values()
    return is_ps(task) or (owns and task not in by)


def stand_ins_of(order: pb.OpenRun) -> dict[TaskName, TaskName]:
    """Returns who has the part of each owner that is away."""
    return {TaskName(p.task): TaskName(p.by) for p in order.stand_ins.parts}


async def reaches_state(peers: Peers, order: pb.OpenRun, worker: TaskName) -> bool:
    """Whether a worker reaches all who hold a run's state: it may have lost a link."""
    with suppress(JGError):
        reply = await peers.call(
            worker, "Master.Status", _NO_QUESTION, timeout_s=2 * CONTROL_S
        )
        missing = body_of(reply).missing
        return not any(holds_state(order, task) for task in missing)
    return False


@final
@dataclass(frozen=True, slots=True)
class KnownOfRun:
    """What tasks know of a run, whoever its master was.

    Attributes:
      loops: the newest loop on each task that has had one, and which task that is.
      switch: the newest that was told; None: none was.
    """

    loops: Mapping[str, TaskName]
    switch: pb.RunRescaled | None


async def check_master(
    peers: Peers,
    run: str,
    term: int,
    *,
    takes_over: bool = False,
    switch: tuple[Iterable[TaskName], pb.RunRescaled] | None = None,
) -> KnownOfRun:
    """Tells all tasks that answer who is the master of a run.

    Args:
      peers: to the tasks.
      run: its name.
      term: of its master.
      takes_over: it is that from now on, and no other master has this term.
      switch: of the variables to other ps, and who is to know it, instead of all tasks.

    Returns:
      What those that answer know.

    Raises:
      FencedError: one of them has heard of a later one.
    """
    order = pb.StopLoop(run=run, term=term, takes_over=takes_over)
    tasks = list(peers.tasks())
    if switch is not None:
        tasks = list(switch[0])
        order.switch.CopyFrom(switch[1])
    calls = [peers.call(task, "StopLoop", frame(stop_loop=order)) for task in tasks]
    loops: dict[str, TaskName] = {}
    switches: list[pb.RunRescaled] = []
    replies = await asyncio.gather(*calls, return_exceptions=True)
    for task, reply in zip(tasks, replies, strict=True):
        if isinstance(reply, FencedError):
            raise reply
        if isinstance(reply, Frame) and kind_of(reply) == "loop_report":
            body = body_of(reply)
            loops[body.loop] = task
            if body.HasField("rescaled"):
                switches.append(body.rescaled)
    loops.pop("", None)
    newest = max(switches, key=lambda one: one.number, default=None)
    return KnownOfRun(loops, newest)


def of_task(task: TaskName, error: JGError) -> TaskLostError:
    """Returns a transport's error, which knows addresses, as one of a task."""
    if task in error.message:
        return TaskLostError(error.message, **{**error.details, "task": task})
    return TaskLostError(f"{task} does not answer: {error.message}", task=task)
