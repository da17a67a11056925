"""Spans of a timeline: what each task did, sent, and waited for, on tracks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, final

from jgraph.coordination.timeline.node_times import NodeTime
from jgraph.graph.device import TaskName
from jgraph.view.units import bytes_text

if TYPE_CHECKING:  # what draws is loaded by who draws: a server never does
    from jgraph.view.bars import Bar, Lane

TRACKS: Final = (
    *("steps", "compute", "send", "recv wait", "queueing", "turn"),
    *("client", "register", "checkpoint"),
)
"""Kinds, in the order in which a task shows them."""
_TRACK_OF: Final = {"segment": "compute", "send": "send", "recv": "recv wait"}
_KIND_OF: Final = {"compute": "compute", "send": "send", "recv wait": "wait"}


@final
@dataclass(frozen=True, slots=True)
class Span:
    """A time in which one thing was done, or waited for.

    Attributes:
      task: where.
      track: one of ``TRACKS``.
      name: for people.
      start_s: it began.
      end_s: it ended.
      node: that did it, or waited.
      step: of which it is a part; 0 where there is one alone.
      sends: names the message whose arrow begins here.
      receives: names the message whose arrow ends here.
    """

    task: TaskName
    track: str
    name: str
    start_s: float
    end_s: float
    node: NodeTime | None = None
    step: int = 0
    sends: str = ""
    receives: str = ""

    def moved(self, seconds: float) -> "Span":
        """Returns it as it would be so much later."""
        moved = replace(self, start_s=self.start_s + seconds)
        return replace(moved, end_s=self.end_s + seconds)

    def bar(self) -> "Bar":
        """Returns it as shown, in milliseconds."""
        from jgraph.view.bars import Bar

        took = 1e3 * max(0.0, self.end_s - self.start_s)
        nbytes = self.node.nbytes if self.node is not None else 0
        size = f", {bytes_text(nbytes)}" if nbytes else ""
        return Bar(
            start=1e3 * self.start_s,
            end=1e3 * max(self.start_s, self.end_s),
            title=self.name,
            detail=f"{self.name}\n{took:.3f} ms{size}",
            kind=_KIND_OF.get(self.track, self.track),
            sends=self.sends,
            receives=self.receives,
        )


def node_spans(node: NodeTime, step: int = 0, messages: str = "") -> Iterator[Span]:
    """Yields what a node did, and what it waited for before.

    Args:
      node: that ran.
      step: of which it is a part.
      messages: before their keys, to tell those of one step from those of others.
    """
    task, track = node.task, _TRACK_OF.get(node.kind, "compute")
    name = f"{node.kind} {node.label}".rstrip()
    if node.kind == "segment":
        name = node.label or name
    if node.kind == "recv":
        came, key = node.start_s, messages + node.key
        named = f"wait {node.label}"
        yield Span(task, track, named, node.ready_s, came, node, step, receives=key)
        return
    if node.start_s > node.ready_s:
        waits = f"{name} waits"
        yield Span(task, "queueing", waits, node.ready_s, node.start_s, node, step)
    key = messages + node.key if node.kind == "send" else ""
    yield Span(task, track, name, node.start_s, node.end_s, node, step, key)


def rows_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Returns rows of spans, in each of which they follow one another."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        for row in rows:
            if row[-1].end_s <= span.start_s:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def lanes(tasks: Iterable[TaskName], spans: Sequence[Span]) -> "list[Lane]":
    """Returns a lane for each task, with a row for each track, as shown."""
    from jgraph.view.bars import Lane

    task_lanes = []
    for task in tasks:
        mine = [span for span in spans if span.task == task]
        rows = [
            tuple(span.bar() for span in row)
            for track in TRACKS
            for row in rows_of(s for s in mine if s.track == track)
        ]
        task_lanes.append(Lane(str(task), tuple(rows)))
    return task_lanes
