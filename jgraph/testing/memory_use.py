"""Peak memory of a step on each task, by simulating its program."""

from collections import Counter
from dataclasses import dataclass, field
from typing import final

from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import (
    Node,
    RecvNode,
    SegmentNode,
    SendNode,
    inputs_of,
    outputs_of,
)
from jgraph.plan.program.program import Partition, Program


def held_nbytes(program: Program) -> dict[TaskName, int]:
    """Returns the most bytes of values that each task holds at one time of a step.

    The program runs as tasks do: a node when it has what it takes, values until their
    last use. Every task runs a segment at a time, and all take equally long. Variables
    are not counted, nor what XLA needs inside a segment.
    """
    parts = [_Part(partition) for partition in program.partitions]
    sent: set[str] = set()
    while sum(part.advance(sent) for part in parts):
        # A segment's results are there for others when all have run one.
        for part in parts:
            part.finish(sent)
    return {part.partition.task: part.peak for part in parts}


@final
@dataclass(slots=True)
class _Part:
    """A partition under way."""

    partition: Partition
    peak: int = 0
    nbytes: int = 0
    running: int | None = None
    remaining: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    uses: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.remaining = list(range(len(self.partition.nodes)))
        self.uses = Counter(
            v for node in self.partition.nodes for v in set(inputs_of(node))
        )

    def advance(self, sent: set[str]) -> bool:
        """Runs what takes no time, and begins a segment; returns whether any ran."""
        ran = False
        while (index := self._ready(sent)) is not None:
            ran = True
            self.remaining.remove(index)
            node = self.partition.nodes[index]
            if isinstance(node, SegmentNode):
                self.running = index
                self._make(node)
                break
            self._make(node)
            self._end(index, sent)
        return ran

    def finish(self, sent: set[str]) -> None:
        """Ends the segment under way, and sends what waited for it."""
        if self.running is not None:
            self._end(self.running, sent)
            self.running = None

    def _ready(self, sent: set[str]) -> int | None:
        for index in self.remaining:
            node = self.partition.nodes[index]
            here = self.known.issuperset(inputs_of(node))
            came = not isinstance(node, RecvNode) or node.key in sent
            if here and came and self.done.issuperset(getattr(node, "after", ())):
                return index
        return None

    def _make(self, node: Node) -> None:
        sizes = [self.partition.values[v].nbytes for v in outputs_of(node)]
        used = [bool(self.uses[v]) for v in outputs_of(node)]
        self.nbytes += sum(s for s, u in zip(sizes, used, strict=True) if u)
        reused = 0
        if isinstance(node, SegmentNode):
            donated = [node.inputs[place] for place in node.donate]
            reused = sum(self.partition.values[v].nbytes for v in donated)
        self.peak = max(self.peak, self.nbytes - reused)

    def _end(self, index: int, sent: set[str]) -> None:
        node = self.partition.nodes[index]
        self.done.add(index)
        self.known.update(outputs_of(node))
        if isinstance(node, SendNode):
            sent.add(node.key)
        for value in set(inputs_of(node)):
            self.uses[value] -= 1
            if not self.uses[value]:
                self.nbytes -= self.partition.values[value].nbytes
