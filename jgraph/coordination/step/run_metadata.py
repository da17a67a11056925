"""RunMetadata of a traced step: times of all nodes on all tasks, by one clock.

The clocks of two machines have nothing to do with each other. Every message bounds
their difference: it cannot arrive before it was sent. From all messages of a step in
both directions follows an interval for each task's clock, and its middle breaks none
of these bounds.

Source: Mills, "Internet Time Synchronization: the Network Time Protocol", 1991, for
one pair of messages; here all of them count.
"""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from jgraph.coordination.timeline.chrome import chrome_trace, write_json
from jgraph.coordination.timeline.clocks import Bounds, offsets, tighten
from jgraph.coordination.timeline.node_times import (
    START,
    NodeTime,
    facts_of,
    node_times,
)
from jgraph.coordination.timeline.spans import lanes, node_spans
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import RecvNode, SendNode
from jgraph.plan.program.program import Program

if TYPE_CHECKING:  # what draws is loaded by who draws: a server never does
    from jgraph.view.svg import Picture


@final
@dataclass(frozen=True, slots=True)
class PartTimes:
    """What one task measured of a step.

    Attributes:
      task: whose partition.
      times: float64[nodes, 3], by the task's own clock: when a node had all that it
        takes, when it began, and when it was done. NaN for what did not happen.
      asked_s: when the driver asked for this part, by the driver's clock.
      told_s: when the driver heard that it was done, by the driver's clock.
    """

    task: TaskName
    times: np.ndarray[Any, Any]
    asked_s: float
    told_s: float


@final
@dataclass(frozen=True, slots=True)
class RunMetadata:
    """When every node of one traced step ran: ``session.run(…, trace=True)``.

    Attributes:
      name: of the function.
      nodes: by task, then by the time at which they began.
      clock_error_s: by task, by how much its times may be off beside the driver's.

    Example:
      >>> task = TaskName("/job:worker/task:0")
      >>> node = NodeTime(task, 0, "segment", "sin x1", 0.0, 0.001, 0.003)
      >>> print(RunMetadata("step", (node,), {task: 0.0}))
      step: 3.000 ms
      /job:worker/task:0  segment sin x1   waited 1.000 ms, took 2.000 ms
    """

    name: str
    nodes: tuple[NodeTime, ...]
    clock_error_s: Mapping[TaskName, float]

    @property
    def tasks(self) -> list[TaskName]:
        """The tasks with a part in the step."""
        return list(self.clock_error_s)

    @property
    def seconds(self) -> float:
        """From the beginning of the step to the end of its last node."""
        return max((node.end_s for node in self.nodes), default=0.0)

    def of(self, task: str) -> tuple[NodeTime, ...]:
        """Returns the nodes of one task."""
        return tuple(node for node in self.nodes if node.task == task)

    def save_timeline(self, path: str | pathlib.Path) -> None:
        """Writes the step as a file that ui.perfetto.dev and chrome://tracing open.

        Args:
          path: of a JSON file; its directory is made if need be.

        Raises:
          ConfigError: a place that cannot be written.
        """
        write_json(path, timeline(self))

    def show(self, path: str | pathlib.Path | None = None) -> "Picture":
        """Returns a picture of the step in time: a lane for each task.

        Args:
          path: also write it there; ends in ``.html`` or ``.svg``.

        Raises:
          ConfigError: another ending, or a place that cannot be written.

        Example:
          >>> task = TaskName("/job:worker/task:0")
          >>> node = NodeTime(task, 0, "segment", "sin x1", 0.0, 0.001, 0.003)
          >>> RunMetadata("step", (node,), {task: 0.0}).show().title
          'step: 3.000 ms'
        """
        picture = timeline_picture(self)
        if path is not None:
            picture.save(path)
        return picture

    def __str__(self) -> str:
        rows = [
            (n.task, f"{n.kind} {n.label}".rstrip(), _waited(n)) for n in self.nodes
        ]
        width = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        lines = [
            f"{task:<{width[0]}}  {what:<{width[1]}}   {times}"
            for task, what, times in rows
        ]
        return "\n".join([f"{self.name}: {1e3 * self.seconds:.3f} ms", *lines])

    def __repr__(self) -> str:
        return (
            f"<run metadata of {self.name}: {len(self.nodes)} nodes on "
            f"{len(self.tasks)} tasks, {1e3 * self.seconds:.3f} ms; show() it>"
        )

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


def _waited(node: NodeTime) -> str:
    return f"waited {1e3 * node.waited_s:.3f} ms, took {1e3 * node.seconds:.3f} ms"


def run_metadata(program: Program, parts: Sequence[PartTimes]) -> RunMetadata:
    """Returns what all tasks measured of a step, by the driver's clock.

    Args:
      program: what ran.
      parts: of every task with a partition.
    """
    clocks = aligned_clocks(program, parts)
    began = min((part.asked_s for part in parts), default=0.0)
    nodes = []
    for part in parts:
        offset = clocks[part.task][0] + began
        facts = facts_of(program, part.task)
        nodes += list(node_times(part.task, facts, part.times - offset))
    nodes.sort(key=lambda node: (node.task, node.start_s, node.node))
    errors = {part.task: clocks[part.task][1] for part in parts}
    return RunMetadata(program.name, tuple(nodes), errors)


def aligned_clocks(
    program: Program, parts: Sequence[PartTimes]
) -> dict[TaskName, tuple[float, float]]:
    """Returns, by task, its clock minus the driver's, and by how much that may be off.

    Args:
      program: says which messages there were.
      parts: of every task with a partition.
    """
    tasks = [part.task for part in parts]
    return offsets(_bounds(program, parts), tasks, program.driver)


def _bounds(program: Program, parts: Iterable[PartTimes]) -> Bounds[TaskName]:
    bounds: Bounds[TaskName] = {}
    sent: dict[str, tuple[TaskName, float]] = {}
    came: dict[str, tuple[TaskName, float]] = {}
    for part in parts:
        times = part.times
        if part.task != program.driver and not np.isnan(times).all():
            first, last = float(np.nanmin(times)), float(np.nanmax(times))
            tighten(bounds, program.driver, part.task, first - part.asked_s)
            tighten(bounds, part.task, program.driver, part.told_s - last)
        for index, node in enumerate(program.partition(part.task).nodes):
            if isinstance(node, SendNode):
                sent[node.key] = part.task, float(times[index, START])
            elif isinstance(node, RecvNode):
                came[node.key] = part.task, float(times[index, START])
    for key in sent.keys() & came.keys():
        (a, left_s), (b, arrived_s) = sent[key], came[key]
        tighten(bounds, a, b, arrived_s - left_s)
    return bounds


def timeline(metadata: "RunMetadata") -> dict[str, Any]:
    """Returns a trace in Chrome's JSON object format.

    Times are microseconds since the step began, by the driver's clock.

    Args:
      metadata: of the step.
    """
    spans = [span for node in metadata.nodes for span in node_spans(node)]
    return chrome_trace(metadata.name, metadata.clock_error_s, spans)


def timeline_picture(metadata: "RunMetadata") -> "Picture":
    """Returns the same as a picture: a lane for each task, times in milliseconds.

    Args:
      metadata: of the step.
    """
    from jgraph.view.bars import draw_bars

    spans = [span for node in metadata.nodes for span in node_spans(node)]
    title = f"{metadata.name}: {1e3 * metadata.seconds:.3f} ms"
    return draw_bars(title, "ms", lanes(metadata.tasks, spans))
