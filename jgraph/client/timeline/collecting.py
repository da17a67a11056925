"""Collector of flight records: asks all tasks what they noted, and for their clocks."""

import asyncio
import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final, final

import numpy as np

from jgraph.clock import Clock, SystemClock, WallClock, clock_identity
from jgraph.coordination.timeline.clocks import RoundTrip
from jgraph.coordination.timeline.cluster_trace import (
    ClusterTrace,
    ProgramFlight,
    TaskFlight,
    assemble,
)
from jgraph.coordination.timeline.node_times import NodeFacts
from jgraph.coordination.timeline.step_parts import Note
from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    JGError,
    TaskLostError,
    UnknownMethodError,
)
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Address, Frame, Transport

MOST_S: Final = 60.0
_ASK_S: Final = 10.0
_PROFILE_S: Final = 60.0
"""To write a profile, after the time that it is of."""
_CLOCK_EVERY_S: Final = 0.25
_RECORDS_EVERY: Final = 8
"""Looks at the clocks: what is noted in that time, a task keeps."""
_TRIPS: Final = 8


def check_seconds(seconds: float | None, last: float | None) -> None:
    """Refuses a time that no trace is of.

    Raises:
      ConfigError: neither or both, or one that is not above 0, or above 60 s.
    """
    if (seconds is None) == (last is None):
        raise ConfigError(
            "a trace is of the next seconds or of the last ones: write one of "
            "seconds=10 and last=30"
        )
    found = last if seconds is None else seconds
    if found is None or not (math.isfinite(found) and 0 < found <= MOST_S):
        raise ConfigError(
            f"a trace is of more than 0 and at most {MOST_S:g} seconds, and not of "
            f"{found!r}; write for example seconds=10"
        )


@final
class FlightCollector:
    """Asks the tasks of a cluster for their records.

    Args:
      transport: of a client.
      tasks: where they are.
      clock: by which all is told in the end.
      identity: names that clock.

    Attributes:
      flights: what each task told so far.
    """

    def __init__(
        self,
        transport: Transport,
        tasks: Mapping[TaskName, Address],
        clock: Clock | None = None,
        identity: str | None = None,
    ) -> None:
        self._transport = transport
        self._tasks = dict(tasks)
        self._clock = clock or SystemClock()
        self._identity = clock_identity() if identity is None else identity
        self.flights: dict[TaskName, TaskFlight] = {}
        self._last: dict[TaskName, int] = {}
        self._nodes: dict[tuple[TaskName, str], pb.FlightProgram] = {}
        self._missing: dict[TaskName, JGError] = {}

    async def next(self, seconds: float) -> ClusterTrace:
        """Returns what the tasks do from now on, for so long.

        Raises:
          JGError: none answers.
        """
        # Waits are by the clock of the loop; the other one only dates what is found.
        began, now = self._clock.now(), asyncio.get_running_loop().time
        ends, looks = now() + seconds, 0
        whole_s = seconds + _ASK_S  # from here on, how many steps there may be
        await self._look(pb.FlightQuery(no_records=True, whole_s=whole_s))
        while (remaining_s := ends - now()) > 0:
            await asyncio.sleep(min(remaining_s, _CLOCK_EVERY_S))
            looks += 1
            records = looks % _RECORDS_EVERY == 0
            await self._look(pb.FlightQuery(no_records=not records))
        await self._look(pb.FlightQuery())
        return self._trace(began)

    async def last(self, seconds: float) -> ClusterTrace:
        """Returns what the tasks did before now, for so long, as far as they keep it.

        Raises:
          JGError: none answers.
        """
        began = self._clock.now()
        for _ in range(_TRIPS):
            await self._look(pb.FlightQuery(no_records=True))
        self._last.clear()
        await self._look(pb.FlightQuery(last_s=seconds))
        return self._trace(began - seconds)

    async def _look(self, query: pb.FlightQuery) -> None:
        asked = [task for task in self._tasks if task not in self._missing]
        await asyncio.gather(*(self._ask(task, query) for task in asked))
        if len(self._missing) == len(self._tasks):
            raise next(iter(self._missing.values()))

    async def _ask(self, task: TaskName, query: pb.FlightQuery) -> None:
        known = [handle for of, handle in self._nodes if of == task]
        asked = pb.FlightQuery(
            after=self._last.get(task, 0),
            last_s=query.last_s,
            known=known,
            no_records=query.no_records,
            whole_s=query.whole_s,
        )
        sent_s = self._clock.now()
        try:
            reply = await self._transport.ask(
                *(self._tasks[task], "Flight", frame(flight_query=asked)),
                timeout_s=_ASK_S,
            )
        except (ClusterUnreachableError, TaskLostError, UnknownMethodError) as error:
            self._missing[task] = error
            return
        back_s, answer = self._clock.now(), body_of(reply)
        flight = self.flights.setdefault(task, TaskFlight())
        trip = RoundTrip(sent_s, answer.received_s, answer.answered_s, back_s)
        flight.trips.append(trip)
        flight.clock = answer.clock
        if query.no_records:
            self._last.setdefault(task, answer.last)
            return
        self._last[task] = answer.last
        self._take(task, flight, answer, reply)

    def _take(
        self, task: TaskName, flight: TaskFlight, answer: pb.Flight, reply: Frame
    ) -> None:
        self._nodes |= {(task, program.handle): program for program in answer.programs}
        flight.since_s = max(flight.since_s, answer.since_s)
        flight.notes += [
            Note(task, note.kind, note.label, note.began_s, note.ended_s)
            for note in answer.notes
        ]
        steps, rows = reply.tensors
        programs = [self._nodes[task, handle] for handle in answer.handles]
        lengths = np.array([len(program.nodes) + 1 for program in programs], np.int64)
        ends = np.cumsum(lengths[steps[:, 0]]) if len(steps) else np.zeros(0, np.int64)
        for index, program in enumerate(programs):
            chosen = np.flatnonzero(steps[:, 0] == index)
            length = lengths[index]
            where = ends[chosen][:, None] + np.arange(-length, 0)
            flight.programs.append(
                ProgramFlight(
                    handle=program.handle,
                    name=program.name,
                    driver=TaskName(program.driver),
                    nodes=[_facts(node) for node in program.nodes],
                    steps=steps[chosen, 1],
                    times=rows[where],
                )
            )

    def _trace(self, since_s: float) -> ClusterTrace:
        wall, now = WallClock().now(), self._clock.now()
        tasks = [task for task in self._tasks if task in self.flights]
        return assemble(
            {task: self.flights[task] for task in tasks},
            self._identity,
            since_s=since_s,
            missing=list(self._missing),
            wall=lambda moment: wall - now + moment,
        )


async def profile_of(
    transport: Transport, address: Address, seconds: float
) -> dict[str, bytes]:
    """Returns XLA's profile of a task, taken from now on: files by name.

    Raises:
      JGError: the task does not answer, or is being profiled.
    """
    reply = await transport.ask(
        address,
        "Profile",
        frame(profile_query=pb.ProfileQuery(seconds=seconds)),
        timeout_s=seconds + _PROFILE_S,
    )
    names = (PurePosixPath(name) for name in body_of(reply).names)
    files = zip(names, reply.tensors, strict=True)
    return {
        str(name): content.tobytes()
        for name, content in files
        if not name.is_absolute() and ".." not in name.parts
    }


def _facts(node: pb.FlightNode) -> NodeFacts:
    peer = TaskName(node.peer) if node.peer else None
    return NodeFacts(node.kind, node.label, node.nbytes, peer, node.key)
