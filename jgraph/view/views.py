"""Views: a scene cut into drawings of few boxes, each group with one of its own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from jgraph.view.scene import Group, Link, Node, Scene, grouped, items_of, opened
from jgraph.view.units import bytes_text, count_text

_MAX_LINES = 12


@final
@dataclass(frozen=True, slots=True)
class Box:
    """What is drawn for an item, for a group, or for what lies around a view.

    ``opens`` is the key of the view of what is inside.
    """

    key: str
    lane: str
    title: str
    line: str = ""
    detail: str = ""
    kind: str = "operation"
    opens: str = ""


@final
@dataclass(frozen=True, slots=True)
class Edge:
    """A line between two boxes, by their keys, for all values that go this way."""

    source: str
    target: str
    nbytes: int = 0
    detail: str = ""

    @property
    def is_state(self) -> bool:
        """Whether it only says that the target uses the state that the source is."""
        return not self.detail


@final
@dataclass(frozen=True, slots=True)
class View:
    """One drawing.

    Attributes:
      key: of the view; "" is the first.
      trail: (title, key) of the views that it is inside of, and its own at the end.
      boxes: in an order in which most edges point forward.
      edges: between keys of boxes.
      lanes: a line about a lane, by its name.
    """

    key: str
    trail: tuple[tuple[str, str], ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    lanes: Mapping[str, str]


def views(scene: Scene, inner: Mapping[str, Scene] | None = None) -> list[View]:
    """Returns the view of a scene, and those of its groups and of inner scenes.

    Args:
      scene: what to show first.
      inner: scenes by the keys that items have in ``inner``; one that several items
        have is shown once.
    """
    cutter = _Cutter(inner or {})
    cutter.add_scene("", scene, ())
    return cutter.views


@final
@dataclass(slots=True)
class _Cutter:
    inner: Mapping[str, Scene]
    views: list[View] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def add_scene(
        self, key: str, scene: Scene, trail: tuple[tuple[str, str], ...]
    ) -> None:
        ends: dict[str, list[Link]] = {}
        for link in scene.links:
            ends.setdefault(link.source, []).append(link)
            ends.setdefault(link.target, []).append(link)
        nodes = opened(grouped(scene.items))
        self._add(key, scene, ends, nodes, {}, (*trail, (scene.title, key)))

    def _add(
        self,
        key: str,
        scene: Scene,
        ends: Mapping[str, list[Link]],
        nodes: list[Node],
        around: Mapping[str, Box],
        trail: tuple[tuple[str, str], ...],
    ) -> None:
        """Adds the view of ``nodes``; ``around`` is the box of each other item."""
        boxes = [_box(node, key, scene.noun) for node in nodes]
        owner = {
            item.key: box
            for node, box in zip(nodes, boxes, strict=True)
            for item in items_of(node)
        }
        known = {**around, **owner}
        links = dict.fromkeys(link for name in owner for link in ends.get(name, ()))
        edges = _edges(links, known)
        ends_of = (known[end] for link in links for end in (link.source, link.target))
        inside = {box.key for box in boxes}
        # What lies around: where values come from, and where they go.
        context = {b.key: b for b in ends_of if b.key not in inside}
        dim = [replace(box, kind="context", detail="") for box in context.values()]
        drawing = _ordered([*dim, *boxes], edges)
        lanes = {lane: scene.lanes.get(lane, "") for lane in {b.lane for b in drawing}}
        self.views.append(View(key, trail, tuple(drawing), tuple(edges), lanes))
        for node, box in zip(nodes, boxes, strict=True):
            if not box.opens or box.opens in self._seen:
                continue
            self._seen.add(box.opens)
            if isinstance(node, Group):
                here = (*trail, (box.title, box.opens))
                deeper = opened(node.children)
                self._add(box.opens, scene, ends, deeper, known, here)
            else:
                self.add_scene(box.opens, self.inner[node.inner], trail)


def _box(node: Node, view: str, noun: str) -> Box:
    if isinstance(node, Group):
        title, line, detail = node.words(noun)
        key = f"{view}>{node.key}"
        return Box(key, node.lane, title, line, detail, node.kind, opens=key)
    opens = f"inner {node.inner}" if node.inner else ""
    return Box(
        f"{view}>{node.key}",
        node.lane,
        node.title,
        node.line,
        node.detail or node.title,
        node.kind,
        opens,
    )


def _ordered(boxes: Sequence[Box], edges: Sequence[Edge]) -> list[Box]:
    """Returns boxes after all that they need; of those that need each other, one."""
    needs = {box.key: set[str]() for box in boxes}
    users: dict[str, list[str]] = {}
    for edge in edges:
        needs[edge.target].add(edge.source)
        users.setdefault(edge.source, []).append(edge.target)
    remaining = {box.key: box for box in boxes}
    ready = [key for key in remaining if not needs[key]]
    ordered = []
    while remaining:
        key = ready.pop(0) if ready else next(iter(remaining))
        if key not in remaining:
            continue
        ordered.append(remaining.pop(key))
        for user in users.get(key, ()):
            needs[user].discard(key)
            if not needs[user] and user in remaining:
                ready.append(user)
    return ordered


def _edges(links: Iterable[Link], owner: Mapping[str, Box]) -> list[Edge]:
    values: dict[tuple[str, str], dict[str, int]] = {}
    for link in links:
        source, target = owner[link.source].key, owner[link.target].key
        if source != target:
            found = values.setdefault((source, target), {})
            if link.value:
                found[link.value] = link.nbytes
    return [
        Edge(source, target, sum(found.values()), _values_text(found))
        for (source, target), found in values.items()
    ]


def _values_text(values: Mapping[str, int]) -> str:
    if not values:
        return ""
    head = f"{count_text(len(values), 'value')}, {bytes_text(sum(values.values()))}"
    lines = list(values)[:_MAX_LINES]
    more = len(values) - len(lines)
    return "\n".join([head, *lines, *([f"and {more} more"] if more else [])])
