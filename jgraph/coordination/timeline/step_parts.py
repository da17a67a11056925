"""Parts of steps: what one task did of one step, and what it did beside steps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

from jgraph.coordination.timeline.node_times import NodeTime
from jgraph.coordination.timeline.spans import Span, node_spans
from jgraph.graph.device import TaskName


@final
@dataclass(frozen=True, slots=True)
class StepPart:
    """What one task did of one step, by the clock of who asked for it.

    Attributes:
      task: where.
      handle: of the registered program.
      step: its id; the parts of one step have the same handle and id.
      program: what the user calls it.
      driver: the task that began the step.
      asked_s: the task was asked for its part.
      began_s: it had its turn: earlier steps were over, and its gate let it in. NaN if
        it never had.
      over_s: its part was done, or given up.
      nodes: that ran.
    """

    task: TaskName
    handle: str
    step: int
    program: str
    driver: TaskName
    asked_s: float
    began_s: float
    over_s: float
    nodes: tuple[NodeTime, ...]

    def spans(self) -> Iterator[Span]:
        """Yields the step, its wait for its turn, and what its nodes did."""
        began = self.began_s if self.began_s == self.began_s else self.over_s
        name = f"{self.program} {self.step}"
        task, step = self.task, self.step
        yield Span(task, "steps", name, began, self.over_s, step=step)
        if began > self.asked_s:
            turn = f"{name} waits for its turn"
            yield Span(task, "turn", turn, self.asked_s, began, step=step)
        messages = f"{self.handle}/{step}/"
        for node in self.nodes:
            yield from node_spans(node, step, messages)

    def moved(self, seconds: float) -> "StepPart":
        """Returns it as it would be so much later."""
        nodes = tuple(
            NodeTime(
                *(node.task, node.node, node.kind, node.label),
                node.ready_s + seconds,
                node.start_s + seconds,
                node.end_s + seconds,
                *(node.nbytes, node.peer, node.key),
            )
            for node in self.nodes
        )
        return replace(
            self,
            asked_s=self.asked_s + seconds,
            began_s=self.began_s + seconds,
            over_s=self.over_s + seconds,
            nodes=nodes,
        )


@final
@dataclass(frozen=True, slots=True)
class Note:
    """What a task did beside its steps, or a client before them.

    Attributes:
      task: where.
      kind: ``"register"``, ``"client"``, ``"checkpoint"``.
      label: of what.
      began_s: it began.
      ended_s: it ended.
    """

    task: TaskName
    kind: str
    label: str
    began_s: float
    ended_s: float

    def moved(self, seconds: float) -> "Note":
        """Returns it as it would be so much later."""
        began, ended = self.began_s + seconds, self.ended_s + seconds
        return replace(self, began_s=began, ended_s=ended)


def note_span(note: Note) -> Span:
    """Returns a note as shown."""
    name = f"{note.kind} {note.label}".rstrip()
    return Span(note.task, note.kind, name, note.began_s, note.ended_s)
