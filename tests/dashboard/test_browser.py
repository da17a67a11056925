"""The page in the Chromium of this machine, driven by Playwright; none is fetched."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jgraph.clock import WallClock
from jgraph.dashboard.journaled_board import JournaledBoard
from jgraph.dashboard.report import report
from jgraph.dashboard.sources import ReplaySource
from tests.support import board_facts
from tests.support.board_facts import PS, START, WORKERS, status
from tests.support.chromium import CHROMIUM, needs_chromium
from tests.support.dashboards import EVIL, Imagined, scene, serving

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs jgraph[browser]", exc_type=ImportError
)
pytestmark = [pytest.mark.slow, pytest.mark.procs, needs_chromium]
TITLES = (
    *("Overview", "Training", "Workers", "Tasks", "Traffic", "Parameters"),
    *("Timeline", "Checkpoints and events", "Members", "Serving"),
    *("Rounds", "About"),
)
REBOUND = "rebound.example"
"""A name that its owner has let be the address of this machine."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-dev-shm-usage",
                f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1",
            ],
        )
        yield launched
        launched.close()


class Seen:
    """What a page asked for, and complained of."""

    def __init__(self, page: Any) -> None:
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda said: self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda asked: self.hosts.add(asked.url.split("/")[2]))


def key_of(page: Any, number: int) -> None:
    """Chooses a page: by its key, and those after the tenth by their tab."""
    if number <= 10:
        page.keyboard.press(str(number % 10))
    else:
        page.locator("#tabs button").nth(number - 1).press("Enter")


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[tuple[Any, Seen]]:
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(15_000)
    seen = Seen(page)
    page.goto(url)
    try:
        yield page, seen
    finally:
        context.close()


def expect(thing: Any) -> Any:
    return playwright.expect(thing)


def fresh() -> Imagined:
    """A cluster that was seen until this moment."""
    return Imagined(scene(WallClock().now() - START - 118))


@pytest.mark.combined
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_is_shown_by_its_key_and_nothing_complains(
    browser: Any, scheme: str, width: int
) -> None:
    look = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
    with (
        serving(fresh()) as server,
        opened(browser, server.url, **look) as (page, seen),
    ):
        expect(page.locator("#sentence")).to_contain_text("run 'mlp' is at step 4,860")
        for number, title in enumerate(TITLES, 1):
            key_of(page, number)
            tab = page.locator("#tabs button[aria-current=page]")
            expect(tab).to_have_text(title)
            expect(page.locator("main section").first).to_be_visible()
        page.keyboard.press("1")
        expect(page.locator(".alarm")).to_contain_text(
            "/job:worker/task:2 takes 2.5 times as long for a step as the median"
        )
        expect(page.locator("canvas").first).to_be_visible()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width
        assert seen.complaints == []
        assert seen.hosts == {f"127.0.0.1:{server.port}"}


def test_all_is_reached_by_the_keyboard_alone_and_shows_where_it_is(
    browser: Any,
) -> None:
    where = """() => {
        const at = document.activeElement, style = getComputedStyle(at);
        return [at.id || at.textContent, style.outlineStyle, style.outlineWidth];
    }"""

    def next_place(page: Any) -> str:
        page.keyboard.press("Tab")
        name, style, width = page.evaluate(where)
        assert style != "none", f"nobody sees that {name} is chosen"
        assert width != "0px"
        return str(name)

    with serving(fresh()) as server, opened(browser, server.url) as (page, seen):
        expect(page.locator("#sentence")).to_contain_text("mlp")
        places = [next_place(page)]
        while len(places) < 40 and places[-1] != TITLES[-1]:
            places.append(next_place(page))
        assert [place for place in places if place in TITLES] == list(TITLES)
        for _ in TITLES[TITLES.index("Tasks") + 1 :]:
            page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        lines = page.locator("#log-lines")
        expect(lines).to_contain_text("two")
        places = [next_place(page)]
        while len(places) < 60 and places[-1] != "filter":
            places.append(next_place(page))
        page.keyboard.type("three 1")  # a number is no page where one writes
        expect(lines).not_to_contain_text("two")
        expect(page.locator("#filter")).to_have_value("three 1")
        assert seen.complaints == []


def test_a_change_is_seen_at_once_and_an_alarm_comes_and_goes(browser: Any) -> None:
    source = fresh()
    with serving(source) as server, opened(browser, server.url) as (page, _):
        expect(page.locator("#sentence")).to_contain_text("4 of 4 tasks answer")
        now = WallClock().now() - START
        told = {name: {"state": "ready", "incarnation": "01"} for name in WORKERS[:3]}
        for second in range(2):
            source.board.take(status(now + second, told, WORKERS[0]))
        alarm = page.locator(".alarm.critical")
        expect(alarm).to_contain_text(
            f"{WORKERS[0]} does not answer, and a run goes on"
        )
        source.board.take(status(now + 3, told))
        expect(alarm).to_have_count(0)


def test_the_token_leaves_the_address_and_stays_in_its_tab(browser: Any) -> None:
    with serving(fresh()) as server:
        token = server.url.partition("token=")[2]
        with opened(browser, server.url) as (page, _):
            expect(page.locator("#sentence")).to_contain_text("mlp")
            assert token not in page.url
            page.reload()
            expect(page.locator("#sentence")).to_contain_text("mlp")
            assert page.context.cookies() == []
            other = page.context.new_page()
            other.goto(server.url.partition("#")[0])
            expect(other.locator("#sentence")).to_contain_text("JG-114 the token of")


def test_texts_of_others_are_texts(browser: Any) -> None:
    source = Imagined(scene(WallClock().now() - START - 118, evil=True))
    with serving(source) as server, opened(browser, server.url) as (page, seen):
        expect(page.locator("#sentence")).to_contain_text("mlp")
        for number in range(1, len(TITLES) + 1):
            key_of(page, number)
            expect(page.locator("main section").first).to_be_visible()
        page.keyboard.press("8")
        expect(page.locator("main")).to_contain_text(EVIL[:20])
        assert page.locator("main img").count() == 0
        page.keyboard.press("4")
        expect(page.locator("#log-lines")).to_contain_text("two <img src=x")
        assert [said for said in seen.complaints if "502" not in said] == []


def canvases(page: Any) -> int:
    """How many the browser holds, on the page or not, when garbage is gone."""
    ask = page.context.new_cdp_session(page).send
    kind = ask("Runtime.evaluate", {"expression": "HTMLCanvasElement.prototype"})
    of = {"prototypeObjectId": kind["result"]["objectId"]}
    held = ask("Runtime.queryObjects", of)["objects"]["objectId"]
    count = {
        "objectId": held,
        "functionDeclaration": "function() { return this.length }",
    }
    told = ask("Runtime.callFunctionOn", count | {"returnByValue": True})
    return int(told["result"]["value"])


def test_charts_that_are_drawn_anew_are_forgotten(browser: Any) -> None:
    with serving(fresh()) as server, opened(browser, server.url) as (page, _):
        for title, key in (("Training", "2"), ("Overview", "1")) * 4:
            page.keyboard.press(key)
            tab = page.locator("#tabs button[aria-current=page]")
            expect(tab).to_have_text(title)
            expect(page.locator("main canvas").first).to_be_visible()
        assert canvases(page) <= 6, "two are shown, and two more may be being drawn"


def test_what_is_scrolled_stays_there_while_the_page_changes(browser: Any) -> None:
    source, narrow = fresh(), {"viewport": {"width": 390, "height": 700}}
    with serving(source) as server, opened(browser, server.url, **narrow) as (page, _):
        page.keyboard.press("4")
        expect(page.locator("#log-lines")).to_contain_text("three")
        places = """() => ["main section", "#log-lines"].map((name) => {
            const box = document.querySelector(name);
            return [box.scrollLeft, box.scrollTop];
        })"""
        page.evaluate(
            """() => {
            document.querySelector("main section").scrollLeft = 120;
            document.querySelector("#log-lines").scrollTop = 40;
        }"""
        )
        told = {n: {"state": "leaving", "incarnation": "01"} for n in (PS, *WORKERS)}
        source.board.take(status(WallClock().now() - START, told))
        expect(page.locator("main section").first).to_contain_text("leaving")
        assert page.evaluate(places) == [[120, 0], [0, 40]]
        page.locator("#log-lines").evaluate("(box) => { box.scrollTop = 1e6; }")
        (_, end) = page.evaluate(places)[1]
        source.lines.append("four")
        told[PS]["state"] = "ready"
        source.board.take(status(WallClock().now() - START + 1, told))
        expect(page.locator("#log-lines")).to_contain_text("four")
        assert page.evaluate(places)[1][1] > end, "who reads the newest lines sees more"


def test_a_page_on_a_machine_with_another_clock_knows_what_is_live(
    browser: Any,
) -> None:
    source = Imagined(scene(WallClock().now() - START - 178))
    with serving(source) as server, opened(browser, "about:blank") as (page, _):
        page.add_init_script("const now = Date.now; Date.now = () => now() - 3600_000;")
        page.goto(server.url)
        expect(page.locator("#age")).to_have_text(re.compile("seen 6[0-9] s ago"))
        source.board.take(status(WallClock().now() - START))
        expect(page.locator("#age")).to_have_text("live")


def test_a_time_of_another_day_has_its_day(browser: Any) -> None:
    with serving(fresh()) as server, opened(browser, server.url) as (page, _):
        told = page.evaluate(
            """async () => {
                const { clock } = await import("/page/dom.js");
                return [clock(Date.now() / 1000), clock(40 * 86400), clock(null)];
            }"""
        )
        assert "/" not in told[0]
        assert "1970" in told[1]
        assert len(told[2]) == 1


def test_tasks_come_in_the_order_of_their_numbers(browser: Any) -> None:
    names = [PS, *(f"/job:worker/task:{index}" for index in range(12))]
    told = {name: {"state": "ready", "incarnation": "01"} for name in names}
    source = Imagined([status(WallClock().now() - START, told)])
    short = [name.replace("/job:", "").replace("/task:", ":") for name in names]
    with serving(source) as server, opened(browser, server.url) as (page, _):
        page.keyboard.press("4")
        cells = page.locator("main table").first.locator("tbody td:first-child")
        expect(cells).to_have_text(short)
        expect(page.locator("#task option")).to_have_text(short)


def test_lines_of_a_log_are_filtered(browser: Any) -> None:
    with serving(fresh()) as server, opened(browser, server.url) as (page, _):
        page.keyboard.press("4")
        lines = page.locator("#log-lines")
        expect(lines).to_contain_text("three")
        expect(lines).to_contain_text("two")
        page.locator("#filter").fill("three")
        expect(lines).not_to_contain_text("two")
        expect(lines).to_contain_text("three")


def test_another_origin_cannot_read_it_and_may_not_frame_it(browser: Any) -> None:
    with serving(fresh()) as server, serving(fresh()) as other:
        token = server.url.partition("token=")[2]
        with opened(browser, other.url) as (page, seen):
            expect(page.locator("#sentence")).to_contain_text("mlp")
            reply = page.evaluate(
                """([url, token]) => fetch(url, {headers: {Authorization: token}})
                .then(() => "read", () => "blocked")""",
                [f"http://127.0.0.1:{server.port}/api/v1/state", f"Bearer {token}"],
            )
            assert reply == "blocked"
            assert any("Content Security Policy" in said for said in seen.complaints)


@contextmanager
def notebook(
    frames: list[str], referrers: list[str | None] | None = None
) -> Iterator[str]:
    """The origin of a page with these frames, which may come later.

    ``referrers`` gets what requests say of where they come from.
    """

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the base class's name
            if referrers is not None and self.path == "/":
                referrers.append(self.headers.get("Referer"))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write("".join(frames).encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_page_of_a_stranger_reads_nothing_even_with_the_token(browser: Any) -> None:
    ask = """([url, options]) => fetch(url, options)
        .then((reply) => `${reply.type} ${reply.status}`, () => "blocked")"""
    with notebook([]) as origin, serving(fresh()) as server:
        token = server.url.partition("token=")[2]
        state = f"http://127.0.0.1:{server.port}/api/v1/state"
        shown = {"headers": {"Authorization": f"Bearer {token}"}}
        json = {"method": "POST", "body": "{}"}
        # Of another port of the same host, and of another name of it.
        for stranger in (origin, origin.replace("127.0.0.1", "localhost")):
            with opened(browser, stranger) as (page, _):
                for options in ({}, shown, json, {"credentials": "include"}):
                    assert page.evaluate(ask, [state, options]) == "blocked"
                # It may be sent, but nothing of the answer is told.
                silent = {"mode": "no-cors"}
                for options in (silent, silent | json):
                    told = page.evaluate(ask, [state, options])
                    assert told in {"opaque 0", "blocked"}


def test_a_name_that_was_rebound_to_this_machine_shows_nothing(browser: Any) -> None:
    with serving(fresh()) as server:
        token = server.url.partition("token=")[2]
        with opened(browser, f"http://{REBOUND}:{server.port}/") as (page, _):
            expect(page.locator("body")).to_contain_text("not reached under that host")
            # What is there now has the origin of what it asks.
            told = page.evaluate(
                """(token) => fetch("/api/v1/state", {headers: {Authorization: token}})
                .then((reply) => reply.status)""",
                f"Bearer {token}",
            )
            assert told == 421


def test_whoever_is_gone_to_from_the_page_does_not_hear_of_it(browser: Any) -> None:
    referrers: list[str | None] = []
    with notebook([], referrers) as origin, serving(fresh()) as server:
        with opened(browser, server.url) as (page, _):
            expect(page.locator("#sentence")).to_contain_text("mlp")
            page.evaluate("(url) => { location.href = url; }", origin)
            page.wait_for_url(f"{origin}/")
        assert referrers == [None]


def test_a_frame_is_shown_where_it_was_asked_for_and_nowhere_else(
    browser: Any,
) -> None:
    frames: list[str] = []
    with (
        notebook(frames) as origin,
        serving(fresh(), embed_origins=[origin]) as asked_for,
        serving(fresh()) as not_asked_for,
    ):
        frames += [
            f'<iframe id="{name}" src="{server.url}" width="900"></iframe>'
            for name, server in (("shown", asked_for), ("hidden", not_asked_for))
        ]
        with opened(browser, origin) as (page, _):
            sentence = page.frame_locator("#shown").locator("#sentence")
            expect(sentence).to_contain_text("run 'mlp' is at step")
            assert page.frame_locator("#hidden").locator("#sentence").count() == 0


def test_the_rounds_of_clients_are_listed_with_who_was_dropped(browser: Any) -> None:
    source = fresh()
    now = source.board.view()["time"] - START
    dropped = {WORKERS[2]: "late"}
    over = [
        {"number": n, "members": WORKERS[:2], "dropped": dropped, "wait_s": 0.5}
        for n in (6, 7)
    ]
    source.board.take(board_facts.report(now, task=PS, steps=2, rounds=over))
    with serving(source) as server, opened(browser, server.url) as (page, seen):
        key_of(page, 1 + TITLES.index("Rounds"))
        line = page.locator("table").first.locator("tbody tr").first
        expect(line).to_contain_text("worker:0, worker:1")
        expect(line).to_contain_text("worker:2 late")
        expect(line.locator("td").first).to_have_text("7")
        clients = page.locator("table").nth(1).locator("tbody tr")
        expect(clients).to_have_count(3)
        assert seen.complaints == []


def test_the_last_steps_are_drawn_with_what_they_waited_for(browser: Any) -> None:
    with serving(fresh()) as server, opened(browser, server.url) as (page, seen):
        page.keyboard.press("7")
        main = page.locator("main")
        expect(main).to_contain_text("ms (mean of 20)")
        expect(main).to_contain_text("worker:0 computes 'gradient'")
        picture = page.locator("main svg[role=img]")
        expect(picture.locator("line")).to_have_count(6)  # two messages a step
        assert picture.locator("rect").count() >= 12
        with page.expect_download() as download:
            page.locator("#save").click()
        assert download.value.suggested_filename == "cluster.pftrace"
        expect(main).to_contain_text("open it in ui.perfetto.dev")
        assert seen.complaints == []


def test_a_report_is_one_file_that_needs_no_server(
    browser: Any, tmp_path: Path
) -> None:
    path, file = tmp_path / "board.jsonl", tmp_path / "report.html"
    board = JournaledBoard(WallClock(), path)
    for fact in scene(evil=True):
        board.take(fact)
    board.close()
    file.write_text(report(ReplaySource(path)), encoding="utf-8")
    with opened(browser, file.as_uri()) as (page, seen):
        expect(page.locator("#sentence")).to_contain_text("is at step 4,860")
        for number, title in enumerate(TITLES, 1):
            key_of(page, number)
            tab = page.locator("#tabs button[aria-current=page]")
            expect(tab).to_have_text(title)
            expect(page.locator("main section").first).to_be_visible()
        page.keyboard.press("2")
        expect(page.locator("canvas").first).to_be_visible()
        page.keyboard.press("8")
        expect(page.locator("main")).to_contain_text(EVIL[:20])
        assert page.locator("main img").count() == 0
        assert seen.complaints == []
        assert seen.hosts <= {""}


def test_a_journal_is_shown_with_a_slider(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    board = JournaledBoard(WallClock(), path)
    for fact in scene():
        board.take(fact)
    board.close()
    with (
        serving(ReplaySource(path)) as server,
        opened(browser, server.url) as (page, seen),
    ):
        sentence = page.locator("#sentence")
        expect(sentence).to_contain_text("is at step 4,860")
        slider = page.locator("#at")
        slider.focus()
        page.keyboard.press("Home")
        slider.evaluate(
            "(at) => { at.value = Number(at.min) + 60.5; "
            "at.dispatchEvent(new Event('input')); }"
        )
        expect(sentence).to_contain_text("is at step 2,511")
        assert seen.complaints == []
