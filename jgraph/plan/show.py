"""``Plan.show``: a picture of a program, its nodes in the region of their task.

Time goes downwards. Lines between regions are messages, with their bytes.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from jgraph.graph.ir import TaskName
from jgraph.graph.svg import Picture, shortened
from jgraph.plan.assemble import SegmentInfo
from jgraph.plan.nodes import (
    AggregateNode,
    ConstNode,
    ContributeNode,
    FeedNode,
    FetchNode,
    LookupNode,
    MergeNode,
    Node,
    ReadNode,
    RecvNode,
    RouteNode,
    SegmentNode,
    SendNode,
    SplitNode,
    WriteNode,
    inputs_of,
    outputs_of,
)
from jgraph.plan.program import Partition, Program
from jgraph.plan.table import bytes_text, count_text, names_text

MAX_BOXES = 40
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _HEAD = 190, 40, 14, 34, 30
_LETTERS = 30
_COLOURS = ("#dbeafe", "#dcfce7", "#fef3c7", "#fce7f3", "#ede9fe", "#cffafe", "#f3f4f6")
_FILLS = {
    "variables": "#fde68a",
    "read": "#fff7d6",
    "write": "#fff7d6",
    "feeds": "#bfdbfe",
    "fetches": "#bbf7d0",
}


@final
@dataclass(slots=True)
class _Box:
    task: TaskName
    kind: str
    title: str
    line: str
    detail: str = ""
    row: int = 0
    x: int = 0
    y: int = 0


@final
@dataclass(slots=True)
class _Scene:
    boxes: list[_Box] = field(default_factory=list)
    edges: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes by (from, to); 0 between variables and their users."""

    def add(self, box: _Box) -> int:
        self.boxes.append(box)
        return len(self.boxes) - 1

    def connect(self, source: int, target: int, nbytes: int) -> None:
        if source != target:
            key = source, target
            self.edges[key] = self.edges.get(key, 0) + nbytes


def plan_picture(program: Program, segments: Sequence[SegmentInfo]) -> Picture:
    """Returns a drawing of a program.

    With more than 40 nodes, the segments of a task are drawn as one box.

    Args:
      program: what to draw.
      segments: about its segments, in the order of each partition.
    """
    scene = _scene(program, segments, together=False)
    if len(scene.boxes) > MAX_BOXES:
        scene = _scene(program, segments, together=True)
    _arrange(scene)
    return Picture(f"plan {program.name}", _svg(program.name, scene))


def _scene(
    program: Program, segments: Sequence[SegmentInfo], *, together: bool
) -> _Scene:
    scene = _Scene()
    makers: dict[tuple[TaskName, int], int] = {}
    box_of: dict[tuple[TaskName, int], int] = {}
    for partition in program.partitions:
        infos = [s for s in segments if s.task == partition.task]
        found = _boxes(scene, partition, infos, together)
        box_of.update({(partition.task, n): box for n, box in found.items()})
        for position, node in enumerate(partition.nodes):
            for value in _made(node):
                if position in found:
                    makers[partition.task, value] = found[position]
    received = _received(program, makers)
    for partition in program.partitions:
        for position, node in enumerate(partition.nodes):
            here = (partition.task, position)
            for value in _taken(node) if here in box_of else ():
                name = (partition.task, value)
                if name not in makers and name in received:
                    # It crosses once: later users take it from the first.
                    source = received[name]
                    makers[name] = box_of[here]
                elif name in makers:
                    source = makers[name]
                else:
                    continue
                nbytes = partition.values[value].nbytes
                scene.connect(source, box_of[here], nbytes)
    return scene


def _boxes(
    scene: _Scene, partition: Partition, infos: list[SegmentInfo], together: bool
) -> dict[int, int]:
    """Adds the boxes of a partition; returns the box of each node that has one."""
    task, found = partition.task, {}
    store = _variables_box(scene, partition)
    feeds = [n for n in partition.nodes if isinstance(n, FeedNode)]
    feed_box = scene.add(_feeds_box(task, feeds)) if feeds else -1
    remaining = iter(infos)
    group = scene.add(_group_box(task, infos)) if together and infos else -1
    for position, node in enumerate(partition.nodes):
        match node:
            case FeedNode():
                found[position] = feed_box
            case SegmentNode() if together:
                found[position] = group
            case SegmentNode():
                found[position] = scene.add(_segment_box(task, next(remaining)))
            case ReadNode() | WriteNode() | ContributeNode() | AggregateNode():
                found[position] = scene.add(_access_box(partition, node))
            case LookupNode():
                found[position] = scene.add(_lookup_box(partition, node))
            case RouteNode() | MergeNode() | SplitNode():
                found[position] = scene.add(_move_box(partition, node))
            case FetchNode() if node.values:
                count = count_text(len(node.values), "value")
                found[position] = scene.add(_Box(task, "fetches", "fetches", count))
            case _:
                continue
        if _touches(node):
            scene.connect(store, found[position], 0)
    return found


def _variables_box(scene: _Scene, partition: Partition) -> int:
    if not partition.variables:
        return -1
    lines = [
        f"{v.name}: {v.type}, {bytes_text(v.type.nbytes)}" for v in partition.variables
    ]
    total = bytes_text(sum(v.type.nbytes for v in partition.variables))
    title = f"{len(lines)} variables" if len(lines) > 1 else partition.variables[0].name
    return scene.add(_Box(partition.task, "variables", title, total, "\n".join(lines)))


def _feeds_box(task: TaskName, feeds: list[FeedNode]) -> _Box:
    names = [f.name for f in feeds]
    return _Box(task, "feeds", "feeds", names_text(names), "\n".join(names))


def _segment_box(task: TaskName, info: SegmentInfo) -> _Box:
    line = count_text(info.equations, "equation")
    if info.updates:
        line += f", updates {len(info.updates)}"
    detail = "\n".join([info.label, *(f"updates {n}" for n in info.updates)])
    return _Box(task, "segment", info.label, line, detail)


def _group_box(task: TaskName, infos: list[SegmentInfo]) -> _Box:
    equations = sum(i.equations for i in infos)
    detail = "\n".join(f"{i.equations} equations: {i.label}" for i in infos)
    title = count_text(len(infos), "segment")
    return _Box(task, "segment", title, count_text(equations, "equation"), detail)


def _access_box(
    partition: Partition, node: ReadNode | WriteNode | ContributeNode | AggregateNode
) -> _Box:
    kind = _ACCESS[type(node)]
    variables = node.variables
    if isinstance(node, AggregateNode):
        variables = node.all_variables
    stored = [partition.variables[v] for v in variables]
    names = [v.name for v in stored]
    title = f"{kind} {names[0]}" if len(names) == 1 else f"{kind} {len(names)}"
    nbytes = bytes_text(sum(v.type.nbytes for v in stored))
    return _Box(partition.task, kind, title, nbytes, "\n".join(names))


_ACCESS: dict[type, str] = {
    ReadNode: "read",
    WriteNode: "write",
    ContributeNode: "contribute",
    AggregateNode: "average",
}


def _lookup_box(partition: Partition, node: LookupNode) -> _Box:
    names = [partition.variables[r.variable].name for r in node.rows]
    title = f"rows of {names[0]}" if len(names) == 1 else f"rows of {len(names)}"
    nbytes = bytes_text(sum(partition.values[v].nbytes for v in node.outs))
    return _Box(partition.task, "read", title, f"up to {nbytes}", "\n".join(names))


def _move_box(partition: Partition, node: RouteNode | MergeNode | SplitNode) -> _Box:
    word = {RouteNode: "route ids", MergeNode: "merge rows", SplitNode: "split rows"}
    feature = node.feature if isinstance(node, RouteNode) else ""
    line = f"of {count_text(len(node.local), 'shard')}"
    return _Box(partition.task, "rows", word[type(node)], line, feature)


def _touches(node: Node) -> bool:
    if isinstance(node, SegmentNode):
        return bool(node.updates or node.reads or node.row_updates or node.row_reads)
    return type(node) in _ACCESS or isinstance(node, LookupNode)


def _made(node: Node) -> tuple[int, ...]:
    ends = isinstance(node, (ConstNode, RecvNode))
    return () if ends else outputs_of(node)


def _taken(node: Node) -> tuple[int, ...]:
    return () if isinstance(node, SendNode) else inputs_of(node)


def _received(
    program: Program, makers: Mapping[tuple[TaskName, int], int]
) -> dict[tuple[TaskName, int], int]:
    """Returns the box that made each received value."""
    sent = {
        (p.task, node.dst, node.key): node.values
        for p in program.partitions
        for node in p.nodes
        if isinstance(node, SendNode)
    }
    return {
        (p.task, value): makers[node.src, origin]
        for p in program.partitions
        for node in p.nodes
        if isinstance(node, RecvNode)
        for value, origin in zip(
            node.outs, sent[node.src, p.task, node.key], strict=True
        )
        if (node.src, origin) in makers
    }


def _arrange(scene: _Scene) -> None:
    """Gives each box a row below all it needs, and a place in its task's region."""
    for _ in scene.boxes:
        moved = False
        for source, target in scene.edges:
            a, b = scene.boxes[source], scene.boxes[target]
            # Two groups may need each other; a row beyond the last is such a loop.
            if a.row >= b.row and a.row + 1 < len(scene.boxes):
                b.row, moved = a.row + 1, True
        if not moved:
            break
    left = 0
    for task in sorted({b.task for b in scene.boxes}):
        used: dict[int, int] = {}
        for box in scene.boxes:
            if box.task == task:
                column = used.get(box.row, 0)
                used[box.row] = column + 1
                box.x = left + _GAP_X + column * (_WIDTH + _GAP_X)
                box.y = _HEAD + box.row * (_HEIGHT + _GAP_Y) + 8
        left += max(used.values()) * (_WIDTH + _GAP_X) + 2 * _GAP_X


def _svg(name: str, scene: _Scene) -> str:
    right = max((b.x for b in scene.boxes), default=0) + _WIDTH + 2 * _GAP_X
    bottom = max((b.y for b in scene.boxes), default=0) + _HEIGHT + _GAP_X
    parts = [
        *_regions(scene.boxes, right, bottom),
        *(_line(scene, s, t, n) for (s, t), n in scene.edges.items()),
        *(_drawn(box) for box in scene.boxes),
        *(_bytes_label(scene, s, t, n) for (s, t), n in scene.edges.items() if n),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{bottom}" '
        f'font-family="system-ui,sans-serif" font-size="11" role="img">'
        f"<title>plan {html.escape(name)}</title>{''.join(parts)}</svg>"
    )


def _regions(boxes: Iterable[_Box], right: int, bottom: int) -> list[str]:
    lefts: dict[TaskName, int] = {}
    for box in boxes:
        lefts[box.task] = min(lefts.get(box.task, right), box.x - _GAP_X)
    tasks = sorted(lefts)
    ends = [lefts[t] for t in tasks[1:]] + [right]
    return [
        f'<rect x="{lefts[task]}" y="0" width="{end - lefts[task] - 4}" '
        f'height="{bottom}" rx="8" fill="{_COLOURS[i % len(_COLOURS)]}"/>'
        f'<text x="{lefts[task] + _GAP_X}" y="19" font-weight="600">{task}</text>'
        for i, (task, end) in enumerate(zip(tasks, ends, strict=True))
    ]


def _curve(scene: _Scene, source: int, target: int) -> tuple[int, int, int, int]:
    a, b = scene.boxes[source], scene.boxes[target]
    return a.x + _WIDTH // 2, a.y + _HEIGHT, b.x + _WIDTH // 2, b.y


def _line(scene: _Scene, source: int, target: int, nbytes: int) -> str:
    x0, y0, x1, y1 = _curve(scene, source, target)
    crosses = scene.boxes[source].task != scene.boxes[target].task
    look = 'stroke="#c2410c" stroke-width="1.6"' if crosses else 'stroke="#9ca3af"'
    if not nbytes:
        look += ' stroke-dasharray="3 3"'
    return (
        f'<path d="M{x0} {y0}C{x0} {y0 + _GAP_Y},{x1} {y1 - _GAP_Y},{x1} {y1}" '
        f'fill="none" {look}/>'
    )


def _bytes_label(scene: _Scene, source: int, target: int, nbytes: int) -> str:
    x0, y0, x1, y1 = _curve(scene, source, target)
    # Nearer to the target, where lines from one box have parted.
    x, y = (x0 + 3 * x1) // 4, (y0 + 3 * y1) // 4
    return (
        f'<text x="{x}" y="{y}" text-anchor="middle" font-size="10" '
        f'stroke="white" stroke-width="3" paint-order="stroke">{bytes_text(nbytes)}'
        "</text>"
    )


def _drawn(box: _Box) -> str:
    middle = box.x + _WIDTH // 2
    title, line = (shortened(text, _LETTERS) for text in (box.title, box.line))
    return (
        f"<g><title>{html.escape(box.detail or box.title)}</title>"
        f'<rect x="{box.x}" y="{box.y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" '
        f'fill="{_FILLS.get(box.kind, "white")}" stroke="#4b5563"/>'
        f'<text x="{middle}" y="{box.y + 16}" text-anchor="middle">'
        f'{html.escape(title)}</text><text x="{middle}" y="{box.y + 31}" '
        f'text-anchor="middle" fill="#6b7280">{html.escape(line)}</text></g>'
    )
