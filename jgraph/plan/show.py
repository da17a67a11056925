"""``Plan.show``: a picture of a program, its nodes in the region of their task.

Time goes downwards. Lines between regions are messages, with their bytes. What a
segment computes opens by a click.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from jgraph.graph.cost import flops_of_all, peak_nbytes
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.show import body_scene, scopes_of
from jgraph.graph.text import value_names
from jgraph.plan.partition.assemble import SegmentInfo
from jgraph.plan.program.nodes import (
    AggregateNode,
    CheckNode,
    ConstNode,
    ContributeNode,
    FeedNode,
    FetchNode,
    JoinNode,
    LookupNode,
    MergeNode,
    Node,
    ReadNode,
    RecvNode,
    RouteNode,
    SegmentNode,
    SendNode,
    SplitNode,
    UnpackNode,
    WriteNode,
    inputs_of,
    outputs_of,
)
from jgraph.plan.program.program import Partition, Program
from jgraph.view.scene import Item, Link, Scene
from jgraph.view.svg import Picture, draw
from jgraph.view.units import bytes_text, count_text, flops_text
from jgraph.view.views import views

_ACCESS: dict[type, str] = {
    ReadNode: "read",
    WriteNode: "write",
    ContributeNode: "contribute",
    AggregateNode: "average",
}
_MOVE: dict[type, str] = {
    RouteNode: "route ids",
    MergeNode: "merge rows",
    SplitNode: "split rows",
    JoinNode: "join parts",
}


def plan_picture(
    program: Program, segments: Sequence[SegmentInfo], graph: Graph
) -> Picture:
    """Returns a drawing of a program.

    Args:
      program: what to draw.
      segments: about its segments, in the order of each partition.
      graph: what was planned.
    """
    scene = _scene(program, segments, graph)
    return draw(views(scene, _inner(segments, graph)))


def _inner(segments: Sequence[SegmentInfo], graph: Graph) -> dict[str, Scene]:
    """A scene for each executable: what runs on several tasks is shown once."""
    names = value_names(graph)
    specs = dict(zip(graph.jaxpr.invars, graph.variables, strict=False))
    tasks: dict[str, list[TaskName]] = {}
    for info in segments:
        tasks.setdefault(info.digest, []).append(info.task)
    scenes: dict[str, Scene] = {}
    for info in segments:
        if info.digest not in scenes:
            several = count_text(len(set(tasks[info.digest])), "task")
            lane = info.task if several == "1 task" else several
            title = _segment_title(info)
            scenes[info.digest] = body_scene(title, info.body, names, specs, lane)
    return scenes


def _scene(program: Program, segments: Sequence[SegmentInfo], graph: Graph) -> Scene:
    shards = _shards(graph)
    regions = []
    for partition in program.partitions:
        infos = [s for s in segments if s.task == partition.task]
        regions.append(_Region(partition, infos, shards))
    items = [item for region in regions for item in region.items.values()]
    links = [link for region in regions for link in region.links]
    return Scene(
        f"plan {program.name}",
        items,
        [*links, *_value_links(program, regions)],
        noun="node",
        lanes={r.partition.task: r.line() for r in regions},
    )


@final
@dataclass(slots=True)
class _Region:
    """The items of a task, by the position of their node; variables before them."""

    partition: Partition
    infos: Sequence[SegmentInfo]
    shards: Mapping[str, str]
    items: dict[int, Item] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)

    def __post_init__(self) -> None:
        for n in range(len(self.partition.variables)):
            self.items[n - len(self.partition.variables)] = self._variable(n)
        remaining = iter(self.infos)
        for position, node in enumerate(self.partition.nodes):
            item = self._item(f"{self.partition.task}#{position}", node, remaining)
            if item is not None:
                self.items[position] = item
                self.links += [
                    Link(self.items[v - len(self.partition.variables)].key, item.key)
                    for v in dict.fromkeys(_touched(node))
                ]

    def line(self) -> str:
        """About the task."""
        flops = sum(item.flops for item in self.items.values())
        parts = [count_text(len(self.infos), "segment")] if self.infos else []
        parts += [flops_text(flops)] if flops else []
        if self.partition.variables:
            nbytes = sum(v.type.nbytes for v in self.partition.variables)
            parts.append(f"{bytes_text(nbytes)} of variables")
        return " · ".join(parts)

    def _variable(self, number: int) -> Item:
        stored, task = self.partition.variables[number], self.partition.task
        size = bytes_text(stored.type.nbytes)
        about = f"variable {stored.name}: {stored.type}, {size}"
        return Item(
            f"{task} variable {number}",
            task,
            stored.name,
            f"{stored.type} · {size}",
            "\n".join([about, *filter(None, [self.shards.get(stored.name, "")])]),
            "variable",
            ("variables",),
            nbytes=stored.type.nbytes,
        )

    def _item(self, key: str, node: Node, infos: Iterator[SegmentInfo]) -> Item | None:
        task, types = self.partition.task, self.partition.values
        match node:
            case FeedNode():
                type_ = types[node.out]
                line = f"{type_} · {bytes_text(type_.nbytes)}"
                detail, path = f"{node.name}: {type_}", ("feeds",)
                size = type_.nbytes
                return Item(
                    key, task, node.name, line, detail, "feed", path, nbytes=size
                )
            case SegmentNode():
                return _segment_item(key, task, next(infos))
            case ReadNode() | WriteNode() | ContributeNode() | AggregateNode():
                return self._access(key, node)
            case LookupNode():
                nbytes = bytes_text(sum(types[v].nbytes for v in node.outs))
                names = self._names(_touched(node))
                return self._state(key, "rows of", names, f"up to {nbytes}")
            case CheckNode():
                line = count_text(node.rows, "row")
                return Item(key, task, "check ids", line, node.feature, "rows")
            case RouteNode() | MergeNode() | SplitNode() | JoinNode():
                parts = node.values if isinstance(node, JoinNode) else node.local
                line = f"of {count_text(len(parts), 'shard')}"
                detail = node.feature if isinstance(node, RouteNode) else ""
                return Item(key, task, _MOVE[type(node)], line, detail, "rows")
            case FetchNode() if node.values:
                line = count_text(len(node.values), "value")
                detail = "\n".join(str(types[v]) for v in node.values)
                return Item(key, task, "fetches", line, detail, "fetch")
            case _:
                return None

    def _access(
        self, key: str, node: ReadNode | WriteNode | ContributeNode | AggregateNode
    ) -> Item:
        touched = _touched(node)
        nbytes = sum(self.partition.variables[v].type.nbytes for v in touched)
        names = self._names(touched)
        return self._state(key, _ACCESS[type(node)], names, bytes_text(nbytes))

    def _names(self, variables: Iterable[int]) -> list[str]:
        return [self.partition.variables[v].name for v in variables]

    def _state(self, key: str, verb: str, names: list[str], line: str) -> Item:
        one = len(names) == 1
        title = f"{verb} {names[0]}" if one else f"{verb} {len(names)} variables"
        detail = "\n".join(names)
        return Item(key, self.partition.task, title, line, detail, "state")


def _segment_title(info: SegmentInfo) -> str:
    scopes = dict.fromkeys(s[0] for e in info.body if (s := scopes_of(e)))
    return ", ".join(scopes) or info.label


def _segment_item(key: str, task: TaskName, info: SegmentInfo) -> Item:
    flops, nbytes = flops_of_all(info.body), peak_nbytes(info.body)
    lines = [
        f"{count_text(info.equations, 'equation')}: {info.label}",
        f"{flops_text(flops)}, at most {bytes_text(nbytes)} of values at a time",
        *(f"updates {name}" for name in info.updates),
    ]
    return Item(
        key,
        task,
        _segment_title(info),
        f"{flops_text(flops)} · ≤ {bytes_text(nbytes)}",
        "\n".join(lines),
        "segment",
        flops=flops,
        inner=info.digest,
    )


def _shards(graph: Graph) -> dict[str, str]:
    """Returns of what each shard is a part, by its name."""
    return {
        part.name: f"shard {n + 1} of {len(whole.shards)} of {whole.name} "
        f"{list(whole.shape)}, cut along axis {whole.sharding.axis}"
        for whole in graph.logical
        if whole.sharding is not None
        for n, part in enumerate(whole.shards)
    }


def _touched(node: Node) -> tuple[int, ...]:
    """Returns the variables that a node uses."""
    match node:
        case SegmentNode():
            rows = (r.variable for r in (*node.row_updates, *node.row_reads))
            return (*node.updates, *node.reads, *rows)
        case AggregateNode():
            return node.all_variables
        case ReadNode() | WriteNode() | ContributeNode():
            return node.variables
        case LookupNode():
            return tuple(r.variable for r in node.rows)
        case _:
            return ()


def _value_links(program: Program, regions: Sequence[_Region]) -> Iterator[Link]:
    """Yields a link for each use of a value; later users of a received one share it."""
    makers: dict[tuple[TaskName, int], str] = {}
    for region in regions:
        for position, node in enumerate(region.partition.nodes):
            if position in region.items and not isinstance(node, ConstNode):
                for value in outputs_of(node):
                    makers[region.partition.task, value] = region.items[position].key
    received = _received(program, makers)
    for region in regions:
        partition = region.partition
        packed = {
            out: node.value
            for node in partition.nodes
            if isinstance(node, UnpackNode)
            for out in node.outs
        }
        for position, node in enumerate(partition.nodes):
            item = region.items.get(position)
            taken = dict.fromkeys(packed.get(v, v) for v in inputs_of(node))
            for value in taken if item is not None else ():
                assert item is not None
                name = (partition.task, value)
                source = makers.get(name) or received.get(name)
                if source is None:
                    continue
                makers.setdefault(name, item.key)
                type_ = partition.values[value]
                text = f"{source.rsplit('#')[-1]}.{value}: {type_}"
                yield Link(source, item.key, text, type_.nbytes)


def _received(
    program: Program, makers: Mapping[tuple[TaskName, int], str]
) -> dict[tuple[TaskName, int], str]:
    """Returns the item that made each received value."""
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
