"""Graph layout: positions of boxes and lines, a region per lane, rows downwards.

Every box has a place in a grid, so that lines over several rows can run between the
columns and are never behind a box.

Source: layering and barycentre order as in Sugiyama, Tagawa and Toda, "Methods for
Visual Understanding of Hierarchical System Structures" (1981), without dummy nodes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from jgraph.view.views import Box, Edge, View

WIDTH, HEIGHT, GAP_X, GAP_Y = 184, 46, 30, 46
PAD, TOP, HEAD = 24, 46, 62
_PER_ROW = 4


@final
@dataclass(frozen=True, slots=True)
class Region:
    """The rectangle of a lane."""

    lane: str
    x: int
    width: int


@final
@dataclass(frozen=True, slots=True)
class Route:
    """A line: its path as SVG writes it, and where its label goes."""

    path: str
    x: int
    y: int


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything of a view lies; ``places`` are upper left corners by key."""

    width: int
    height: int
    regions: tuple[Region, ...]
    places: Mapping[str, tuple[int, int]]
    routes: tuple[Route, ...]


def layout(view: View) -> Layout:
    """Returns where the boxes and edges of a view lie."""
    rows = _rows(view.boxes, view.edges)
    columns = _columns(view.boxes, view.edges, rows)
    regions, x = [], PAD
    for lane in sorted(view.lanes, key=_natural):
        count = 1 + max(columns[b.key] for b in view.boxes if b.lane == lane)
        width = count * (WIDTH + GAP_X) + GAP_X
        regions.append(Region(lane, x, width))
        x += width + PAD
    start = {region.lane: region.x + GAP_X for region in regions}
    places = {
        box.key: (
            start[box.lane] + columns[box.key] * (WIDTH + GAP_X),
            TOP + HEAD + rows[box.key] * (HEIGHT + GAP_Y),
        )
        for box in view.boxes
    }
    bottom = TOP + HEAD + (max(rows.values(), default=0) + 1) * (HEIGHT + GAP_Y)
    routes = _routes(view.edges, places)
    return Layout(max(x, 360), bottom + PAD, tuple(regions), places, routes)


def _natural(lane: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", lane)
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in parts]


def _rows(boxes: Sequence[Box], edges: Sequence[Edge]) -> dict[str, int]:
    """Each box below all it needs; what needs nothing just above its first user."""
    order = {box.key: n for n, box in enumerate(boxes)}
    before: dict[str, list[str]] = {box.key: [] for box in boxes}
    after: dict[str, list[str]] = {box.key: [] for box in boxes}
    for edge in edges:
        # Two groups may need each other; then the first of the two is above.
        if order[edge.source] < order[edge.target]:
            before[edge.target].append(edge.source)
            after[edge.source].append(edge.target)
    ideal: dict[str, int] = {}
    for box in boxes:
        ideal[box.key] = max((ideal[s] + 1 for s in before[box.key]), default=0)
    for box in boxes:
        if not before[box.key] and after[box.key]:
            ideal[box.key] = max(0, min(ideal[t] for t in after[box.key]) - 1)
    rows: dict[str, int] = {}
    taken: dict[tuple[str, int], int] = {}
    for box in boxes:
        row = max((rows[s] + 1 for s in before[box.key]), default=ideal[box.key])
        while taken.get((box.lane, row), 0) >= _PER_ROW:
            row += 1
        taken[box.lane, row] = taken.get((box.lane, row), 0) + 1
        rows[box.key] = row
    return rows


def _columns(
    boxes: Sequence[Box], edges: Sequence[Edge], rows: Mapping[str, int]
) -> dict[str, int]:
    """The column of each box in its lane, near to that of what it takes values from."""
    lane_of = {box.key: box.lane for box in boxes}
    near: dict[str, list[str]] = {box.key: [] for box in boxes}
    for edge in edges:
        if lane_of[edge.source] == lane_of[edge.target]:
            near[edge.target].append(edge.source)
    crowd: dict[tuple[str, int], list[str]] = {}
    for key in sorted(rows, key=lambda k: rows[k]):
        crowd.setdefault((lane_of[key], rows[key]), []).append(key)
    most = {
        lane: max(len(c) for (l, _), c in crowd.items() if l == lane)
        for lane in lane_of.values()
    }
    columns: dict[str, int] = {}
    for (lane, _), keys in crowd.items():
        free = list(range(most[lane]))
        for key in sorted(keys, key=lambda k: _wish(k, near, columns)):
            wish = _wish(key, near, columns)
            columns[key] = min(free, key=lambda c: abs(c - wish))
            free.remove(columns[key])
    return columns


def _wish(
    key: str, near: Mapping[str, Sequence[str]], columns: Mapping[str, int]
) -> float:
    found = [columns[s] for s in near[key] if s in columns]
    return sum(found) / len(found) if found else 0.0


def _routes(
    edges: Sequence[Edge], places: Mapping[str, tuple[int, int]]
) -> tuple[Route, ...]:
    out_port = _ports(edges, places, at_source=True)
    in_port = _ports(edges, places, at_source=False)
    return tuple(
        _route(places[e.source], places[e.target], out_port[n], in_port[n], n)
        for n, e in enumerate(edges)
    )


def _ports(
    edges: Sequence[Edge], places: Mapping[str, tuple[int, int]], *, at_source: bool
) -> dict[int, int]:
    """Where along its box each edge begins or ends: spread, in the order of x."""
    ends: dict[str, list[int]] = {}
    for n, edge in enumerate(edges):
        ends.setdefault(edge.source if at_source else edge.target, []).append(n)
    ports: dict[int, int] = {}
    for numbers in ends.values():
        other = {n: edges[n].target if at_source else edges[n].source for n in numbers}
        numbers.sort(key=lambda n: places[other[n]])
        step = WIDTH // (len(numbers) + 1)
        ports.update((n, step * (i + 1)) for i, n in enumerate(numbers))
    return ports


def _route(
    source: tuple[int, int], target: tuple[int, int], out: int, into: int, number: int
) -> Route:
    x0, y0 = source[0] + out, source[1] + HEIGHT
    x1, y1 = target[0] + into, target[1]
    half = GAP_Y // 2
    if 0 < y1 - y0 <= GAP_Y:
        path = f"M{x0} {y0}C{x0} {y0 + half} {x1} {y1 - half} {x1} {y1}"
        return Route(path, (x0 + x1) // 2, (y0 + y1) // 2)
    right = x0 > target[0] + WIDTH // 2
    edge = target[0] + WIDTH + GAP_X // 2 if right else target[0] - GAP_X // 2
    x = edge + (number % 5 - 2) * 4
    down, up = y0 + GAP_Y, y1 - GAP_Y
    path = (
        f"M{x0} {y0}C{x0} {y0 + half} {x} {y0 + half} {x} {down}"
        f"V{up}C{x} {y1 - half} {x1} {y1 - half} {x1} {y1}"
    )
    return Route(path, x, (down + up) // 2)
