"""The picture of a plan."""

import html
import pathlib
import re
import xml.etree.ElementTree as ET
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import jgraph as jg
from jgraph.plan.plan import Plan, plan
from tests.support.plans import DRIVER, PS, TASKS, WORKERS, graph_of
from tests.support.programs import staged_mlp

SVG = "{http://www.w3.org/2000/svg}"


def texts(planned: Plan) -> list[str]:
    """What shows at first."""
    root = ET.fromstring(planned.show().svg)
    view = next(g for g in root.iter(f"{SVG}g") if g.get("id") == "v0")
    return [t.text or "" for t in view.iter(f"{SVG}text")]


def titles(planned: Plan) -> list[str]:
    """What shows on hover, everywhere."""
    root = ET.fromstring(planned.show().svg)
    return [t.text or "" for t in root.iter(f"{SVG}title")]


def small_plan() -> Plan:
    w = jg.Variable("w<1>", jnp.ones((64, 4)), device=PS[0])

    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            g = x.T @ (x @ w[...])
        w[...] = w[...] - 0.1 * g
        return g.sum()

    graph = graph_of(step, np.ones((2, 64), np.float32))
    return plan(graph, tasks=TASKS, driver=DRIVER)


def test_the_picture_names_tasks_variables_segments_and_bytes() -> None:
    found = texts(small_plan())
    assert {PS[0], WORKERS[0], WORKERS[1]} <= set(found)
    assert {"w<1>", "read w<1>", "x", "fetches"} <= set(found)
    assert found.count("1.0 KiB") == 3  # the read, and both messages
    assert "float32[64,4] · 1.0 KiB" in found
    assert any(t.startswith("1 segment") and "FLOP" in t for t in found)


def test_a_segment_says_its_operations_its_memory_and_what_it_updates() -> None:
    planned = small_plan()
    assert any(re.fullmatch(r"\d\.\d kFLOP · ≤ \d\.\d KiB", t) for t in texts(planned))
    assert any("at most" in t and t.endswith("updates w<1>") for t in titles(planned))


def test_a_segment_opens_its_equations() -> None:
    planned = small_plan()
    root = ET.fromstring(planned.show().svg)
    views = [g for g in root.iter(f"{SVG}g") if g.get("class") == "view"]
    assert len(views) == 1 + len(planned.segments)
    boxes = [t.text for g in views[1:] for t in g.iter(f"{SVG}text")]
    assert boxes.count("dot_general") == 2


def test_a_shard_says_of_what_it_is_a_part() -> None:
    w = jg.Variable(
        "w",
        jnp.ones((8, 4)),
        partitioner=jg.fixed_size_partitioner(2),
        device="/job:ps",
    )
    planned = plan(graph_of(lambda: w[...]), tasks=TASKS, driver=DRIVER)
    found = titles(planned)
    assert any(t.endswith("shard 2 of 2 of w [8, 4], cut along axis 0") for t in found)


def test_a_value_that_crosses_once_is_drawn_as_crossing_once() -> None:
    example = staged_mlp(2, optax.sgd(0.1))
    graph = graph_of(example.fn, *example.args, variables=example.variables)
    planned = plan(graph, tasks=WORKERS, driver=DRIVER)
    root = ET.fromstring(planned.show().svg)
    lines = [p.get("class") for p in root.iter(f"{SVG}path")]
    crossing = [kind for kind in lines if kind == "edge crosses"]
    assert len(planned.edges) == 3
    assert len(crossing) == 4  # the last brings a loss to fetch and a gradient to use


def test_many_segments_are_few_boxes_and_equal_ones_open_one_view() -> None:
    def step(x: Any) -> Any:
        for i in range(64):
            with jg.device(WORKERS[i % 2]):
                x = jnp.sin(x)
        return x

    graph = graph_of(step, np.ones((50,), np.float32))
    planned = plan(graph, tasks=TASKS, driver=DRIVER)
    assert len(planned.segments) == 64
    assert len(planned.program.segments) == 1
    root = ET.fromstring(planned.show().svg)
    first, *others = [g for g in root.iter(f"{SVG}g") if g.get("class") == "view"]
    assert len([t for t in first.iter(f"{SVG}text") if t.get("class") == "t"]) < 40
    inside = [[t.text for t in g.iter(f"{SVG}text")] for g in others]
    assert len([found for found in inside if "2 tasks" in found]) == 1


def test_a_page_holds_the_picture_and_nothing_from_elsewhere(
    tmp_path: pathlib.Path,
) -> None:
    planned = small_plan()
    planned.show(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert planned.show().svg in page
    assert "src=" not in page
    assert "w&lt;1&gt;" in page
    assert html.escape(page) in planned._repr_html_()


def test_no_text_is_wider_than_its_box() -> None:
    def step(batch: dict[str, Any]) -> Any:
        return sum(x.sum() for x in batch.values())

    names = ("a_first_image_with_a_name_too_long_for_its_box", "labels")
    graph = graph_of(step, {name: np.ones(3, np.float32) for name in names})
    found = texts(plan(graph, tasks=TASKS, driver=DRIVER))
    assert max(map(len, found)) <= 30, found
    assert any("…" in text for text in found)
