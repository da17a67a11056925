"""Merging of groups of operations, as far as no cycle arises between them."""

import heapq
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from jgraph.errors import InternalError
from jgraph.graph.ir import TaskName

Kind: TypeAlias = Literal[
    "read", "lookup", "route", "merge", "split", "check", "join", "segment", "alone"
]


def topological(before: Mapping[int, Iterable[int]]) -> list[int]:
    """Returns the keys so that each comes after those it must, lowest first.

    Example:
      >>> topological({0: [2], 1: [], 2: []})
      [1, 2, 0]
    """
    waiting = {n: len(set(b)) for n, b in before.items()}
    after: dict[int, list[int]] = {n: [] for n in before}
    for n, found in before.items():
        for b in set(found):
            after[b].append(n)
    ready = [n for n, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        n = heapq.heappop(ready)
        order.append(n)
        for s in after[n]:
            waiting[s] -= 1
            if waiting[s] == 0:
                heapq.heappush(ready, s)
    if len(order) != len(waiting):
        raise InternalError.of("operations that wait for each other")
    return order


def circles(after: Mapping[int, Iterable[int]]) -> list[set[int]]:
    """Returns the keys that lead to each other, as sets; most are alone.

    Source: R. Tarjan, "Depth-first search and linear graph algorithms", 1972.

    Example:
      >>> circles({0: [1], 1: [2], 2: [1]})
      [{1, 2}, {0}]
    """
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    open_: dict[int, None] = {}
    found = []
    for start in after:
        path = [] if start in number else [(start, iter(after[start]))]
        while path:
            n, rest = path[-1]
            if n not in number:
                number[n] = lowest[n] = len(number)
                open_[n] = None
            for s in rest:
                if s not in number:
                    path.append((s, iter(after[s])))
                    break
                if s in open_:
                    lowest[n] = min(lowest[n], lowest[s])
            else:
                path.pop()
                if path:
                    before = path[-1][0]
                    lowest[before] = min(lowest[before], lowest[n])
                if lowest[n] == number[n]:
                    circle = set()
                    while n not in circle:
                        circle.add(open_.popitem()[0])
                    found.append(circle)
    return found


def merge(
    keys: list[tuple[TaskName, Kind, int]],
    members: list[set[int]],
    successors: list[set[int]],
) -> list[tuple[TaskName, Kind, set[int]]]:
    """Merges clusters of one task and kind, nearest levels first; none that is alone.

    Two may merge when no path between them goes through a third: the clusters then
    still have an order in which they can run.
    """
    alive = dict.fromkeys(range(len(keys)))
    after = _after(successors)
    changed = True
    while changed:
        changed = False
        for first, then in _candidates(keys, alive):
            if (
                first in alive
                and then in alive
                and _can_merge(first, then, successors, after)
            ):
                _absorb(first, then, members, successors, after)
                del alive[then]
                changed = True
    return [(keys[n][0], keys[n][1], members[n]) for n in alive]


def _after(successors: list[set[int]]) -> list[int]:
    """Returns the clusters that a path leads to from each, as the bits of a number."""
    before: dict[int, list[int]] = {n: [] for n in range(len(successors))}
    for n, found in enumerate(successors):
        for then in found:
            before[then].append(n)
    after = [0] * len(successors)
    for n in reversed(topological(before)):
        for then in successors[n]:
            after[n] |= after[then] | 1 << then
    return after


def _candidates(
    keys: list[tuple[TaskName, Kind, int]], alive: Iterable[int]
) -> list[tuple[int, int]]:
    groups: dict[tuple[TaskName, Kind], list[int]] = {}
    for n in alive:
        if keys[n][1] != "alone":
            groups.setdefault(keys[n][:2], []).append(n)
    pairs = [
        (g[a], g[b])
        for g in groups.values()
        for a in range(len(g))
        for b in range(a + 1, len(g))
    ]
    return sorted(pairs, key=lambda p: (keys[p[0]][2] - keys[p[1]][2], p))


def _can_merge(
    first: int, then: int, successors: list[set[int]], after: list[int]
) -> bool:
    return not (
        _path_through_third(first, then, successors, after)
        or _path_through_third(then, first, successors, after)
    )


def _path_through_third(
    start: int, end: int, successors: list[set[int]], after: list[int]
) -> bool:
    if not after[start] >> end & 1:
        return False
    return any(after[s] >> end & 1 for s in successors[start] if s != end)


def _absorb(
    first: int,
    then: int,
    members: list[set[int]],
    successors: list[set[int]],
    after: list[int],
) -> None:
    members[first] |= members[then]
    successors[first] |= successors[then]
    successors[first] -= {first, then}
    for n, found in enumerate(successors):
        if then in found and n != first:
            found.discard(then)
            found.add(first)
    successors[then] = set()
    both = 1 << first | 1 << then
    after[first] = (after[first] | after[then]) & ~both
    after[then] = 0
    for n, found_after in enumerate(after):
        if found_after & both:
            after[n] = (found_after | after[first] | 1 << first) & ~(1 << then)
