"""Scenes of any size become views of few boxes, and nothing lies on anything."""

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from jgraph.view.layout import GAP_Y, HEIGHT, WIDTH, layout
from jgraph.view.scene import MAX_BOXES, Item, Link, Scene
from jgraph.view.views import Box, Edge, View, views

LANES = ("/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1")


def model(blocks: int) -> Scene:
    """Blocks of ten operations in a row, half of them on each worker."""
    items, links = [Item("w", LANES[0], "w", kind="variable")], []
    for n in range(10 * blocks):
        block = n // 10
        path = ("Model", f"Block_{block}", f"Layer_{n % 10 // 5}")
        lane = LANES[1 + 2 * block // max(1, blocks) % 2]
        items.append(Item(f"e{n}", lane, f"op{n % 10}", path=path, flops=2))
        links.append(Link("w", f"e{n}"))
        if n:
            links.append(Link(f"e{n - 1}", f"e{n}", f"%{n}", 4))
    return Scene("model", items, links)


@pytest.mark.parametrize("blocks", [1, 10, 100, 500])
def test_every_view_is_readable_and_every_item_is_in_one(blocks: int) -> None:
    found = views(model(blocks))
    own = [[b for b in v.boxes if b.kind != "context"] for v in found]
    assert max(map(len, own)) <= MAX_BOXES
    leaves = Counter(b.title for boxes in own for b in boxes if not b.opens)
    assert leaves["op3"] == blocks
    opened = [b.opens for boxes in own for b in boxes if b.opens]
    assert sorted(opened) == sorted(v.key for v in found[1:])


def test_five_items_are_five_boxes() -> None:
    (view,) = views(Scene("small", [Item(f"e{n}", "", f"op{n}") for n in range(5)], []))
    assert len(view.boxes) == 5


def test_groups_are_the_users_scopes_with_their_sums() -> None:
    first = views(model(100))[0]
    titles = [b.title for b in first.boxes]
    assert titles.count("w") == 1
    assert any(re.fullmatch(r"Block_\d+ … Block_\d+", title) for title in titles)
    lines = [b.line for b in first.boxes if b.opens]
    counts = [int(line.split()[0].replace(",", "")) for line in lines]
    assert sum(counts) == 1000
    assert all(
        f"{2 * n:,} FLOP" in line
        for n, line in zip(counts, lines, strict=True)
        if n < 400
    )


def test_a_group_shows_where_its_values_come_from_and_go() -> None:
    found = views(model(100))
    inner = found[-1]
    assert inner.trail[0] == ("model", "")
    assert len(inner.trail) > 1
    context = {b.key for b in inner.boxes if b.kind == "context"}
    assert any(e.source in context for e in inner.edges)
    assert "w" in {b.title for b in inner.boxes if b.key in context}


def test_a_value_that_many_of_a_group_take_is_counted_once() -> None:
    items = [
        Item("x", "a", "x"),
        *(Item(f"e{n}", "b", "op", path=("G",)) for n in range(80)),
    ]
    links = [Link("x", f"e{n}", "x: float32[2]", 8) for n in range(80)]
    edges = [e for e in views(Scene("s", items, links))[0].edges if e.nbytes]
    assert {e.nbytes for e in edges} == {8}


def test_what_is_inside_of_several_items_is_shown_once() -> None:
    outer = Scene(
        "plan", [Item(f"s{n}", "", "segment", inner="d") for n in range(3)], []
    )
    inner = Scene("segment", [Item("e0", "", "sin")], [])
    found = views(outer, {"d": inner})
    assert [v.trail[-1][0] for v in found] == ["plan", "segment"]
    assert {b.opens for b in found[0].boxes} == {found[1].key}


@st.composite
def graphs(draw: st.DrawFn) -> View:
    count = draw(st.integers(1, 25))
    boxes = tuple(
        Box(str(n), draw(st.sampled_from(LANES)), str(n)) for n in range(count)
    )
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    chosen = {p for p in draw(st.lists(pairs, max_size=50)) if p[0] != p[1]}
    edges = tuple(Edge(str(a), str(b), 4, "value") for a, b in sorted(chosen))
    return View("", (("g", ""),), boxes, edges, {b.lane: "" for b in boxes})


@given(view=graphs())
def test_boxes_lie_in_their_region_and_never_on_each_other(view: View) -> None:
    placed = layout(view)
    regions = {r.lane: r for r in placed.regions}
    for box in view.boxes:
        x, y = placed.places[box.key]
        region = regions[box.lane]
        assert region.x <= x
        assert x + WIDTH <= region.x + region.width
        assert 0 < y <= placed.height - HEIGHT
    assert len(set(placed.places.values())) == len(view.boxes)
    edges = sorted((r.x, r.x + r.width) for r in placed.regions)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(edges))


@given(view=graphs())
def test_long_lines_run_between_the_columns(view: View) -> None:
    placed = layout(view)
    for route in placed.routes:
        if match := re.search(r" (\d+) (\d+)V(-?\d+)C", route.path):
            x, top, bottom = map(int, match.groups())
            low, high = min(top, bottom), max(top, bottom)
            for left, y in placed.places.values():
                beside = x < left or x > left + WIDTH
                assert beside or y + HEIGHT <= low - GAP_Y // 2 or y >= high


@given(view=graphs())
def test_values_flow_downwards_where_there_is_no_loop(view: View) -> None:
    forward = tuple(e for e in view.edges if int(e.source) < int(e.target))
    placed = layout(View("", view.trail, view.boxes, forward, view.lanes)).places
    assert all(placed[e.source][1] < placed[e.target][1] for e in forward)
