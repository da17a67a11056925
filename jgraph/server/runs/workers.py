"""Workers of a run: the search for those missing or new, and their preparation."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from jgraph.clock import Clock
from jgraph.cluster.loop_messages import JOINS
from jgraph.coordination.run.supervisor import (
    Event,
    Failed,
    Knocked,
    NobodyComes,
    PsGone,
    Supervisor,
    TimePassed,
    WorkerAnswered,
    WorkerNotReady,
    WorkerReady,
)
from jgraph.errors import FencedError, JGError, SourceError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.losses import RunLosses
from jgraph.server.runs.peers import LoopPeers, check_master, ready_tasks, stand_ins_of
from jgraph.server.runs.run_client import Restarters
from jgraph.server.runs.run_loops import LoopOrders
from jgraph.server.runs.worker_setup import WorkerSetup

_LOG = logging.getLogger("jgraph.recover")
_POLL_S: Final = 0.5
"""Between two looks: that a worker answers again shows only by asking it."""
_PREPARE_S: Final = 60.0
"""A worker that joins has so long to load the data and to compile."""
_AGAIN_S: Final = 1.0
_MOST_AGAIN_S: Final = 60.0

Orders: TypeAlias = Mapping[int, pb.RunLoop]
"""What the loop of each replica does, or did last."""


@final
@dataclass(slots=True)
class RunJoiners:
    """Finds the workers that may join one run, and makes their first orders.

    Args:
      order: what the client said of the run.
      peers: to the tasks.
      ready: has the programs.
      record: of the run; what it is made of is noted there.
      clock: says when one that could not be used is tried again.
    """

    order: pb.OpenRun
    peers: LoopPeers
    ready: WorkerSetup
    record: Journal
    clock: Clock
    _like: pb.RunLoop = field(init=False, default_factory=pb.RunLoop)
    """The last order of a worker that took part."""
    _first_steps: dict[TaskName, int] = field(init=False, default_factory=dict)
    _refused: dict[tuple[TaskName, str], tuple[float, float]] = field(
        init=False, default_factory=dict
    )
    """When each that could not be used is tried again, and how long that took."""
    _reasons: dict[tuple[TaskName, str], str] = field(init=False, default_factory=dict)
    """Why each process was left out, as was said last."""

    @property
    def is_elastic(self) -> bool:
        """Whether workers join the run, and leave it."""
        return self.order.HasField("elastic")

    @property
    def least(self) -> int:
        """With fewer workers the run waits."""
        return max(1, self.order.elastic.least)

    def strangers(self, orders: Orders) -> list[TaskName]:
        """Returns the workers that may join, as many as the run may have more."""
        if not self.is_elastic:
            return []
        known = {order.task for order in orders.values()}
        most = self.order.elastic.most
        room = most - len(known) if most else len(known) + len(self.peers.workers())
        return [t for t in self.peers.workers() if t not in known][: max(0, room)]

    def due(self, orders: Orders) -> list[TaskName]:
        """Returns those that are to be tried now."""
        now, processes = self.clock.now(), self.peers.workers()
        return [
            task
            for task in self.strangers(orders)
            if self._refused.get((task, processes[task]), (0.0, 0.0))[0] <= now
        ]

    def leavers(self, orders: Orders) -> list[int]:
        """Returns the replicas whose workers are no tasks of the cluster any more."""
        tasks = set(self.peers.tasks())
        return [r for r, order in orders.items() if order.task not in tasks]

    def replaced(self, order: pb.RunLoop, known: str) -> bool:
        """Whether another process has joined as the worker of a loop since."""
        process = self.peers.workers().get(TaskName(order.task), "")
        return bool(process and known) and process != known

    def admit(self, task: TaskName, orders: Orders, number: int) -> pb.RunLoop:
        """Returns the first order of a worker that joins."""
        like = orders[min(orders)] if orders else self._like
        order = pb.RunLoop()
        order.CopyFrom(like)
        index = int(task.rpartition(":")[2])
        order.replica = index if index not in orders else max(orders) + 1
        order.task = task
        order.first_step = self._first_steps.get(task, 0)
        order.handle = f"{self.order.run}{JOINS}{like.term}.{number}"
        order.loop = f"{self.order.run}-{order.replica}"
        for program in self.ready.keep_for(order, like):
            self.record.note(program)
        return order

    def left(self, order: pb.RunLoop) -> None:
        """Takes note that the worker of a loop takes part no more."""
        self._like = order
        self._first_steps[TaskName(order.task)] = order.first_step

    def could_not(self, task: TaskName) -> None:
        """Takes note that a worker could not be used; it is tried again, less often."""
        key = task, self.peers.workers().get(task, "")
        wait_s = min(2 * self._refused.get(key, (0.0, _AGAIN_S / 2))[1], _MOST_AGAIN_S)
        self._refused[key] = self.clock.now() + wait_s, wait_s

    def has_other_data(self, task: TaskName, error: SourceError) -> None:
        """Says why a worker does not take part, once for each of its processes."""
        key = task, self.peers.workers().get(task, "")
        if self._reasons.get(key) != error.message:
            self._reasons[key] = error.message
            text = f"{task} has no part in run '{self.order.run}': {error.message}"
            self.peers.note("refused", text, level=logging.WARNING)

    def contributions(self, wanted: int, workers: int) -> int:
        """Returns how many contributions an update of so many workers takes.

        Args:
          wanted: so many as it took.
          workers: in the next row.
        """
        if not self.is_elastic:
            return wanted
        elastic = self.order.elastic
        return elastic.contributions or max(1, workers - elastic.backup_workers)


@final
@dataclass(slots=True)
class RunWorkers:
    """Looks for the workers of one run that are missing, or new, and prepares them.

    Args:
      joiners: finds those that may join.
      orders: what the loop of each does.
      copies: what is kept of the ps.
      losses: says which processes the run knows.
      restarters: of whoever can start workers.
      handle: takes what becomes of them.
      do: does something meanwhile.
    """

    joiners: RunJoiners
    orders: LoopOrders
    copies: RunCopies
    losses: RunLosses
    restarters: Restarters
    handle: Callable[[Event], None]
    do: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    _machine: Supervisor | None = field(init=False, default=None)
    _is_looking: bool = field(init=False, default=False)
    _news: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    """Of members of the cluster."""
    _joining: dict[int, "tuple[int, asyncio.Task[None]]"] = field(
        init=False, default_factory=dict
    )

    def begin(self, machine: Supervisor) -> None:
        """Looks for workers from now on, as the machine of the run says."""
        self._machine = machine

    @property
    def standing(self) -> list[str]:
        """Those that take part."""
        running: Iterable[int] = () if self._machine is None else self._machine.running
        orders = self.orders.replicas
        return [orders[replica].task for replica in running if replica in orders]

    def close(self) -> None:
        """Waits for nobody who starts workers any more."""
        self.restarters.close()

    # ------------------------------------------------------------ the search

    def rearranged(self) -> None:
        """Looks at once: tasks have joined the cluster, or left it."""
        self._news.set()
        self.seek()

    def seek(self) -> None:
        """Begins to look for workers, if some are missing or might join."""
        if self._machine is None:
            return
        for replica in set(self._machine.former) & self.orders.replicas.keys():
            self.joiners.left(self.orders.replicas.pop(replica))
        if self._seeks and not self._is_looking:
            self._is_looking = True
            self.do(self._look(self._machine))

    @property
    def _seeks(self) -> bool:
        missing = self._machine is not None and self._machine.missing
        return bool(missing or self._strangers)

    @property
    def _strangers(self) -> list[TaskName]:
        """Workers that may join, if the run takes any."""
        machine, is_over = self._machine, self.joiners.record.is_over
        if machine is None or not machine.takes_workers or is_over:
            return []
        return self.joiners.strangers(self.orders.replicas)

    async def _look(self, machine: Supervisor) -> None:
        """Looks for workers that are missing, as long as there are any."""
        try:
            while self._seeks:
                await self._pause()
                self.handle(TimePassed())
                orders = self.orders.replicas
                due = self.joiners.due(orders) if self._strangers else []
                if not (machine.missing or due):
                    continue
                if (error := await self.losses.unreached_ps()) is not None:
                    self.handle(PsGone(error))
                await self._ask_restarters(machine)
                ready = await ready_tasks(self.joiners.peers)
                for replica in machine.missing:
                    if replica not in orders:
                        continue  # it has left meanwhile
                    task = TaskName(orders[replica].task)
                    if await self.losses.is_back(task, ready):
                        self.handle(WorkerAnswered(replica))
                for task in due:
                    if await self.losses.is_back(task, ready):
                        self._admit(task)
        finally:
            self._is_looking = False
            self.losses.unreached.clear()

    async def _pause(self) -> None:
        """Waits a while, or for news of members."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), _POLL_S)
        self._news.clear()

    def _admit(self, task: TaskName) -> None:
        """Lets a worker join the run, if that still takes it."""
        if task not in self._strangers:
            return
        orders, number = self.orders.replicas, self.orders.next_number()
        order = self.joiners.admit(task, orders, number)
        orders[order.replica] = order
        self.handle(Knocked(order.replica))

    async def _ask_restarters(self, machine: Supervisor) -> None:
        """Asks whether somebody starts a worker, if the run has none."""
        if not machine.is_alone:
            self.restarters.close()
            return
        order, record = self.joiners.order, self.joiners.record
        if not self.restarters.is_asked:
            try:  # another master may have the run, and the workers
                await check_master(self.joiners.peers, order.run, record.term)
            except FencedError as error:
                self.handle(Failed(error))
                return
        what = f"no worker is left; the run waits up to {order.wait_s:g} s for one"
        if self.joiners.is_elastic:
            what += ": cluster.scale(workers=…), or jgraph server --job worker --join"
        if not self.restarters.is_asked:
            _LOG.warning(what)
        workers = [one.task for one in self.orders.replicas.values()]
        nobody = self.restarters.learned(workers, what) is not None
        if nobody and not self.joiners.is_elastic:  # else another one may join
            self.handle(NobodyComes())

    # ------------------------------------------------------------ preparation

    def prepare(self, replica: int, *, joins: bool) -> None:
        """Prepares a worker that is back, or that joins."""
        number = self.orders.next_number()
        if joins:
            self._joining[replica] = number, self.do(self._join(replica, number))
        else:
            self.do(self._prepare(replica, number))

    def forget(self, replica: int) -> None:
        """Prepares a worker that would join no more."""
        ready, order = self.joiners.ready, self.orders.replicas.pop(replica)
        self.do(ready.drop(order.handle))
        if (preparing := self._joining.pop(replica, None)) is not None:
            number, task = preparing
            task.cancel()
            self._drop_next(order, number)

    def _drop_next(self, order: pb.RunLoop, number: int) -> None:
        """Drops what was made for a worker that does not take part after all."""
        ready = self.joiners.ready
        self.do(ready.drop(ready.next_handle(order, number)))

    async def _join(self, replica: int, number: int) -> None:
        """Prepares a worker that joins, within its time."""
        order = self.orders.replicas[replica]
        try:
            async with asyncio.timeout(_PREPARE_S):
                ready = await self._make_ready(replica, number)
        except TimeoutError:
            ready = False
            text = "%s was not ready after %g s, and does not take part yet"
            _LOG.warning(text, order.task, _PREPARE_S)
            self._drop_next(order, number)
        if ready:
            text = f"{order.task} takes part in run '{order.run}'"
            self.joiners.peers.note("joined", text)
        elif ready is not None:
            self.joiners.could_not(TaskName(order.task))
        self._joining.pop(replica, None)
        if ready is not None:
            self.handle(WorkerReady(replica) if ready else WorkerNotReady(replica))

    async def _prepare(self, replica: int, number: int) -> None:
        """Prepares a worker that is back."""
        ready = await self._make_ready(replica, number)
        if ready is None:
            return
        if ready:
            task = TaskName(self.orders.replicas[replica].task)
            renewed = ", as another process" if task in self.losses.renewed else ""
            self.losses.renewed.discard(task)
            _LOG.warning("%s answers again and takes part in the run%s", task, renewed)
        self.handle(WorkerReady(replica) if ready else WorkerNotReady(replica))

    async def _make_ready(self, replica: int, number: int) -> bool | None:
        """Gives a worker what its loop needs; None: no run goes on here."""
        order = self.orders.replicas[replica]
        try:
            await check_master(self.joiners.peers, order.run, order.term)
            ps, ready = None, self.joiners.ready
            while ps != ready.ps:  # the variables may move to others meanwhile
                ps = ready.ps
                order.handle = await ready.prepare(order, number)
            if order.task not in stand_ins_of(self.joiners.order):
                await self.copies.admit(order.handle, 0)  # else with its part
        except FencedError as error:
            self.handle(Failed(error))
            return None
        except SourceError as error:
            self.joiners.has_other_data(TaskName(order.task), error)
            return False
        except JGError as error:  # it went away again; the next look tells
            _LOG.info("%s does not take part yet: %s", order.task, error.message)
            self._drop_next(order, number)
            return False
        if self.joiners.record.is_over:  # what was made for it is dropped by now
            await ready.drop(order.handle)
            return None
        return True
