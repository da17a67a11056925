"""Log and event readers: fetch new lines from all tasks over the network."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Final, final

from jgraph.client.status import ClusterStatus
from jgraph.cluster import event_loop
from jgraph.cluster.events import Event, from_json
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import JGError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Transport

_ASK_S: Final = 2.0
_MOST: Final = 200
_EVENTS: Final = 1000


@final
class LogTail:
    """What tasks write to their logs from now on.

    Args:
      transport: of a client.
      spec: where the tasks are.
      tasks: whose logs; those of all if unset.
      behind: how many lines that are there already come first.
      must_answer: raise what a task answers with before its first line; else a task
        that is lost, or busy, is silent.
      events: not the logs, but the events that tasks noted, as lines of JSON.

    Example:
      >>> from jgraph.client.cluster import connect
      >>> from jgraph.server.server import Server
      >>> server = Server({"worker": ["localhost:0"]})
      >>> with connect(server.target) as cluster:
      ...     LogTail(cluster.transport, cluster.spec).new()
      []
      >>> server.stop()
    """

    def __init__(
        self,
        transport: Transport,
        spec: ClusterSpec,
        tasks: list[TaskName] | None = None,
        *,
        behind: int = 0,
        must_answer: bool = False,
        events: bool = False,
    ) -> None:
        self._transport = transport
        self._spec = spec
        self._tasks = spec.tasks() if tasks is None else tasks
        self._last_numbers: dict[TaskName, int] = {}
        self._processes: dict[TaskName, str] = {}
        self._newest_events: Mapping[TaskName, int | None] = {}
        self._behind = behind
        self._must_answer = must_answer
        self._events = events

    def look_at(self, status: ClusterStatus) -> None:
        """Asks the tasks of another description from now on: some came, or left.

        Those of whose events this says that none is new are not asked the next time.
        The lines of one that was started again have the numbers of those before.
        """
        self._spec, self._tasks = status.cluster, status.cluster.tasks()
        for one in status.tasks:
            task, process = one.task, one.incarnation
            if self._processes.setdefault(task, process) != process:
                self._processes[task], self._last_numbers[task] = process, 0
        if self._events:
            self._newest_events = {one.task: one.newest_event for one in status.tasks}

    def new(self) -> list[tuple[TaskName, str]]:
        """Returns lines since the last call, by task; none of one that is silent."""
        return event_loop.run(self._ask_all())

    def follow(
        self, every_s: float, stop: threading.Event
    ) -> Iterator[tuple[TaskName, str]]:
        """Yields lines as they come, until ``stop`` is set."""
        while True:
            yield from self.new()
            if stop.wait(every_s):
                return

    async def _ask_all(self) -> list[tuple[TaskName, str]]:
        newest, self._newest_events = self._newest_events, {}
        asked = [
            t for t in self._tasks if newest.get(t) != self._last_numbers.get(t, 0)
        ]
        by_task = await asyncio.gather(*map(self._ask, asked))
        return [line for lines in by_task for line in lines]

    async def _ask(self, task: TaskName) -> list[tuple[TaskName, str]]:
        last_number = self._last_numbers.get(task)
        limit = self._behind if last_number is None else _MOST
        query = pb.LogQuery(after=last_number or 0, limit=limit, events=self._events)
        address = self._spec.address(task)
        try:
            reply = await self._transport.ask(
                address, "TaskLog", frame(log_query=query), timeout_s=_ASK_S
            )
        except JGError:
            if last_number is None and self._must_answer:
                raise
            return []
        body = body_of(reply)
        self._last_numbers[task] = body.last
        return [(task, line) for line in body.lines]


@final
class EventTail:
    """What the tasks of a cluster note; see ``jgraph.cluster.events``.

    Args:
      transport: of a client.
      spec: where the tasks are.
    """

    def __init__(self, transport: Transport, spec: ClusterSpec) -> None:
        self._log = LogTail(transport, spec, behind=_EVENTS, events=True)

    def look_at(self, status: ClusterStatus) -> None:
        """Asks the tasks of another description from now on, see ``LogTail``."""
        self._log.look_at(status)

    def new(self) -> list[Event]:
        """Returns events since the last call, by time; none of a silent task."""
        events = (from_json(line) for _, line in self._log.new())
        return sorted(events, key=lambda event: event.time_s)
