"""Failover of a run to another master when its own is lost, done by the client."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar, final

from jgraph.client.connection import Connection
from jgraph.client.runs.holds import DrainHolds
from jgraph.client.wait_for_tasks import ready_tasks, view_of
from jgraph.clock import SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import CONTROL_S
from jgraph.cluster.drain import told_to_end
from jgraph.cluster.loop_messages import DealtData, SyncRequest, plain
from jgraph.cluster.spec import ClusterSpec
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.slots import Lease
from jgraph.coordination.liveness.master_lease import END_S
from jgraph.coordination.run.loop_outcome import is_link_loss
from jgraph.errors import (
    ClusterError,
    ClusterUnreachableError,
    FencedError,
    JGError,
    TaskLeavingError,
    TaskLostError,
)
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import is_refused
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame

_LOG = logging.getLogger("jgraph.loops")
_LOST_REPLY_S: Final = 1.0
T = TypeVar("T")


@final
class RunLedger:
    """What a client knows of the data of a run; from any thread.

    Args:
      data: what is dealt.
      updates: says how many updates are applied to the model.
      position: where the run begins.
    """

    def __init__(
        self,
        data: DealtData,
        updates: Callable[[], int],
        position: Mapping[str, Any],
    ) -> None:
        self._data = data
        self._updates = updates
        self._applied = updates()
        self._book = BatchBook(
            data.plan, position, budget=data.batches, updates=self._applied
        )
        self._lock = threading.Lock()

    def add(self, leases: Iterable[Lease]) -> None:
        """Takes batches that are done."""
        with self._lock:
            self._book.add(leases)

    def position(self) -> dict[str, Any]:
        """Returns where in the data the run is, as far as is known."""
        with self._lock:
            return self._book.position(self._applied)

    def left(self) -> DealtData:
        """Returns what another master deals out, when nothing is under way."""
        self._applied = self._updates()
        position = self.position()
        return replace(self._data, batches=self._book.left, position=position)


def open_data(cluster: Connection, name: str, data: DealtData) -> None:
    """Makes the master of a client deal out the data of a run.

    Args:
      cluster: the client.
      name: of the data; another one for each master.
      data: what is dealt.
    """
    order = pb.OpenDataRun(
        run=name,
        plan=plain(data.plan),
        budget=data.batches,
        workers=data.workers,
        position="" if data.position is None else json.dumps(data.position),
        lease_s=data.lease_s,
    )
    cluster.call("Master.OpenDataRun", frame(open_data_run=order))


def ask_position(
    cluster: Connection, method: str, name: str, ledger: RunLedger | None
) -> dict[str, Any]:
    """Asks the master where in the data a run is.

    Args:
      cluster: the client.
      method: of the master.
      name: of the data.
      ledger: knows it, as far as it is known here, if the master is lost; or None.
    """
    request = frame(data_run=pb.DataRun(run=name))
    try:
        reply = body_of(cluster.call(f"Master.{method}", request))
    except JGError:
        if ledger is None:
            raise
        return ledger.position()
    position: dict[str, Any] = json.loads(reply.position)
    return position


def take_over(cluster: Connection, error: JGError) -> None:
    """Makes another server the master of a client.

    A ps rather than a worker: a run needs all of them anyway.

    Args:
      cluster: the client.
      error: why its master is thought to be lost.

    Raises:
      JGError: there is none.
    """
    old = cluster.master
    others = [task for task in cluster.tasks() if task != old]
    for task in [*sorted(others, key=lambda task: not is_ps(task)), old]:
        if _may_be_master(cluster, task):
            cluster.move_to(task)
            if isinstance(error, TaskLeavingError | FencedError):
                _LOG.info("%s; %s is the master from here on", error.message, task)
                return
            _LOG.warning(
                "%s, the master, was lost: %s. %s is the master from here on",
                *(old, error.message.rstrip("."), task),
            )
            return
    raise lost_master(error, old)


def release_run(cluster: Connection, drain_holds: DrainHolds) -> None:
    """Lets go of all that a run held, when nothing more is asked of it.

    A master that was told to end as the last steps were done is the client's no longer.
    """
    if cluster.master in drain_holds.told:
        with suppress(JGError):  # there is none; who asks next is told
            take_over(cluster, told_to_end(cluster.master))
    drain_holds.close()


def ask_with_failover(cluster: Connection, ask: Callable[[], T]) -> T:
    """Asks what may be asked twice, with another master if that is lost meanwhile.

    Raises:
      JGError: something else is lost.
    """
    master = cluster.master
    try:
        return ask()
    except (ClusterUnreachableError, TaskLostError) as error:
        _do_without(cluster, master, error)
    return ask()


def _do_without(cluster: Connection, master: TaskName, error: JGError) -> None:
    """Makes another server the master, if an error is of the loss of that one."""
    if error.details.get("task", master) != master:
        raise error
    take_over(cluster, error)


def begin_with_failover(
    cluster: Connection,
    sync: SyncRequest,
    begin: Callable[[SyncRequest], T],
) -> tuple[T, SyncRequest]:
    """Begins loops of synchronous training, with another master if its own is lost.

    What the one before has begun is refused from then on: gates and loops alike.

    Args:
      cluster: the client.
      sync: what the loops are told.
      begin: opens the gates, and begins the loops.

    Returns:
      What ``begin`` returned, and what the loops were told.

    Raises:
      JGError: something else is lost.
    """
    for _ in cluster.tasks():
        master = cluster.master
        try:
            return begin(sync), sync
        except (ClusterUnreachableError, TaskLostError) as error:
            _do_without(cluster, master, error)
            sync = replace(sync, term=sync.term + 1)
    return begin(sync), sync


def _may_be_master(cluster: Connection, task: TaskName) -> bool:
    """Whether it answers, knows the same cluster, and does not end."""
    view = event_loop.run(view_of(cluster, cluster.spec.address(task)))
    if view is None:
        return False
    ready = any(told.task == task and told.state == "ready" for told in view.tasks)
    # The spec is another if it was started anew.
    known = ClusterSpec.from_json(view.cluster_json)
    return ready and known.tasks() == cluster.spec.tasks()


def final_reports_of(
    cluster: Connection, orders: Sequence[pb.StopLoop], lost: TaskName | None = None
) -> list[Frame | JGError]:
    """Ends loops, and returns what they did; an error of one that does not say.

    Args:
      cluster: with a master that reaches them.
      orders: one for each.
      lost: another master than before, which is given little time; None: all answer.
    """

    async def account(order: pb.StopLoop) -> Frame | JGError:
        if order.task == lost:
            order.timeout_s = _LOST_REPLY_S
        try:
            return await cluster.transport.ask(
                cluster.address,
                "Master.StopLoop",
                frame(stop_loop=order),
                timeout_s=order.timeout_s + 2 * CONTROL_S,
            )
        except JGError as error:
            return error

    async def all_accounts() -> list[Frame | JGError]:
        return await asyncio.gather(*map(account, orders))

    return event_loop.run(all_accounts())


def poll_until_reached(
    cluster: Connection, task: TaskName, began: Mapping[TaskName, str], error: JGError
) -> Iterator[None]:
    """Yields, every few seconds at least, until the master reaches a task again.

    Args:
      cluster: the client.
      task: the task.
      began: which start of each task there was.
      error: why it may be lost.

    Raises:
      JGError: ``error``: it is gone, was started again, or is silent for too long.
    """
    clock, address = SystemClock(), cluster.spec.address(task)
    deadline = clock.now() + END_S
    _LOG.warning("%s; it is waited for up to %g s", error.message.rstrip("."), END_S)
    while True:
        ready = event_loop.run(ready_tasks(cluster))
        if is_link_loss(task, began, ready):
            return
        is_late = clock.now() >= deadline
        if is_late or task in ready or event_loop.run(is_refused(address)):
            raise error
        yield


def lost_master(error: JGError, master: TaskName) -> JGError:
    """Returns the error of a run that cannot do without its master."""
    return TaskLostError(
        f"{master}, the master of this run, was lost: {error.message.rstrip('.')}. "
        "A client that is connected to a ps may lose any worker",
        **{**error.details, "task": master},
    )


async def tell_lost(cluster: Connection, order: pb.StopLoop) -> None:
    """Tells the arbiter in synchronous training that a worker is gone."""
    with suppress(JGError):
        await cluster.transport.ask(
            cluster.address,
            "Master.StopLoop",
            frame(stop_loop=order),
            timeout_s=CONTROL_S,
        )


def drop_programs(cluster: Connection, handles: Iterable[str]) -> None:
    """Makes all tasks refuse steps of these programs."""
    for handle in handles:
        order = frame(program_handle=pb.ProgramHandle(handle=handle))
        with suppress(ClusterError):
            cluster.call("Master.UnregisterProgram", order)
