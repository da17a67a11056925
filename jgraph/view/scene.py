"""Scene: the content of a picture, as items in lanes, links and groups.

A picture must be readable with 5 items and with 5,000. Items are grouped by the
user's scopes, and what one group has too many of is taken in pieces.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

from jgraph.view.units import bytes_text, count_text, flops_text

MAX_BOXES = 60
"""Of one view."""
_MIN_PER_LANE = 6
_FEW = 4
_MAX_LINES = 16


@final
@dataclass(frozen=True, slots=True)
class Item:
    """One thing in a picture.

    Attributes:
      key: unique in its scene.
      lane: the region that it lies in: a task, a device, or "".
      title: first line of its box.
      line: second line.
      detail: shows on hover.
      kind: chooses the colour: ``operation``, ``segment``, ``variable``, ``feed``, ….
      path: the scopes that it is in, the outermost first.
      flops: floating-point operations, for the sum of a group.
      nbytes: memory of a variable, for the sum of a group.
      inner: key of the scene of what is inside, if there is one.
    """

    key: str
    lane: str
    title: str
    line: str = ""
    detail: str = ""
    kind: str = "operation"
    path: tuple[str, ...] = ()
    flops: float = 0
    nbytes: int = 0
    inner: str = ""


@final
@dataclass(frozen=True, slots=True)
class Link:
    """A value that goes from one item to another, by their keys.

    Links of one ``value`` between two boxes are drawn and counted once. One without a
    value says that the source is state that the target uses.
    """

    source: str
    target: str
    value: str = ""
    nbytes: int = 0


@final
@dataclass(frozen=True, slots=True)
class Scene:
    """Items in program order, and what goes between them.

    Attributes:
      title: what it is of.
      items: in an order in which most links point forward.
      links: between keys of items.
      noun: what one item is called when they are counted.
      lanes: a line about a lane, by its name.
    """

    title: str
    items: Sequence[Item]
    links: Sequence[Link]
    noun: str = "equation"
    lanes: dict[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Items of one lane that are drawn as one box, and have a view of their own."""

    key: str
    lane: str
    label: str
    children: "tuple[Node, ...]"
    items: tuple[Item, ...]
    is_scope: bool = True
    """Whether the user named it; else it is a piece of what would be too many."""

    @property
    def kind(self) -> str:
        """The kind of all its items if that is none of computation, or ``group``."""
        kinds = {item.kind for item in self.items}
        kind = kinds.pop() if len(kinds) == 1 else "group"
        return "group" if kind in ("operation", "segment") else kind

    @property
    def is_closed(self) -> bool:
        """Whether it stays one box in the views around it: variables, feeds."""
        return len(self.items) > _FEW and self.kind in ("variable", "feed")

    def words(self, noun: str) -> tuple[str, str, str]:
        """Returns title, line and detail of its box."""
        count, flops = len(self.items), sum(item.flops for item in self.items)
        if self.kind in ("variable", "feed"):
            lines = [item.detail or item.title for item in self.items]
            total = bytes_text(sum(item.nbytes for item in self.items))
            title, line = count_text(count, self.kind), total
        else:
            titles = Counter(item.title for item in self.items).most_common()
            lines = [f"{name} x{n}" if n > 1 else name for name, n in titles]
            title, line = self.label, count_text(count, noun)
            line += f" · {flops_text(flops)}" if flops else ""
        more = len(lines) - _MAX_LINES
        lines = [*lines[:_MAX_LINES], f"and {more} more"] if more > 0 else lines
        return title, line, "\n".join([f"{title}: {line}", *lines])


Node: TypeAlias = "Item | Group"


def grouped(items: Iterable[Item]) -> list[Node]:
    """Returns the items of each lane by their scopes, many of one level in pieces."""
    lanes: dict[str, list[Item]] = {}
    for item in items:
        lanes.setdefault(item.lane, []).append(item)
    limit = max(_MIN_PER_LANE, MAX_BOXES // max(1, len(lanes)))
    return [
        node
        for lane, members in lanes.items()
        for node in _in_pieces(_by_scope(members, 0, lane), limit, lane)
    ]


def opened(nodes: Iterable[Node], limit: int = MAX_BOXES) -> list[Node]:
    """Returns the nodes at the deepest level of which there are at most ``limit``.

    Where the next level is too much, only groups that the user named are opened, and
    if that is still too much, groups of such groups, in pieces.
    """
    level = list(nodes)
    while True:
        share = max(2, limit // max(1, len(level)))
        for may_open, most in ((_any, limit), (_scope_only, limit), (_nested, share)):
            deeper: list[Node] = []
            for node in level:
                if isinstance(node, Group) and not node.is_closed and may_open(node):
                    deeper += _in_pieces(list(node.children), most, node.key)
                else:
                    deeper.append(node)
            if len(deeper) <= limit and deeper != level:
                level = deeper
                break
        else:
            return level


def _any(_: Group) -> bool:
    return True


def _scope_only(group: Group) -> bool:
    return group.is_scope


def _nested(group: Group) -> bool:
    return group.is_scope and any(isinstance(n, Group) for n in group.children)


def items_of(node: Node) -> tuple[Item, ...]:
    """Returns what a node stands for."""
    return (node,) if isinstance(node, Item) else node.items


def _by_scope(items: Sequence[Item], depth: int, key: str) -> list[Node]:
    scopes: dict[str, list[Item]] = {}
    for item in items:
        # What is in no deeper scope stands alone.
        name = f"/{item.path[depth]}" if len(item.path) > depth else f"={item.key}"
        scopes.setdefault(name, []).append(item)
    return [
        members[0] if len(members) == 1 else _scope(members, depth, f"{key}{name}")
        for name, members in scopes.items()
    ]


def _scope(items: Sequence[Item], depth: int, key: str) -> Group:
    end, path = depth + 1, items[0].path
    while len(path) > end and all(i.path[: end + 1] == path[: end + 1] for i in items):
        end += 1
    children = _in_pieces(_by_scope(items, end, key), MAX_BOXES, key)
    label = "/".join(path[depth:end])
    return Group(key, items[0].lane, label, tuple(children), tuple(items))


def _in_pieces(nodes: list[Node], limit: int, key: str) -> list[Node]:
    """Returns fewer nodes if there are too many; scopes stay whole if they can."""
    if len(nodes) <= limit:
        return nodes
    runs: list[list[Node]] = []
    for node in nodes:
        last = runs[-1][0] if runs else None
        if isinstance(node, Item) and isinstance(last, Item) and node.kind == last.kind:
            runs[-1].append(node)
        else:
            runs.append([node])
    if len(runs) == 1 or len(runs) > limit:
        size = math.ceil(len(nodes) / (limit // 2))
        runs = [nodes[i : i + size] for i in range(0, len(nodes), size)]
    return [_piece(run, f"{key}+{n}") for n, run in enumerate(runs)]


def _piece(nodes: list[Node], key: str) -> Node:
    if len(nodes) == 1:
        return nodes[0]
    items = tuple(item for node in nodes for item in items_of(node))
    titles = [n.title if isinstance(n, Item) else n.label for n in nodes]
    if isinstance(nodes[0], Item):
        ranked = [title for title, _ in Counter(titles).most_common()]
        label = ", ".join(ranked[:3]) + (", …" if len(ranked) > 3 else "")
    else:
        label = f"{titles[0]} … {titles[-1]}"
    children = _in_pieces(nodes, MAX_BOXES, key)
    return Group(key, items[0].lane, label, tuple(children), items, is_scope=False)
