"""Bar charts over time: bars in their lanes, arrows with messages, titles that fit."""

from xml.etree import ElementTree as ET

from jgraph.view.bars import Bar, Lane, draw_bars
from jgraph.view.svg import Picture

SVG = "{http://www.w3.org/2000/svg}"
SEND = Bar(0.0, 1.0, "send", kind="send", sends="k")
WAIT = Bar(0.5, 2.0, "wait", kind="wait", receives="k")
LATER = Bar(2.0, 4.0, "compute <x>")
LANES = (Lane("ps", ((SEND,),)), Lane("worker", ((WAIT, LATER), (Bar(0, 0, "now"),))))


def elements(picture: Picture, tag: str, kind: str) -> list[ET.Element]:
    found = ET.fromstring(picture.svg).iter(f"{SVG}{tag}")
    return [e for e in found if kind in (e.get("class") or "").split()]


def frame(picture: Picture, title: str) -> dict[str, float]:
    for box in elements(picture, "g", "span"):
        if box.findtext(f"{SVG}title") == title:
            rect = box.find(f"{SVG}rect")
            assert rect is not None
            return {name: float(rect.get(name, 0)) for name in ("x", "y", "width")}
    raise AssertionError(title)


def test_bars_lie_where_their_times_are() -> None:
    picture = draw_bars("step", "ms", LANES)
    send, wait, later = (frame(picture, b.title) for b in (SEND, WAIT, LATER))
    scale = send["width"]
    assert abs(wait["x"] - send["x"] - 0.5 * scale) < 0.2
    assert abs(later["width"] - 2 * scale) < 0.2
    assert wait["y"] == later["y"] > send["y"]


def test_arrow_goes_from_the_send_to_the_wait_for_it() -> None:
    (arrow,) = elements(draw_bars("step", "ms", LANES), "path", "edge")
    assert arrow.get("data-ends") == "0 1"


def test_message_that_nobody_sends_has_no_arrow() -> None:
    assert elements(draw_bars("s", "ms", LANES[1:]), "path", "edge") == []


def test_what_has_no_room_for_its_title_has_none_and_what_took_no_time_is_seen() -> (
    None
):
    picture = draw_bars("step", "ms", LANES)
    assert frame(picture, "now")["width"] > 1
    shown = [
        t.text for b in elements(picture, "g", "span") for t in b.iter(f"{SVG}text")
    ]
    assert shown == ["send", "wait", "compute <x>"]


def test_times_are_marked_in_round_numbers() -> None:
    ticks = elements(draw_bars("step", "ms", LANES), "text", "tick-text")
    assert [t.text for t in ticks][:3] == ["0 ms", "0.5 ms", "1 ms"]


def test_nothing_at_all_is_an_empty_chart() -> None:
    picture = draw_bars("nothing", "ms", [])
    assert elements(picture, "g", "span") == []
    assert picture.height > 0
