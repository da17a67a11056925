"""Trace of a cluster: steps of all tasks on one clock, with its error bound."""

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from jgraph.coordination.timeline.chrome import (
    chrome_trace,
    write_bytes,
    write_json,
)
from jgraph.coordination.timeline.clocks import (
    SAME,
    Bounds,
    ClockFit,
    RoundTrip,
    fit,
    offsets,
    tighten,
)
from jgraph.coordination.timeline.critical_path import CriticalPath, critical_path
from jgraph.coordination.timeline.node_times import START, NodeFacts, node_times
from jgraph.coordination.timeline.perfetto import perfetto_trace
from jgraph.coordination.timeline.spans import Span, lanes
from jgraph.coordination.timeline.step_parts import Note, StepPart, note_span
from jgraph.errors import ConfigError
from jgraph.graph.device import TaskName

if TYPE_CHECKING:  # what draws is loaded by who draws: a server never does
    from jgraph.view.svg import Picture

_DOUBT_S: Final = 1e-3
_COLLECTOR: Final = "the clock of who asks"


@final
@dataclass(frozen=True, slots=True)
class ProgramFlight:
    """What one task noted of the steps of one program.

    Attributes:
      handle: of its registration.
      name: what the user calls it.
      driver: of its steps.
      nodes: of the task.
      steps: int64[steps], their ids.
      times: float64[steps, nodes + 1, 3], by the task's clock: of its nodes when they
        were ready, began and were done, then when the step was asked for, begun and
        over. NaN for what did not happen.
    """

    handle: str
    name: str
    driver: TaskName
    nodes: Sequence[NodeFacts]
    steps: np.ndarray[Any, np.dtype[np.int64]]
    times: np.ndarray[Any, np.dtype[np.float64]]


@final
@dataclass(slots=True)
class TaskFlight:
    """What one task noted.

    Attributes:
      programs: of its steps.
      notes: beside its steps, by its clock.
      trips: questions to it, for its clock.
      clock: names its clock; "": none that is known.
      since_s: of what was over later, by its clock, all is here.
    """

    programs: list[ProgramFlight] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    trips: list[RoundTrip] = field(default_factory=list)
    clock: str = ""
    since_s: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class ClusterTrace:
    """The last steps of a cluster: ``cluster.trace(seconds=10)``.

    Attributes:
      parts: what each task did of each step, by the time at which it was over.
      notes: what tasks and clients did beside steps.
      clock_error_s: by task, by how much its times may be off; 0 for the tasks of one
        machine, which have one clock.
      missing: tasks that did not answer.
      began: the time of day at time 0, in seconds since 1970; 0 if unknown.

    Example:
      >>> print(ClusterTrace((), (), {TaskName("/job:worker/task:0"): 0.0}))
      0 steps of 1 task in 0.0 s: no task ran a step in that time
    """

    parts: tuple[StepPart, ...]
    notes: tuple[Note, ...]
    clock_error_s: Mapping[TaskName, float]
    missing: tuple[TaskName, ...] = ()
    began: float = 0.0

    @property
    def tasks(self) -> list[TaskName]:
        """The tasks that answered."""
        return list(self.clock_error_s)

    @property
    def steps(self) -> int:
        """How many steps there are, each with all its parts counted once."""
        return len({(part.handle, part.step) for part in self.parts})

    @property
    def seconds(self) -> float:
        """From the first to the last time."""
        return max((part.over_s for part in self.parts), default=0.0)

    def critical_path(self) -> CriticalPath:
        """Says what the steps waited for, one thing after the other."""
        return critical_path(self.parts)

    def spans(self) -> list[Span]:
        """Returns all that was done and waited for."""
        found = [span for part in self.parts for span in part.spans()]
        return found + [note_span(note) for note in self.notes]

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a file that ui.perfetto.dev and Perfetto's trace_processor open.

        Args:
          path: ends in ``.pftrace``, or in ``.json`` for Chrome's format; its directory
            is made if need be.

        Raises:
          ConfigError: another ending, or a place that cannot be written.
        """
        if check_path(path) == ".json":
            write_json(path, chrome_trace(str(self), self.clock_error_s, self.spans()))
        else:
            write_bytes(path, self.to_perfetto())

    def to_perfetto(self) -> bytes:
        """Returns what ``save`` writes as ``.pftrace``."""
        return perfetto_trace(self.clock_error_s, self.spans(), self.began)

    def show(self, steps: int = 3) -> "Picture":
        """Returns a picture of the last steps: a lane for each task.

        Args:
          steps: how many of those of which all parts are over.
        """
        from jgraph.view.bars import draw_bars

        chosen = self.last(steps)
        first = min((part.asked_s for part in chosen), default=0.0)
        spans = [
            span.moved(-first)
            for part in chosen
            for span in part.spans()
            if span.track != "steps"
        ]
        took = max((span.end_s for span in spans), default=0.0)
        title = f"the last {steps} steps: {1e3 * took:.3f} ms"
        return draw_bars(title, "ms", lanes(self.tasks, spans))

    def last(self, steps: int) -> list[StepPart]:
        """Returns the parts of the last steps that were driven to their end."""
        driven = [part for part in self.parts if part.task == part.driver]
        keys = {(part.handle, part.step) for part in driven[len(driven) - steps :]}
        return [part for part in self.parts if (part.handle, part.step) in keys]

    def __str__(self) -> str:
        tasks = f"{len(self.tasks)} task{'s' if len(self.tasks) != 1 else ''}"
        said = f"{self.steps:,} steps of {tasks} in {self.seconds:.1f} s"
        if not self.parts:
            return f"{said}: no task ran a step in that time"
        error = 1e6 * max(self.clock_error_s.values())
        return f"{said}, clocks ± {error:.0f} us\n{self.critical_path()}"

    def __repr__(self) -> str:
        return (
            f"<trace of {len(self.tasks)} tasks: {self.steps:,} steps in "
            f"{self.seconds:.1f} s; save('cluster.pftrace'), or show() it>"
        )

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


def check_path(path: str | pathlib.Path) -> str:
    """Returns the ending of a file for a trace.

    Raises:
      ConfigError: another one.
    """
    kind = pathlib.Path(path).suffix
    if kind not in (".pftrace", ".json"):
        raise ConfigError(
            f"a trace is written as .pftrace or .json, and not as '{path}'; name it "
            "for example cluster.pftrace"
        )
    return kind


def assemble(
    flights: Mapping[TaskName, TaskFlight],
    clock: str = "",
    *,
    since_s: float = float("-inf"),
    missing: Sequence[TaskName] = (),
    wall: Callable[[float], float] = lambda _: 0.0,
) -> ClusterTrace:
    """Returns what all tasks noted, by the clock of who asked them.

    Args:
      flights: by task.
      clock: names the clock of who asked.
      since_s: what was over earlier, by that clock, is left out.
      missing: tasks that did not answer.
      wall: tells the time of day of a time of that clock.
    """
    clocks = _clocks(flights, clock, since_s if isfinite(since_s) else inf)
    parts = [
        part
        for task, flight in flights.items()
        for part in _parts(task, flight, clocks[task], since_s)
    ]
    notes = [
        _note(task, note, clocks[task])
        for task, flight in flights.items()
        for note in flight.notes
    ]
    notes = [note for note in notes if note.ended_s >= since_s]
    moments = [part.asked_s for part in parts] + [note.began_s for note in notes]
    zero = min(moments, default=0.0)
    parts = [part.moved(-zero) for part in parts]
    parts.sort(key=lambda part: part.over_s)
    return ClusterTrace(
        tuple(parts),
        tuple(note.moved(-zero) for note in notes),
        {task: fitted.error_s for task, fitted in clocks.items()},
        tuple(missing),
        wall(zero) if moments else 0.0,
    )


def _clocks(
    flights: Mapping[TaskName, TaskFlight], mine: str, since_s: float
) -> dict[TaskName, ClockFit]:
    """Returns the clock of each task beside that of who asked."""
    fits = {
        task: fit(flight.trips, since_s) or SAME for task, flight in flights.items()
    }
    name_of = {task: _clock_name(task, flights, fits, mine) for task in flights}
    shared: dict[str, ClockFit] = {_COLLECTOR: SAME}
    for task, name in name_of.items():
        if name not in shared or fits[task].error_s < shared[name].error_s:
            shared[name] = fits[task]
    shared = _tightened(flights, name_of, shared)
    return {task: shared[name] for task, name in name_of.items()}


def _clock_name(
    task: TaskName,
    flights: Mapping[TaskName, TaskFlight],
    fits: Mapping[TaskName, ClockFit],
    mine: str,
) -> str:
    """Returns the name of a task's clock; its own, if it does not go with others."""
    name, found = flights[task].clock, fits[task]
    if not name:
        return task
    same = [fits[other] for other in flights if flights[other].clock == name]
    for other in [SAME] if name == mine else same:
        # Copies of one machine say that they are the same one.
        apart = abs(found.offset_s - other.offset_s)
        if apart > found.error_s + other.error_s + _DOUBT_S:
            return task
    return _COLLECTOR if name == mine else name


def _tightened(
    flights: Mapping[TaskName, TaskFlight],
    name_of: Mapping[TaskName, str],
    clocks: Mapping[str, ClockFit],
) -> dict[str, ClockFit]:
    """Returns the same clocks as messages between the tasks show them, too."""
    bounds: Bounds[str] = {}
    for name, found in clocks.items():
        tighten(bounds, _COLLECTOR, name, found.error_s)
        tighten(bounds, name, _COLLECTOR, found.error_s)
    for src, dst, seconds in _messages(flights, name_of, clocks):
        tighten(bounds, src, dst, seconds)
    moved = offsets(bounds, list(clocks), _COLLECTOR)
    return {
        name: ClockFit(
            found.offset_s + moved[name][0], moved[name][1], found.at_s, found.drift
        )
        for name, found in clocks.items()
    }


def _messages(
    flights: Mapping[TaskName, TaskFlight],
    name_of: Mapping[TaskName, str],
    clocks: Mapping[str, ClockFit],
) -> Iterator[tuple[str, str, float]]:
    """Yields how long the fastest messages took between tasks with other clocks."""
    programs = {
        (task, program.handle): program
        for task, flight in flights.items()
        for program in flight.programs
    }
    for (task, handle), program in programs.items():
        here = clocks[name_of[task]]
        for index, node in enumerate(program.nodes):
            there = programs.get((node.peer, handle)) if node.peer else None
            if node.kind != "send" or there is None or node.peer is None:
                continue
            src, dst = name_of[task], name_of[node.peer]
            received = [n for n, to in enumerate(there.nodes) if _is_for(node, to)]
            if src == dst or not received:
                continue
            both = np.intersect1d(
                *(program.steps, there.steps), return_indices=True, assume_unique=True
            )
            sent = program.times[both[1], index, START]
            came = there.times[both[2], received[0], START]
            took = clocks[dst].there_to_here(came) - here.there_to_here(sent)
            took = took[np.isfinite(took)]
            if len(took):
                yield src, dst, float(took.min())


def _is_for(send: NodeFacts, node: NodeFacts) -> bool:
    return node.kind == "recv" and node.key == send.key


def _parts(
    task: TaskName, flight: TaskFlight, clock: ClockFit, since_s: float
) -> Iterator[StepPart]:
    for program in flight.programs:
        times = clock.there_to_here(program.times)
        for step, rows in zip(program.steps.tolist(), times, strict=True):
            asked, began, over = rows[-1].tolist()
            if over >= since_s:
                nodes = tuple(node_times(task, program.nodes, rows[:-1]))
                yield StepPart(
                    *(task, program.handle, step, program.name, program.driver),
                    *(asked, began, over, nodes),
                )


def _note(task: TaskName, note: Note, clock: ClockFit) -> Note:
    began, ended = clock.here(note.began_s), clock.here(note.ended_s)
    return Note(task, note.kind, note.label, began, ended)
