"""Buckets: splits segments so that large values travel while the segment computes.

A segment begins when all that it takes is there, and gives its results when all of it
has run. Where many bytes come from other tasks, as large parameters do, or go to them,
as gradients do, the task would rest while the network works, and the network while the
task computes. So such a segment becomes several. The first ones take what is used
first; the last ones end where enough bytes are there to send, in the order in which the
backward pass makes them. ``message_groups`` cuts the messages alike.

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", 2020, section 3.2.3, for gradients; Y. Peng et al., "A Generic Communication
Scheduler for Distributed DNN Training Acceleration", 2019, for parameters.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar, final

from jgraph.graph.cost import flops_of
from jgraph.graph.ir import TaskName
from jgraph.plan.analysis.flow import Flow
from jgraph.plan.partition.overlap import WORTH, Roots

LEAST_BYTES: Final = 4 << 20
"""Bytes that are worth a segment of their own: milliseconds of a fast network."""

LEAST_OF_ONE: Final = 64 << 10
"""Bytes to or from one task that are worth a message: on 10 Gbit/s as long as a frame
takes, 50 us."""

MOST: Final = 16
"""Parts into which a segment's bytes are cut."""

_Value = TypeVar("_Value")


@final
@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes that cross between tasks in one direction, per root, and other ends.

    Attributes:
      nbytes: of values that a root is the first of its task to take from others; or
        that others take from it.
      tasks: those others.
    """

    nbytes: dict[int, int] = field(default_factory=dict)
    tasks: dict[int, set[TaskName]] = field(default_factory=dict)

    def add(self, root: int, nbytes: int, tasks: Iterable[TaskName]) -> None:
        """Notes a value of a root."""
        self.nbytes[root] = self.nbytes.get(root, 0) + nbytes
        self.tasks.setdefault(root, set()).update(tasks)

    def least(self, roots: set[int]) -> int:
        """Returns the bytes of a part of a cluster; 0 if it is to stay one."""
        found = roots & self.nbytes.keys()
        total = sum(self.nbytes[i] for i in found)
        ends = {task for i in found for task in self.tasks[i]}
        least = max(LEAST_BYTES, LEAST_OF_ONE * len(ends))
        return max(least, total // MOST) if total >= 2 * least else 0


def in_buckets(
    flow: Flow,
    clusters: Iterable[Roots],
    arriving: Crossing,
    leaving: Crossing,
    before: Mapping[int, set[int]],
    together: Mapping[int, set[int]],
) -> list[Roots]:
    """Returns the clusters, some of them as several.

    What writes variables waits for all that it takes, as it is to write them at once.

    Args:
      flow: the graph.
      clusters: (task, kind, roots).
      arriving: bytes that come from other tasks.
      leaving: bytes that go to them.
      before: roots that must run before each root.
      together: per root those that stay in one piece with it.
    """
    found: list[Roots] = []
    cutter = _Cutter(flow, before, together)
    for task, kind, roots in clusters:
        pieces = [roots]
        if kind == "segment":
            writes = any(flow.ops[i].writes for i in roots)
            first = [roots] if writes else _cut(cutter, roots, arriving)
            pieces = [piece for part in first for piece in _cut(cutter, part, leaving)]
        found += [(task, kind, piece) for piece in pieces]
    return found


def message_groups(
    values: Sequence[_Value],
    nbytes: Callable[[_Value], int],
    first: Callable[[_Value], int],
) -> list[list[_Value]]:
    """Returns values of one sender and one taker, by the message in which they travel.

    Args:
      values: in the order in which they were made.
      nbytes: of a value.
      first: position of the first cluster that takes a value.

    Returns:
      Groups in the order in which they are taken, each of ``LEAST_OF_ONE`` or more, or
      one group.

    Example:
      >>> message_groups("bac", {"a": 9 << 20, "b": 5 << 20, "c": 1}.get, "abc".find)
      [['a'], ['b', 'c']]
    """
    groups: list[list[_Value]] = [[]]
    for _, taken in itertools.groupby(sorted(values, key=first), key=first):
        if sum(map(nbytes, groups[-1])) >= LEAST_OF_ONE:
            groups.append([])
        groups[-1] += taken
    if len(groups) > 1 and sum(map(nbytes, groups[-1])) < LEAST_OF_ONE:
        last = groups.pop()
        groups[-1] += last
    return groups


@final
@dataclass(slots=True)
class _Cutter:
    flow: Flow
    before: Mapping[int, set[int]]
    together: Mapping[int, set[int]]
    _work: dict[int, float] = field(default_factory=dict)

    def with_needs(self, root: int, piece: set[int], within: set[int]) -> set[int]:
        """Returns a root and all that it needs of some others, less a piece."""
        found: set[int] = set()
        todo = [root] if root in within and root not in piece else []
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                needs = self.before[index] | self.together[index]
                todo += (needs & within) - piece
        return found

    def work(self, roots: Iterable[int]) -> float:
        """Returns the operations of some roots."""
        for root in roots:
            if root not in self._work:
                self._work[root] = flops_of(self.flow.ops[root].equation)
        return sum(self._work[root] for root in roots)


def _cut(cutter: _Cutter, roots: set[int], crossing: Crossing) -> list[set[int]]:
    """Returns pieces of a cluster, with some of the bytes that cross each.

    Each piece needs nothing of those after it, and computes for a while. Only the last
    one writes variables, so that all are written at one version.
    """
    least, nbytes_of = crossing.least(roots), crossing.nbytes
    if not least:
        return [roots]
    remaining, remaining_work = set(roots), cutter.work(roots)
    pieces: list[set[int]] = []
    piece: set[int] = set()
    nbytes, piece_work = 0, 0.0
    for index in sorted(roots & nbytes_of.keys()):
        more = cutter.with_needs(index, piece, remaining)
        if any(cutter.flow.ops[i].writes for i in more):
            break
        added = sum(nbytes_of.get(i, 0) for i in more)
        is_full = nbytes >= (least // 4 if added > least else least)
        if added and is_full and piece_work >= WORTH:
            if remaining_work - piece_work < WORTH:
                break
            pieces.append(piece)
            remaining -= piece
            remaining_work -= piece_work
            piece, nbytes, piece_work = set(), 0, 0.0
        piece |= more
        nbytes += added
        piece_work += cutter.work(more)
    return [*pieces, remaining]
