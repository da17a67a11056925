"""Flight recorder of one task: when the nodes of its last steps ran, in a ring.

A step notes times as it runs, whoever asks for them later. What is here is the past
minute or so: after something went wrong, what came before it can still be looked at.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Final, TypeAlias, final

import numpy as np

from jgraph.coordination.timeline.node_times import NodeFacts, facts_of
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.runtime.rendezvous import StepKey

ROWS: Final = 65_536
"""Of 24 bytes, one a node and step: what a task keeps."""
_NOTES: Final = 1_024
Stamps: TypeAlias = "array[float]"
"""Three times a node (ready, began, done), then of the step: asked for, begun, over."""


def blank_stamps(nodes: int) -> Stamps:
    """Returns the times of a step that has not begun."""
    return array("d", (nan,)) * (3 * nodes + 3)


@final
@dataclass(frozen=True, slots=True)
class Note:
    """What a task did beside its steps.

    Attributes:
      number: of the record.
      kind: ``"register"``, ``"client"``, ``"checkpoint"``.
      label: of what.
      began_s: by the task's clock.
      ended_s: by the task's clock.
    """

    number: int
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
      steps: of it that are kept.
      is_registered: whether there may be more.
    """

    name: str
    driver: TaskName
    nodes: tuple[NodeFacts, ...]
    steps: int = 0
    is_registered: bool = True


@final
@dataclass(frozen=True, slots=True)
class Flight:
    """Records of a task, in the order in which they were over.

    Attributes:
      last: number of the last one.
      since_s: of what was over later, all is here.
      steps: of the steps, handle and step id.
      times: float64[rows, 3], by the task's clock: for each step its nodes, then a row
        with when it was asked for, begun, and over. NaN for what did not happen.
      programs: by handle, those of the steps.
      notes: beside the steps.
    """

    last: int
    since_s: float
    steps: Sequence[StepKey]
    times: np.ndarray[tuple[int, int], np.dtype[np.float64]]
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
        self._rows = rows
        self._size = 0
        self._number = 0
        self._dropped_s = 0.0
        self._steps: deque[tuple[int, StepKey, Stamps]] = deque()
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._programs: dict[str, FlownProgram] = {}

    @property
    def last(self) -> int:
        """Number of the last record."""
        return self._number

    @property
    def is_on(self) -> bool:
        """Whether it keeps anything."""
        return self._rows > 0

    def registered(self, handle: str, program: Program) -> None:
        """Learns what the nodes of a program are."""
        nodes = facts_of(program, self._task)
        self._programs[handle] = FlownProgram(program.name, program.driver, nodes)

    def unregistered(self, handle: str) -> None:
        """Learns that there are no more steps of a program."""
        program = self._programs.get(handle)
        if program is not None:
            program.is_registered = False
            self._forget_unused(handle, program)

    def step_over(self, step: StepKey, stamps: Stamps) -> None:
        """Keeps when a step ran, and lets go of the oldest ones."""
        program = self._programs.get(step[0])
        if program is None:
            return
        program.steps += 1
        self._number += 1
        self._steps.append((self._number, step, stamps))
        self._size += len(stamps)
        while self._size > 3 * self._rows:
            _, (handle, _), old = self._steps.popleft()
            self._size -= len(old)
            self._dropped_s = old[-1]
            program = self._programs[handle]
            program.steps -= 1
            self._forget_unused(handle, program)

    def note(self, kind: str, label: str, began_s: float, ended_s: float) -> None:
        """Keeps when something else was done."""
        self._number += 1
        self._notes.append(Note(self._number, kind, label, began_s, ended_s))

    def after(self, number: int, since_s: float = 0.0) -> Flight:
        """Returns the records after a number that were over after a time."""
        found: list[tuple[StepKey, Stamps]] = []
        for at, step, stamps in reversed(self._steps):
            if at <= number or stamps[-1] < since_s:
                break
            found.append((step, stamps))
        found.reverse()
        handles = dict.fromkeys(handle for (handle, _), _ in found)
        rows = array("d")
        for _, stamps in found:
            rows.extend(stamps)
        return Flight(
            last=self._number,
            since_s=self._dropped_s,
            steps=[step for step, _ in found],
            times=np.frombuffer(rows, np.float64).reshape(-1, 3),
            programs={handle: self._programs[handle] for handle in handles},
            notes=[
                note
                for note in self._notes
                if note.number > number and note.ended_s >= since_s
            ],
        )

    def _forget_unused(self, handle: str, program: FlownProgram) -> None:
        if not program.steps and not program.is_registered:
            del self._programs[handle]
