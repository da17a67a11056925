"""RunMetadata of a traced step: times of all nodes on all tasks, by one clock.

The clocks of two machines have nothing to do with each other. Every message bounds
their difference: it cannot arrive before it was sent. From all messages of a step in
both directions follows an interval for each task's clock, and its middle breaks none
of these bounds.

Source: Mills, "Internet Time Synchronization: the Network Time Protocol", 1991, for
one pair of messages; here all of them count.
"""

import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np

from jgraph.errors import ConfigError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import (
    FeedNode,
    LookupNode,
    Node,
    ReadNode,
    RecvNode,
    SegmentNode,
    SendNode,
    WriteNode,
    outputs_of,
)
from jgraph.plan.program.program import Partition, Program
from jgraph.view.units import bytes_text

if TYPE_CHECKING:  # what draws is loaded by who draws: a server never does
    from jgraph.view.bars import Bar
    from jgraph.view.svg import Picture

READY: Final = 0
START: Final = 1
END: Final = 2
"""Columns of ``PartTimes.times``."""

_Bounds: TypeAlias = dict[tuple[TaskName, TaskName], float]


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
class NodeTime:
    """When one node of a step ran, in seconds since the step began.

    Attributes:
      task: where.
      node: its index in the partition of that task.
      kind: ``"segment"``, ``"send"``, ``"recv"``, ``"read"``, ``"write"``, …
      label: what a segment computes, names of variables or of a feed, for people.
      ready_s: all that it takes was there. A ``recv`` waits from here for its values,
        everything else for its turn.
      start_s: it began; of a ``recv``, its values were there.
      end_s: it was done.
      nbytes: of the values that it makes or sends.
      peer: the other task of a ``send`` or ``recv``.
      key: names the message: a ``send`` and a ``recv`` of one key belong together.
    """

    task: TaskName
    node: int
    kind: str
    label: str
    ready_s: float
    start_s: float
    end_s: float
    nbytes: int = 0
    peer: TaskName | None = None
    key: str = ""

    @property
    def waited_s(self) -> float:
        """Seconds between having all that it takes and beginning."""
        return self.start_s - self.ready_s

    @property
    def seconds(self) -> float:
        """Seconds at work."""
        return self.end_s - self.start_s


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
        file = pathlib.Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(timeline(self)), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the timeline to {file} ({error.strerror}); choose "
                "another path"
            ) from error

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
    labels = {code.digest: code.label for code in program.segments}
    clocks = aligned_clocks(program, parts)
    began = min((part.asked_s for part in parts), default=0.0)
    nodes = []
    for part in parts:
        offset = clocks[part.task][0] + began
        partition = program.partition(part.task)
        nodes += list(_nodes(partition, part.times - offset, labels))
    nodes.sort(key=lambda node: (node.task, node.start_s, node.node))
    errors = {part.task: clocks[part.task][1] for part in parts}
    return RunMetadata(program.name, tuple(nodes), errors)


def _nodes(
    partition: Partition, times: np.ndarray[Any, Any], labels: Mapping[str, str]
) -> Iterator[NodeTime]:
    for index, node in enumerate(partition.nodes):
        ready, start, end = map(float, times[index])
        if np.isnan(end):
            continue
        peer, key = _message(node)
        values = node.values if isinstance(node, SendNode) else outputs_of(node)
        yield NodeTime(
            task=partition.task,
            node=index,
            kind=type(node).__name__.removesuffix("Node").lower(),
            label=_label(partition, node, labels),
            ready_s=ready,
            start_s=start,
            end_s=end,
            nbytes=sum(partition.values[value].nbytes for value in values),
            peer=peer,
            key=key,
        )


def _message(node: Node) -> tuple[TaskName | None, str]:
    match node:
        case SendNode():
            return node.dst, node.key
        case RecvNode():
            return node.src, node.key
        case _:
            return None, ""


def _label(partition: Partition, node: Node, labels: Mapping[str, str]) -> str:
    match node:
        case SegmentNode():
            return labels.get(node.digest, "")
        case FeedNode():
            return node.name
        case SendNode():
            return f"to {node.dst}"
        case RecvNode():
            return f"from {node.src}"
        case ReadNode() | WriteNode():
            return ", ".join(partition.variables[v].name for v in node.variables)
        case LookupNode():
            return ", ".join(partition.variables[r.variable].name for r in node.rows)
        case _:
            return ""


def aligned_clocks(
    program: Program, parts: Sequence[PartTimes]
) -> dict[TaskName, tuple[float, float]]:
    """Returns, by task, its clock minus the driver's, and by how much that may be off.

    Args:
      program: says which messages there were.
      parts: of every task with a partition.
    """
    tasks = [part.task for part in parts]
    bounds = _bounds(program, parts)
    # The tightest bound between two clocks may lead over a third one.
    for via in tasks:
        for a in tasks:
            for b in tasks:
                around = _bound(bounds, a, via) + _bound(bounds, via, b)
                bounds[a, b] = min(_bound(bounds, a, b), around)
    driver, clocks = program.driver, {}
    for task in tasks:
        most, least = _bound(bounds, driver, task), -_bound(bounds, task, driver)
        known = np.isfinite(most) and np.isfinite(least)
        clocks[task] = ((most + least) / 2, (most - least) / 2) if known else (0.0, 0.0)
    return clocks


def _bounds(program: Program, parts: Iterable[PartTimes]) -> _Bounds:
    """Returns how far at most the clock of one task is ahead of that of another."""
    bounds: _Bounds = {}

    def at_most(a: TaskName, b: TaskName, ahead_s: float) -> None:
        if not np.isnan(ahead_s):
            bounds[a, b] = min(_bound(bounds, a, b), ahead_s)

    sent: dict[str, tuple[TaskName, float]] = {}
    came: dict[str, tuple[TaskName, float]] = {}
    for part in parts:
        times = part.times
        if part.task != program.driver and not np.isnan(times).all():
            first, last = float(np.nanmin(times)), float(np.nanmax(times))
            at_most(program.driver, part.task, first - part.asked_s)
            at_most(part.task, program.driver, part.told_s - last)
        for index, node in enumerate(program.partition(part.task).nodes):
            if isinstance(node, SendNode):
                sent[node.key] = part.task, float(times[index, START])
            elif isinstance(node, RecvNode):
                came[node.key] = part.task, float(times[index, START])
    for key in sent.keys() & came.keys():
        (a, left_s), (b, arrived_s) = sent[key], came[key]
        at_most(a, b, arrived_s - left_s)
    return bounds


def _bound(bounds: _Bounds, a: TaskName, b: TaskName) -> float:
    return 0.0 if a == b else bounds.get((a, b), float("inf"))


Event: TypeAlias = dict[str, Any]
_TRACKS = ("compute", "send", "recv wait", "queueing")
_TRACK_OF = {"segment": "compute", "send": "send", "recv": "recv wait"}
_TRACKS_EACH = 1000
_KIND_OF = {"compute": "compute", "send": "send", "recv wait": "wait"}


def timeline(metadata: "RunMetadata") -> dict[str, Any]:
    """Returns a trace in Chrome's JSON object format.

    A task is a process. Its tracks are what it computed (segments, reads, writes),
    what it sent, what it waited for, and what had all that it takes and waited for its
    turn; where two things of one kind overlap, there are more tracks of the kind. An
    arrow goes from each send to the end of the wait for it. Times are microseconds
    since the step began, by the driver's clock.

    Args:
      metadata: of the step.
    """
    events: list[Event] = []
    processes = {task: n + 1 for n, task in enumerate(metadata.tasks)}
    spans = [span for node in metadata.nodes for span in _spans(node)]
    for task, pid in processes.items():
        error = metadata.clock_error_s.get(task, 0.0)
        named = f"{task} (clock ± {1e6 * error:.0f} us)" if error else str(task)
        events.append(_name("process_name", pid, 0, named))
        mine = [span for span in spans if span.node.task == task]
        for number, track in enumerate(_TRACKS):
            first = 1 + number * _TRACKS_EACH
            rows = _without_overlap(span for span in mine if span.track == track)
            for n, row in enumerate(rows):
                title = track if n == 0 else f"{track} {n + 1}"
                events.append(_name("thread_name", pid, first + n, title))
                events += [event for s in row for event in s.events(pid, first + n)]
    both = {e["id"] for e in events if e["ph"] == "s"} & {
        e["id"] for e in events if e["ph"] == "f"
    }
    return {
        "traceEvents": [e for e in events if e["ph"] not in "sf" or e["id"] in both],
        "displayTimeUnit": "ms",
        "otherData": {"step": metadata.name},
    }


def timeline_picture(metadata: "RunMetadata") -> "Picture":
    """Returns the same as a picture: a lane for each task, times in milliseconds.

    Args:
      metadata: of the step.
    """
    from jgraph.view.bars import Lane, draw_bars

    spans = [span for node in metadata.nodes for span in _spans(node)]
    lanes = []
    for task in metadata.tasks:
        mine = [span for span in spans if span.node.task == task]
        rows = [
            tuple(span.bar() for span in row)
            for track in _TRACKS
            for row in _without_overlap(s for s in mine if s.track == track)
        ]
        lanes.append(Lane(str(task), tuple(rows)))
    title = f"{metadata.name}: {1e3 * metadata.seconds:.3f} ms"
    return draw_bars(title, "ms", lanes)


@final
@dataclass(frozen=True, slots=True)
class _Span:
    """A time in which a node did, or waited for, one thing."""

    node: "NodeTime"
    track: str
    name: str
    start_s: float
    end_s: float
    arrow: str = field(default="")
    """``s`` or ``f`` where an arrow begins or ends in it."""

    def bar(self) -> "Bar":
        from jgraph.view.bars import Bar

        node, took = self.node, 1e3 * max(0.0, self.end_s - self.start_s)
        size = f", {bytes_text(node.nbytes)}" if node.nbytes else ""
        return Bar(
            start=1e3 * self.start_s,
            end=1e3 * max(self.start_s, self.end_s),
            title=self.name,
            detail=f"{self.name}\n{took:.3f} ms{size}",
            kind=_KIND_OF.get(self.track, self.track),
            sends=node.key if self.arrow == "s" else "",
            receives=node.key if self.arrow == "f" else "",
        )

    def events(self, pid: int, tid: int) -> Iterator[Event]:
        node, start = self.node, round(1e6 * self.start_s, 3)
        duration = round(1e6 * max(0.0, self.end_s - self.start_s), 3)
        facts = {"node": node.node, "kind": node.kind, "bytes": node.nbytes}
        facts |= {"peer": node.peer, "message": node.key} if node.peer else {}
        at: Event = {"pid": pid, "tid": tid}
        yield {
            **at,
            "ph": "X",
            "cat": self.track,
            "name": self.name,
            "ts": start,
            "dur": duration,
            "args": facts,
        }
        if self.arrow:
            end = start + duration if self.arrow == "f" else start
            arrow = {"ph": self.arrow, "cat": "message", "name": "message", "ts": end}
            yield {**at, **arrow, "id": node.key, "bp": "e"}


def _spans(node: "NodeTime") -> Iterator[_Span]:
    track = _TRACK_OF.get(node.kind, "compute")
    name = f"{node.kind} {node.label}".rstrip()
    if node.kind == "segment":
        name = node.label or name
    if node.kind == "recv":
        yield _Span(node, track, f"wait {node.label}", node.ready_s, node.start_s, "f")
        return
    if node.start_s > node.ready_s:
        yield _Span(node, "queueing", f"{name} waits", node.ready_s, node.start_s)
    arrow = "s" if node.kind == "send" else ""
    yield _Span(node, track, name, node.start_s, node.end_s, arrow)


def _without_overlap(spans: Iterable[_Span]) -> list[list[_Span]]:
    """Returns rows of spans, in each of which they follow one another."""
    rows: list[list[_Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        for row in rows:
            if row[-1].end_s <= span.start_s:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def _name(kind: str, pid: int, tid: int, name: str | TaskName) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
