"""Flight recorder of one task: when the nodes of its last steps ran, in a ring.

A step notes times as it runs, whoever asks for them later. What is here is the past
minute or so: after something went wrong, what came before it can still be looked at.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
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
_NOTES: Final = 4096
"""Of what is not a step, so many are kept."""
_KEY: Final = 3
_LENGTH_BITS: Final = 32
_LENGTH: Final = (1 << _LENGTH_BITS) - 1
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
        self._limit = 3 * rows
        # Times of the steps that are kept, one after the other, round and round. They
        # are copied: an object that lives for a minute is out of the cache of the
        # processor when it goes, and so is the memory that the next one gets.
        self._ring = array("d", bytes(8 * self._limit))
        self._end = self._size = 0  # of the ring: where the next goes; in use
        # Of each step its id, its number, and program and length; likewise.
        self._keys = array("Q", bytes(8 * _KEY * rows))
        self._next = self._count = 0
        self._dropped_s = 0.0
        self._notes: deque[tuple[int, Note]] = deque(maxlen=_NOTES)
        self._programs: dict[str, FlownProgram] = {}
        self._numbers: dict[str, int] = {}  # of programs, by handle
        self._registered = 0
        self.last = 0
        """Number of the last record."""

    @property
    def is_on(self) -> bool:
        """Whether it keeps anything."""
        return self._limit > 0

    def registered(self, handle: str, program: Program) -> None:
        """Learns what the nodes of a program are."""
        nodes = facts_of(program, self._task)
        order = order_of(program.partition(self._task))
        self._programs[handle] = FlownProgram(
            program.name, program.driver, nodes, order
        )
        if handle not in self._numbers:
            self._registered += 1
            self._numbers[handle] = self._registered

    def unregistered(self, handle: str) -> None:
        """Learns that there are no more steps of a program."""
        if handle in self._programs:
            self._programs[handle].is_registered = False
        used = {program for program, *_ in self._newest(self._count)}
        self._programs = {
            handle: program
            for handle, program in self._programs.items()
            if program.is_registered or self._numbers[handle] in used
        }
        self._numbers = {handle: self._numbers[handle] for handle in self._programs}

    def step_over(self, step: StepKey, stamps: Stamps) -> None:
        """Keeps when a step ran, and lets go of the oldest records."""
        program, length = self._numbers.get(step[0]), len(stamps)
        self.last += 1
        if program is None or length > self._limit:
            return
        while self._size + length > self._limit:
            self._drop()
        begin, end = self._end, self._end + length
        if end <= self._limit:
            self._ring[begin:end] = stamps
        else:
            rest = self._limit - begin
            self._ring[begin:] = stamps[:rest]
            self._ring[: length - rest] = stamps[rest:]
        self._end = end % self._limit
        self._size += length
        at = _KEY * self._next
        self._keys[at] = step[1]
        self._keys[at + 1] = self.last
        self._keys[at + 2] = program << _LENGTH_BITS | length
        self._next = (self._next + 1) % (len(self._keys) // _KEY)
        self._count += 1

    def note(self, kind: str, label: str, began_s: float, ended_s: float) -> None:
        """Keeps when something else was done."""
        self.last += 1
        if self.is_on:
            self._notes.append((self.last, Note(kind, label, began_s, ended_s)))

    def _drop(self) -> None:
        """Lets go of the oldest step."""
        at = _KEY * ((self._next - self._count) % (len(self._keys) // _KEY))
        length = self._keys[at + 2] & _LENGTH
        self._dropped_s = self._ring[
            (self._end - self._size + length - 1) % self._limit
        ]
        self._size -= length
        self._count -= 1

    def _newest(self, count: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yields the newest steps, the last one first.

        Of each the number of its program, its id, its own number, and where in the ring
        its times begin, and how many they are.
        """
        end, slots = self._end, len(self._keys) // _KEY
        for back in range(1, min(count, self._count) + 1):
            at = _KEY * ((self._next - back) % slots)
            step_id, number, word = self._keys[at : at + _KEY]
            length = word & _LENGTH
            end = (end - length) % self._limit
            yield word >> _LENGTH_BITS, step_id, number, end, length

    def _stamps(self, begin: int, length: int) -> Stamps:
        end = begin + length
        if end <= self._limit:
            return self._ring[begin:end]
        return self._ring[begin:] + self._ring[: end - self._limit]

    def after(self, number: int, since_s: float = 0.0) -> Flight:
        """Returns the records after a number that were over after a time."""
        handles = {number: handle for handle, number in self._numbers.items()}
        steps: list[StepKey] = []
        found: list[Stamps] = []
        for program, step_id, own, begin, length in self._newest(self._count):
            if (
                own <= number
                or self._ring[(begin + length - 1) % self._limit] < since_s
            ):
                break
            if program in handles:
                steps.append((handles[program], step_id))
                found.append(self._stamps(begin, length))
        steps.reverse()
        found.reverse()
        used = dict.fromkeys(handle for handle, _ in steps)
        newer = [note for own, note in self._notes if own > number]
        return Flight(
            last=self.last,
            since_s=self._dropped_s,
            steps=steps,
            times=self._times(steps, found),
            programs={handle: self._programs[handle] for handle in used},
            notes=[note for note in newer if note.ended_s >= since_s],
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
