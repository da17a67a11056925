"""Timeline of a traced step: for Perfetto and chrome://tracing, and as a picture.

Source: "Trace Event Format", Google, 2016; ``tensorflow/python/client/timeline.py``
made the same of TensorFlow's ``RunMetadata``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, final

from jgraph.graph.bars import Bar, Lane, draw_bars
from jgraph.graph.ir import TaskName
from jgraph.graph.svg import Picture
from jgraph.graph.units import bytes_text

if TYPE_CHECKING:
    from jgraph.coordination.run_metadata import NodeTime, RunMetadata

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


def timeline_picture(metadata: "RunMetadata") -> Picture:
    """Returns the same as a picture: a lane for each task, times in milliseconds.

    Args:
      metadata: of the step.
    """
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

    def bar(self) -> Bar:
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
        told = {"node": node.node, "kind": node.kind, "bytes": node.nbytes}
        told |= {"peer": node.peer, "message": node.key} if node.peer else {}
        at: Event = {"pid": pid, "tid": tid}
        yield {
            **at,
            "ph": "X",
            "cat": self.track,
            "name": self.name,
            "ts": start,
            "dur": duration,
            "args": told,
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
