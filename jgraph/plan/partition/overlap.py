"""Overlap: splits segments so that long work does not wait for other tasks.

As few clusters as possible may be too few. Where a task computes one half of a sum and
another task the other half, adding them up must not keep the first half waiting: what
computes for a while, and needs nothing that another task computes for a while, is a
cluster of its own. And what another task waits for, to compute for a while, does not
wait for the rest of its cluster, if that computes for a while.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.graph.cost import flops_of_all
from jgraph.graph.ir import TaskName
from jgraph.plan.analysis.flow import Flow
from jgraph.plan.partition.merge import Kind, topological

WORTH: Final = 50e6
"""Operations that are worth a segment of their own: half a millisecond or more."""

Roots: TypeAlias = tuple[TaskName, Kind, set[int]]


def overlap(
    flow: Flow,
    clusters: list[Roots],
    before: Mapping[int, set[int]],
    after: Mapping[int, set[int]],
    together: Mapping[int, set[int]],
) -> list[Roots]:
    """Returns the clusters, some of them as two or three.

    Args:
      flow: the graph.
      clusters: (task, kind, roots).
      before: roots that must run before each root.
      after: roots that must run after each root.
      together: per root those that stay in one piece with it.
    """
    if len({task for task, kind, _ in clusters if kind == "segment"}) < 2:
        return clusters
    heavy = {n for n, c in enumerate(clusters) if _operations(flow, c[2]) >= WORTH}
    if len({clusters[n][0] for n in heavy}) < 2:
        return clusters
    order = topological(before)
    waiting = _reached(clusters, heavy, order, after)
    awaited = _reached(clusters, heavy, order[::-1], before)
    cutter = _Cutter(flow, after, together)
    found: list[Roots] = []
    for task, kind, roots in clusters:
        pieces = [roots]
        if kind == "segment":
            pieces = [
                piece
                for part in cutter.cut(roots, waiting, worth=0)
                for piece in cutter.cut(part, part - awaited, worth=1)
            ]
        found += [(task, kind, piece) for piece in pieces]
    return found


def _reached(
    clusters: list[Roots],
    heavy: set[int],
    order: Iterable[int],
    onward: Mapping[int, set[int]],
) -> set[int]:
    """Returns the roots to which a way leads from heavy work of another task."""
    home = {root: n for n, (_, _, roots) in enumerate(clusters) for root in roots}
    sources: dict[int, set[TaskName]] = {}
    found = set()
    for root in order:
        task = clusters[home[root]][0]
        behind = sources.pop(root, set())
        if behind - {task}:
            found.add(root)
        if home[root] in heavy:
            behind = behind | {task}
        for then in onward[root]:
            sources.setdefault(then, set()).update(behind)
    return found


@final
@dataclass(slots=True)
class _Cutter:
    flow: Flow
    after: Mapping[int, set[int]]
    together: Mapping[int, set[int]]

    def cut(self, roots: set[int], later: set[int], *, worth: int) -> list[set[int]]:
        """Returns two parts, the second with ``later`` and what follows from it.

        One part, if the first or the second (``worth``) is not worth a segment.
        """
        todo = list(roots & later)
        second = set(todo)
        while todo:
            index = todo.pop()
            onward = self.after[index] | self.together[index]
            new = (onward & roots) - second
            second |= new
            todo += new
        parts = [roots - second, second]
        too_little = _operations(self.flow, parts[worth]) < WORTH
        return [roots] if too_little or not all(parts) else parts


def _operations(flow: Flow, roots: Iterable[int]) -> float:
    return flops_of_all(flow.ops[i].equation for i in roots)
