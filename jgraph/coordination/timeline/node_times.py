"""Node times: what the nodes of a partition are, and when each of them ran."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from jgraph.graph.device import TaskName
from jgraph.plan.program.nodes import (
    ConstNode,
    ContributeNode,
    FeedNode,
    FetchNode,
    LookupNode,
    Node,
    ReadNode,
    RecvNode,
    SegmentNode,
    SendNode,
    UnpackNode,
    WriteNode,
    after_of,
    inputs_of,
    outputs_of,
)

if TYPE_CHECKING:  # who looks at a cluster loads no JAX
    from jgraph.plan.program.program import Partition, Program

READY: Final = 0
START: Final = 1
END: Final = 2
"""Columns of times: a node had all that it takes, it began, and it was done."""


@final
@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node is, whichever step it runs in.

    Attributes:
      kind: ``"segment"``, ``"send"``, ``"recv"``, ``"read"``, ``"write"``, …
      label: what a segment computes, names of variables or of a feed, for people.
      nbytes: of the values that it makes or sends.
      peer: the other task of a ``send`` or ``recv``.
      key: names the message: a ``send`` and a ``recv`` of one key belong together.
    """

    kind: str
    label: str = ""
    nbytes: int = 0
    peer: TaskName | None = None
    key: str = ""


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


def facts_of(program: "Program", task: TaskName) -> tuple[NodeFacts, ...]:
    """Returns what the nodes of a task's partition are, in order."""
    labels = {code.digest: code.label for code in program.segments}
    partition = program.partition(task)
    return tuple(_facts(partition, node, labels) for node in partition.nodes)


@final
@dataclass(frozen=True, slots=True)
class NodeOrder:
    """What the times of some nodes of a partition say of the others.

    Attributes:
      producers: of each node, those that it waits for; all come before it.
      instants: nodes that run as soon as they can and take no time.
    """

    producers: tuple[tuple[int, ...], ...]
    instants: frozenset[int]


def order_of(partition: "Partition") -> NodeOrder:
    """Returns the order of a partition's nodes."""
    makers = {
        value: index
        for index, node in enumerate(partition.nodes)
        for value in outputs_of(node)
    }
    return NodeOrder(
        tuple(
            tuple({*(makers[value] for value in inputs_of(node)), *after_of(node)})
            for node in partition.nodes
        ),
        frozenset(
            index
            for index, node in enumerate(partition.nodes)
            if isinstance(
                node, FeedNode | ConstNode | FetchNode | ContributeNode | UnpackNode
            )
        ),
    )


def complete_times(times: np.ndarray[Any, Any], order: NodeOrder) -> None:
    """Fills in what a step that runs does not note: it follows from the rest.

    A node was ready when the last node that it waits for was done. One that takes no
    time was done then, and one of which nobody noted when it began took none.

    Args:
      times: float64[..., nodes + 1, 3], in seconds; its last row says when the step was
        asked for, begun, and over. NaN for what did not happen. Changed in place.
      order: of the nodes.
    """
    starts, ends = times[..., :-1, START], times[..., :-1, END]
    for node, waits in enumerate(order.producers):
        ready = ends[..., list(waits)].max(-1) if waits else times[..., -1, START]
        times[..., node, READY] = ready
        if node in order.instants:
            ends[..., node] = ready
    np.copyto(starts, ends, where=np.isnan(starts))


def node_times(
    task: TaskName, facts: Sequence[NodeFacts], times: np.ndarray[Any, Any]
) -> Iterator[NodeTime]:
    """Yields the nodes that ran.

    Args:
      task: where.
      facts: of all its nodes.
      times: float64[nodes, 3], in seconds; NaN for what did not happen.
    """
    rows: list[tuple[float, float, float]] = times.tolist()
    for index, (fact, (ready, start, end)) in enumerate(zip(facts, rows, strict=True)):
        if end == end:  # else it did not run
            yield NodeTime(
                task,
                index,
                fact.kind,
                fact.label,
                ready,
                start,
                end,
                fact.nbytes,
                fact.peer,
                fact.key,
            )


def _facts(partition: "Partition", node: Node, labels: Mapping[str, str]) -> NodeFacts:
    peer, key = _message(node)
    values = node.values if isinstance(node, SendNode) else outputs_of(node)
    return NodeFacts(
        kind=type(node).__name__.removesuffix("Node").lower(),
        label=_label(partition, node, labels),
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


def _label(partition: "Partition", node: Node, labels: Mapping[str, str]) -> str:
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
