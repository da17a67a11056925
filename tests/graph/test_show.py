"""The picture of a graph: equations in their lanes, valid SVG, nothing from outside."""

import pathlib
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

from jgraph.errors import ConfigError
from jgraph.graph.device import device
from jgraph.graph.graph import Graph
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.view.svg import draw
from jgraph.view.views import Box, Edge, View

SVG = "{http://www.w3.org/2000/svg}"


def first_view(svg: str) -> ET.Element:
    """What shows at first; raises when the picture is not well formed."""
    return next(g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("id") == "v0")


def texts(view: ET.Element, kind: str) -> list[str]:
    return [t.text or "" for t in view.iter(f"{SVG}text") if t.get("class") == kind]


def example(layers: int) -> Graph:
    w = Variable("w<1>", jnp.ones((3, 3)), device="/job:ps/task:0")

    def step(x: jax.Array) -> Any:
        for i in range(layers):
            with device(f"/job:worker/task:{i % 2}"), jax.named_scope(f"layer{i % 2}"):
                x = jnp.tanh(x @ w[...])
        w[...] = x
        return {"out": x.sum()}

    return trace(step, jnp.ones((3, 3)))[0]


def test_picture_has_a_box_for_each_equation_variable_feed_and_fetch() -> None:
    graph = example(2)
    view = first_view(graph.show().svg)
    assert texts(view, "task") == [
        "the plan decides",
        "/job:ps/task:0",
        "/job:worker/task:0",
        "/job:worker/task:1",
    ]
    boxes = texts(view, "t")
    assert len(boxes) == len(graph.equations) + 3
    assert sorted(boxes) == sorted(
        ["w<1>", "x", "['out']", "reduce_sum", "write w<1>"]
        + ["read w<1>", "dot_general", "tanh"] * 2
    )


def test_boxes_say_types_operations_and_memory() -> None:
    lines = texts(first_view(example(1).show().svg), "s")
    assert "float32[3,3] · 36 B" in lines
    assert "float32[3,3] · 54 FLOP" in lines


def test_equation_shows_its_text_and_source_line_on_hover() -> None:
    svg = example(1).show().svg
    titles = [t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}title")]
    assert any(re.search(r"tanh %1\n.*test_show\.py:\d+", t) for t in titles)
    assert any(t.startswith("1 value, 36 B\n%0: float32[3,3]") for t in titles)


def test_lines_between_devices_are_highlighted_and_say_their_bytes() -> None:
    view = first_view(example(2).show().svg)
    kinds = [p.get("class") for p in view.iter(f"{SVG}path")]
    assert kinds.count("edge crosses") == 6
    assert texts(view, "bytes") == ["36 B"] * 6


def test_large_graph_opens_by_device_and_scope() -> None:
    graph = example(100)
    assert len(graph.equations) > 250
    root = ET.fromstring(graph.show().svg)
    views = [g for g in root.iter(f"{SVG}g") if g.get("class") == "view"]
    assert len(texts(views[0], "t")) < 20
    assert {"layer0", "layer1", "write w<1>"} <= set(texts(views[0], "t"))
    assert [v.get("style") for v in views[1:]] == ["display:none"] * (len(views) - 1)
    ids = {v.get("id") for v in views}
    opens = {g.get("data-view") for g in root.iter() if g.get("data-view")}
    assert opens == ids
    everything = [t for v in views for t in texts(v, "t")]
    assert everything.count("tanh") == everything.count("dot_general") == 100


def test_large_graph_of_one_device_without_scopes_is_a_few_boxes() -> None:
    def step(x: jax.Array) -> Any:
        for _ in range(200):
            x = jnp.sin(x)
        return x

    view = first_view(trace(step, 1.0)[0].show().svg)
    assert len(texts(view, "t")) <= 60


def test_empty_graph_has_a_picture() -> None:
    assert texts(first_view(trace(lambda: None)[0].show().svg), "t") == []


def test_picture_is_the_same_for_two_traces() -> None:
    assert example(3).show().svg == example(3).show().svg


class Page(HTMLParser):
    """What a browser finds in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_notebook_and_file_show_the_same_page(tmp_path: pathlib.Path) -> None:
    graph = example(1)
    picture = graph.show(tmp_path / "graph.html")
    page = (tmp_path / "graph.html").read_text(encoding="utf-8")
    assert picture.svg in page
    ((tag, attributes),) = Page(graph._repr_html_()).tags
    assert tag == "iframe"
    assert attributes["srcdoc"] == page
    assert attributes["sandbox"] == "allow-scripts"


def test_page_takes_nothing_from_elsewhere_and_forbids_it() -> None:
    page = example(1).show().page()
    assert "//" not in page.replace('"http://www.w3.org/2000/svg"', "")
    tags = Page(page).tags
    assert not any({"src", "href"} & set(attributes) for _, attributes in tags)
    policy = next(a for t, a in tags if t == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in (policy["content"] or "")


@given(name=st.text(min_size=1, max_size=30))
def test_names_are_text_and_never_markup(name: str) -> None:
    boxes = (Box("a", name, name, name, name), Box("b", "", "plain"))
    edges = (Edge("a", "b", 4, f"1 value\n{name}"),)
    trail = ((name, ""),)
    picture = draw([View("", trail, boxes, edges, {name: name, "": ""})])
    known = {"svg", "title", "style", "defs", "marker", "path", "g", "rect", "text"}
    known |= {"tspan", "script"}
    tags = {e.tag for e in ET.fromstring(picture.svg).iter()}
    assert tags <= {f"{SVG}{tag}" for tag in known}
    assert {t for t, _ in Page(picture.page()).tags} <= known | {
        *("html", "head", "meta", "body")
    }


def test_file_ending_in_svg_is_a_drawing_that_viewers_open(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "new" / "graph.svg"
    example(1).show(path)
    assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_file_of_another_kind_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"not as '\.pdf'; write .*graph\.html"):
        example(1).show(tmp_path / "graph.pdf")


def test_picture_in_a_place_that_cannot_be_written_names_it(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the picture to .*file/g\.svg"):
        example(1).show(tmp_path / "file" / "g.svg")


def test_graphs_and_pictures_are_one_line_in_a_terminal() -> None:
    graph = example(1)
    for shown in (repr(graph), repr(graph.show())):
        assert len(shown) < 100, shown
        assert graph.name in shown
