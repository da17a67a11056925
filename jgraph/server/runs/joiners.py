"""Joiners of a run: workers of its cluster that might take part and do not yet."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

from jgraph.clock import Clock
from jgraph.cluster.loop_messages import JOINS
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.peers import LoopPeers
from jgraph.server.runs.worker_setup import WorkerSetup

PREPARE_S: Final = 60.0
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


def standing_tasks(orders: Orders, replicas: Iterable[int]) -> list[str]:
    """Returns the workers of these replicas."""
    return [orders[replica].task for replica in replicas if replica in orders]
