"""Flight recorder of one task: when the nodes of its last steps ran, in a ring.

A step notes times as it runs, whoever asks for them later. What is here is the past
minute or so: after something went wrong, what came before it can still be looked at.
Steps that take less than a millisecond would make more rows than they are worth: of
these every second one is noted, or every fourth, until the rows of a second are few.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, nan
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.coordination.timeline.node_times import (
    NodeFacts,
    NodeOrder,
    complete_times,
    facts_of,
    order_of,
)
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.runtime.rendezvous import StepKey

ROWS: Final = 65_536
"""Of 24 bytes, one a node and step: what a task keeps."""
ROWS_A_SECOND: Final = 2_500
"""More than these are not noted: at 1 us each they are 0.25 % of a core."""
_LOOK_ROWS: Final = 500
"""After so many rows, a task looks how fast they come."""
_MOST_SKIPS: Final = 63
"""At the least, every 64th step is noted."""
_NOTE: Final = 3
"""Times that a note stands for."""
Times: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Stamps: TypeAlias = "array[float]"
"""Three times a node (ready, began, done), then of the step: asked for, begun, over.

Of a node, only what does not follow from the rest is noted: see ``complete_times``.
"""


_blanks: dict[int, Stamps] = {}


def blank_stamps(nodes: int) -> Stamps:
    """Returns the times of a step that has not begun."""
    blank = _blanks.get(nodes)
    if blank is None:
        blank = _blanks[nodes] = array("d", (nan,)) * (3 * nodes + 3)
    return blank[:]


@final
@dataclass(frozen=True, slots=True)
class Note:
    """What a task did beside its steps.

    Attributes:
      kind: ``"register"``, ``"client"``, ``"checkpoint"``.
      label: of what.
      began_s: by the task's clock.
      ended_s: by the task's clock.
    """

    kind: str
    label: str
    began_s: float
    ended_s: float


@final
@dataclass(slots=True)
class FlownProgram:
    """A program of which steps are kept.

    Attributes:
      name: what the user calls it.
      driver: of its steps.
      nodes: of this task.
      order: of them.
      is_registered: whether there may be more.
    """

    name: str
    driver: TaskName
    nodes: tuple[NodeFacts, ...]
    order: NodeOrder
    is_registered: bool = True


@final
@dataclass(frozen=True, slots=True)
class Flight:
    """Records of a task, in the order in which they were over.

    Attributes:
      last: number of the last one.
      since_s: of what was noted and over later, all is here.
      steps: of the steps, handle and step id.
      times: float64[rows, 3], by the task's clock: for each step its nodes, then a row
        with when it was asked for, begun, and over. NaN for what did not happen.
      programs: by handle, those of the steps.
      notes: beside the steps.
    """

    last: int
    since_s: float
    steps: Sequence[StepKey]
    times: Times
    programs: dict[str, FlownProgram]
    notes: Sequence[Note]


@final
class FlightRecorder:
    """The last steps of a task. Used on one thread.

    Args:
      task: whose.
      rows: how many it keeps, one a node and step; 0: none.
    """

    def __init__(self, task: TaskName, rows: int = ROWS) -> None:
        self._task = task
        self.is_on = rows > 0
        """Whether it keeps anything."""
        self._limit = 3 * rows
        self._size = 0
        self._dropped_s = 0.0
        self._records: deque[tuple[StepKey, Stamps] | tuple[None, Note]] = deque()
        self._programs: dict[str, FlownProgram] = {}
        self.last = 0
        """Number of the last record."""
        self.skips = 0
        """Steps are not noted whose number has one of these bits: whatever else a task
        skips, all tasks note the steps whose numbers have many zeros at their ends."""
        self._began_s = self._all_until_s = -inf
        self._noted = 0

    def registered(self, handle: str, program: Program) -> None:
        """Learns what the nodes of a program are."""
        nodes = facts_of(program, self._task)
        order = order_of(program.partition(self._task))
        self._programs[handle] = FlownProgram(
            program.name, program.driver, nodes, order
        )

    def unregistered(self, handle: str) -> None:
        """Learns that there are no more steps of a program."""
        if handle in self._programs:
            self._programs[handle].is_registered = False
        used = {step[0] for step, _ in self._records if step is not None}
        self._programs = {
            handle: program
            for handle, program in self._programs.items()
            if program.is_registered or handle in used
        }

    def step_over(self, step: StepKey, stamps: Stamps) -> None:
        """Keeps when a step ran, and lets go of the oldest records."""
        self._records.append((step, stamps))
        self.last += 1
        self._size += len(stamps)
        self._noted += len(stamps)
        if self._noted > 3 * _LOOK_ROWS:
            self._pace(stamps[-1])
        while self._size > self._limit:
            self._drop()

    def note_all(self, until_s: float) -> None:
        """Notes every step until then, however many there are."""
        self._all_until_s = max(self._all_until_s, until_s)
        self.skips = 0

    def _pace(self, now: float) -> None:
        """Skips more steps where rows came too fast, and fewer where they may."""
        seconds, rows = now - self._began_s, self._noted / 3
        self._began_s, self._noted = now, 0
        if now < self._all_until_s:
            return
        if rows > ROWS_A_SECOND * seconds:
            self.skips = min(2 * self.skips + 1, _MOST_SKIPS)
        elif rows < ROWS_A_SECOND / 4 * seconds:
            self.skips >>= 1

    def note(self, kind: str, label: str, began_s: float, ended_s: float) -> None:
        """Keeps when something else was done."""
        self._records.append((None, Note(kind, label, began_s, ended_s)))
        self.last += 1
        self._size += _NOTE
        while self._size > self._limit:
            self._drop()

    def _drop(self) -> None:
        _, oldest = self._records.popleft()
        if isinstance(oldest, Note):
            self._size -= _NOTE
        else:
            self._size -= len(oldest)
            self._dropped_s = oldest[-1]

    def after(self, number: int, since_s: float = 0.0) -> Flight:
        """Returns the records after a number that were over after a time."""
        count = max(0, min(len(self._records), self.last - number))
        newest = islice(reversed(self._records), count)
        steps: list[StepKey] = []
        notes: list[Note] = []
        found: list[Stamps] = []
        for step, record in newest:
            if isinstance(record, Note):
                if record.ended_s >= since_s:
                    notes.append(record)
            elif step is not None and record[-1] < since_s:
                break
            elif step is not None and step[0] in self._programs:
                steps.append(step)
                found.append(record)
        steps.reverse()
        found.reverse()
        handles = dict.fromkeys(handle for handle, _ in steps)
        return Flight(
            last=self.last,
            since_s=self._dropped_s,
            steps=steps,
            times=self._times(steps, found),
            programs={handle: self._programs[handle] for handle in handles},
            notes=notes[::-1],
        )

    def _times(self, steps: Sequence[StepKey], records: Sequence[Stamps]) -> Times:
        rows = array("d")
        starts: defaultdict[str, list[int]] = defaultdict(list)
        for (handle, _), stamps in zip(steps, records, strict=True):
            starts[handle].append(len(rows) // 3)
            rows.extend(stamps)
        times = np.array(rows).reshape(-1, 3)
        for handle, begin in starts.items():
            order = self._programs[handle].order
            of_steps = np.add.outer(begin, np.arange(len(order.producers) + 1))
            own = times[of_steps]
            complete_times(own, order)
            times[of_steps] = own
        return times
