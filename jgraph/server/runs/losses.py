"""Losses of a run: the processes it knows, and what the end of a loop says is gone."""

import asyncio
from collections.abc import Mapping
from typing import final

from jgraph.coordination.run.loop_outcome import is_link_loss
from jgraph.coordination.run.recovery import has_lost_data
from jgraph.coordination.run.supervisor import Event, LoopFailed, LoopLost, StateLost
from jgraph.errors import (
    ClusterUnreachableError,
    DataSlotError,
    FencedError,
    InvalidProgramError,
    JGError,
    TaskLostError,
    UninitializedError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.peers import (
    Peers,
    holds_state,
    is_there,
    reaches_state,
    ready_tasks,
    stand_ins_of,
)


@final
class RunLosses:
    """Finds out what one run has lost: a worker, or the state that its ps held.

    Args:
      order: what the client says of the run, and which processes hold its state.
      peers: to the tasks.

    Attributes:
      known: which process of each task the run knows.
      renewed: tasks that came back as another process than the run knew.
      unreached: errors of workers that did not reach a ps, though it was there.
    """

    def __init__(self, order: pb.OpenRun, peers: Peers) -> None:
        self.known: dict[TaskName, str] = {}
        self.renewed: set[TaskName] = set()
        self.unreached: dict[TaskName, JGError] = {}
        self._order = order
        self._peers = peers
        self._learning: asyncio.Future[dict[TaskName, str]] | None = None

    @property
    def holders(self) -> dict[str, str]:
        """Processes of the tasks that hold the state of the run."""
        return {task: one for task, one in self.known.items() if self._holds(task)}

    def _holds(self, task: TaskName) -> bool:
        return holds_state(self._order, task)

    def forget(self) -> None:
        """Knows no more than which processes hold the state, as the order says."""
        holders = self._order.holders.items()
        self._learning = None
        self.known = {TaskName(task): process for task, process in holders}
        self.unreached.clear()

    async def learn(self) -> None:
        """Takes note, once, of which processes there are of tasks it does not know."""
        if self._learning is None:
            self._learning = asyncio.ensure_future(ready_tasks(self._peers))
        self.known = {**await self._learning, **self.known}

    async def of(self, order: pb.RunLoop, error: JGError) -> Event:
        """Returns what is lost where a loop ends with an error: a worker, or the state.

        Or nothing, and the run fails.
        """
        decides = order.HasField("sync")
        replica = None if decides else order.replica
        failed = LoopFailed(replica, error)
        if isinstance(error, DataSlotError | FencedError):
            return failed
        task = TaskName(order.task)
        named = TaskName(str(error.details.get("task", "")))
        is_loss = isinstance(error, TaskLostError | ClusterUnreachableError)
        has_left = task not in self._peers.tasks()
        is_gone = (is_loss and named == task) or has_lost_data(error) or has_left
        if is_gone and not (decides or self._holds(task)):
            return LoopLost(order.replica, error)  # whoever else answers
        ready = await ready_tasks(self._peers)
        if is_loss:
            # A ps that is where it was, or only the worker does not reach it.
            if not decides and is_link_loss(named, self.known, ready):
                if self._holds(named):
                    self.unreached[named] = error
                return LoopLost(order.replica, error)
            # A program of before an owner lost its part needs that owner.
            is_lost = self._holds(named) or named in stand_ins_of(self._order)
            return StateLost(replica, error) if is_lost else failed
        changed = {t for t, one in self.known.items() if ready.get(t) != one}
        # It has lost what it had, though it may be the one that was known last.
        is_new = isinstance(error, InvalidProgramError | UninitializedError)
        if any(map(self._holds, changed)) or (is_new and self._holds(named)):
            return StateLost(replica, error)
        if task in changed:
            return LoopLost(order.replica, error)
        # A master before dropped the programs of the run, which was to go back.
        goes_back = isinstance(error, InvalidProgramError)
        return StateLost(replica, error) if goes_back else failed

    async def ps(self) -> list[TaskName]:
        """Returns the holders of the state whose processes do not answer any more."""
        ready = await ready_tasks(self._peers)
        changed = [t for t, one in self.known.items() if ready.get(t) != one]
        return list(filter(self._holds, changed))

    async def unreached_ps(self) -> JGError | None:
        """Returns the error of a worker if the ps that it did not reach is gone now."""
        for ps, error in list(self.unreached.items()):
            if not await is_there(self._peers, ps, self.known.get(ps, "")):
                self.unreached.clear()
                return error
        return None

    async def is_back(self, task: TaskName, ready: Mapping[TaskName, str]) -> bool:
        """Whether a worker is there again, and reaches every ps; it is known then.

        One that held variables of the run, and was started again, has lost them.
        """
        before = self.known.get(task)
        if self._holds(task) and before and ready.get(task, before) != before:
            what = f"{task} was started again, and what it held is lost"
            self.unreached[task] = TaskLostError(what, task=task)
            return False
        if task in ready and await reaches_state(self._peers, self._order, task):
            if before and ready[task] != before:
                self.renewed.add(task)
            self.known[task] = ready[task]
            return True
        return False
