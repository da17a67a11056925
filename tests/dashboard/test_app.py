"""The dashboard's routes, and who is let in, without a port."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from jgraph.clock import WallClock
from jgraph.dashboard.app import App, page_files
from jgraph.dashboard.guard import Guard
from jgraph.dashboard.journaled_board import JournaledBoard
from jgraph.dashboard.merge_patch import patched
from jgraph.dashboard.metrics import exposition
from jgraph.dashboard.patches import Patches
from tests.support.board_facts import PS, START, report, run, status
from tests.support.dashboards import Imagined, scene

TOKEN = "t" * 43
METRICS = "m" * 43
HOST = "127.0.0.1:8472"
GOOD = {"Authorization": f"Bearer {TOKEN}"}


def app_of(source: Imagined) -> App:
    guard = Guard(TOKEN, 8472, ["proxy.example"], (), METRICS)
    return App(source, guard, exposition(lambda: source.view(None)))


def asked(
    path: str,
    headers: dict[str, str] | None = None,
    *,
    method: str = "GET",
    source: Imagined | None = None,
    host: str = HOST,
) -> httpx.Response:
    """The answer to one request."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(source or SCENE).asgi)
        base = f"http://{host}"
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


SCENE = Imagined(scene())


def test_the_page_needs_no_token_and_has_no_script_or_style_of_its_own() -> None:
    answer = asked("/")
    assert answer.status_code == 200
    assert "<style" not in answer.text
    assert "<script>" not in answer.text
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in answer.headers


def test_every_file_of_the_page_is_served_as_what_it_is() -> None:
    kinds = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
    for path, data in page_files().items():
        if path == "/page/index.html":
            continue
        answer = asked(path)
        assert answer.content == data
        kind = kinds.get(path.rpartition(".")[2], "text/plain")
        assert answer.headers["content-type"].startswith(kind)


def test_the_view_and_its_curves_are_json() -> None:
    state = asked("/api/v1/state", GOOD).json()
    assert state == SCENE.view(None)
    assert state["version"] == 1
    curves = asked("/api/v1/curves", GOOD).json()
    assert len(curves["runs"]["mlp"]["metrics"]["loss"]["x"]) > 50
    assert asked("/api/v1/config", GOOD).json()["kind"] == "live"


def test_it_is_ready_once_the_cluster_has_answered() -> None:
    assert asked("/healthz").status_code == 200
    assert asked("/readyz").status_code == 200
    assert asked("/readyz", source=Imagined()).status_code == 503


@pytest.mark.parametrize("path", ["/api/v1/state", "/api/v1/stream", "/metrics"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer " + "x" * 1_000_000},
        {"Cookie": f"token={TOKEN}; jgraph-token={TOKEN}"},
        {"X-Token": TOKEN},
    ],
)
def test_without_the_token_nothing_is_told(path: str, headers: dict[str, str]) -> None:
    for asked_for in (path, f"{path}?token={TOKEN}"):
        answer = asked(asked_for, headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["code"] == "JG-114"
        assert TOKEN not in answer.text


def test_the_token_of_metrics_is_good_for_metrics_alone() -> None:
    scraper = {"Authorization": f"Bearer {METRICS}"}
    assert asked("/metrics", scraper).status_code == 200
    assert asked("/metrics", GOOD).status_code == 200
    assert asked("/api/v1/state", scraper).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8472", 200),
        ("localhost:8472", 200),
        ("LOCALHOST:8472", 200),
        ("[::1]:8472", 200),
        ("proxy.example", 200),
        ("proxy.example:443", 200),
        ("evil.example", 421),
        ("evil.example:8472", 421),
        ("127.0.0.1.evil.example:8472", 421),
        ("127.0.0.1:8473", 421),
        ("127.0.0.1", 421),
        ("user@127.0.0.1:8472", 421),
        ("xproxy.example", 421),
        ("", 421),
    ],
)
def test_only_names_of_its_own_are_answered(host: str, status: int) -> None:
    for path, ok in (("/", 200), ("/api/v1/config", 200), ("/none", 404)):
        answer = asked(path, {**GOOD, "Host": host})
        assert answer.status_code == (ok if status == 200 else status), answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": f"http://{HOST}"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:8473"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": f"ftp://{HOST}"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_pages_of_others_may_ask_nothing(headers: dict[str, str], status: int) -> None:
    answer = asked("/api/v1/state", {**GOOD, **headers})
    assert answer.status_code == status
    assert not [h for h in answer.headers if h.startswith("access-control")]


def test_a_link_from_elsewhere_opens_the_page_and_nothing_else() -> None:
    elsewhere = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert asked("/", elsewhere).status_code == 200
    assert asked("/page/main.js", elsewhere).status_code == 403


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"]
)
def test_it_is_only_looked_at(method: str) -> None:
    answer = asked("/api/v1/state", GOOD, method=method)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert answer.json()["error"].startswith("JG-621 a dashboard is only looked at")


@pytest.mark.parametrize(
    "path",
    [
        *("/page/../../pyproject.toml", "/page/%2e%2e/%2e%2e/x", "//etc/passwd"),
        *("/page/", "/page/index.html", "/api/v1/", "/api/v2/state", "/page/%00"),
        *("/api/v1/tasks/ps/0", "/metrics/x", "/.git/config"),
    ],
)
def test_other_paths_are_not_there(path: str) -> None:
    answer = asked(path, GOOD)
    assert answer.status_code == 404
    assert answer.json()["code"] == "JG-621"


@pytest.mark.parametrize(
    "task", ["ps/99", "../x/0", "ps/-1", "ps/1e3", f"ps/{2**64}", "%2e%2e/0", "ps/0x0"]
)
def test_a_task_is_one_of_the_board_and_never_a_path(task: str) -> None:
    answer = asked(f"/api/v1/tasks/{task}/log", GOOD)
    assert answer.status_code == 404


def test_lines_of_a_log_come_after_a_number_and_are_cut() -> None:
    first = asked("/api/v1/tasks/ps/0/log", GOOD).json()
    assert first["next"] == 3
    assert first["lines"][0] == "one"
    assert first["lines"][1] == "two <img src=x onerror=alert(1)>��[31m"
    assert len(first["lines"][2]) < 10_100
    assert first["lines"][2].endswith(" … (cut)")
    path = "/api/v1/tasks/ps/0/log?after=1&lines=1"
    assert len(asked(path, GOOD).json()["lines"]) == 1
    lost = asked("/api/v1/tasks/worker/0/log", GOOD)
    assert (lost.status_code, lost.json()["code"]) == (502, "JG-132")


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "lines=1e3", "after=" + "9" * 99, "lines=²"]
)
def test_odd_numbers_are_refused(query: str) -> None:
    answer = asked(f"/api/v1/tasks/ps/0/log?{query}", GOOD)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("JG-621 ")


@pytest.mark.parametrize("at", ["nan", "-1", "x", "1e300", "inf", ""])
def test_odd_times_are_refused(at: str) -> None:
    assert asked(f"/api/v1/state?at={at}", GOOD).status_code == 400


def test_what_the_page_is_made_of_sets_texts_only() -> None:
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write")
    for path, data in page_files().items():
        if path.endswith(".js") and "vendor" not in path:
            text = data.decode()
            assert not [
                word for word in (*forbidden, "eval(", "Function(") if word in text
            ]
            assert "://" not in text.replace('"http://www.w3.org/2000/svg"', "")


def test_the_page_is_small() -> None:
    assert sum(map(len, page_files().values())) < 200_000


def test_the_chart_library_is_the_one_that_was_published() -> None:
    files = page_files()
    sums = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f71615",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b1",
    }
    for name, begin in sums.items():
        found = hashlib.sha256(files[f"/page/vendor/{name}"]).hexdigest()
        assert found.startswith(begin)
    assert b"MIT" in files["/page/vendor/LICENSE"]


def test_a_frame_is_shown_only_where_it_was_asked_for() -> None:
    framed = Guard(TOKEN, 8472, (), ["http://localhost:8888"]).headers()
    policy = framed["Content-Security-Policy"]
    assert policy.endswith("frame-ancestors http://localhost:8888")


def test_metrics_are_as_prometheus_reads_them() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = asked("/metrics", GOOD).text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    up = {s.labels["task"]: s.value for s in families["jgraph_task_up"].samples}
    assert up[PS] == 1.0
    (step,) = families["jgraph_run_step"].samples
    assert (step.labels, step.value) == ({"run": "mlp"}, 4860.0)
    seconds = families["jgraph_task_cpu_seconds"].samples
    assert {s.labels["kind"] for s in seconds} == {
        "process",
        "update",
        "copy",
        "compute",
    }
    sent = families["jgraph_transport_sent_bytes"].samples
    assert {s.labels["path"] for s in sent} == {"stream", "shared"}
    (alarm,) = families["jgraph_alarm"].samples
    assert alarm.labels["level"] == "warning"


class Counted(Imagined):
    """Counts how often somebody looks."""

    looks = 0

    def view(self, at: float | None) -> Mapping[str, Any]:
        self.looks += 1
        return super().view(at)


def test_a_change_is_looked_at_once_for_all_who_read() -> None:
    source, facts = Counted(scene()[:50]), scene()[50:]
    patches = Patches(source)
    assert patches.look()
    assert not patches.look()
    first = patches.newest
    for fact in facts:
        source.board.take(fact)
    assert patches.is_old
    assert [patches.after(first) for _ in range(2)] == [(first, "")] * 2
    assert patches.look()
    told = [patches.after(first) for _ in range(3)]
    assert source.looks == 2
    assert len({id(patch) for _, patch in told}) == 1
    view, patch = told[0]
    assert patched(first, json.loads(patch)) == view == source.board.view()
    assert patches.after(view) == (view, "")
    source.board.take({**facts[-1], "time": facts[-1]["time"] + 1})
    assert patches.look()
    assert patches.has(view)
    assert not patches.has(first)
    later, patch = patches.after(first)  # a slow reader has missed a look
    assert patched(first, json.loads(patch)) == later


def test_reports_between_two_looks_are_shown_with_the_next_one() -> None:
    board = JournaledBoard(WallClock())
    board.take(status(0))
    shown = board.changes
    for at in range(1, 10):
        board.take(report(at / 10))
    assert board.changes == shown
    assert board.view()["time"] == START + 0.9, "to whoever asks it has them"
    board.take(run(1, 90))
    board.take(report(2.5))
    assert board.changes == shown + 2, "also where looks are far from each other"


def test_a_timeline_is_told_and_saved_for_perfetto() -> None:
    answer = asked("/api/v1/timeline", GOOD)
    assert answer.json()["path"]["steps"] == 20
    saved = asked("/api/v1/trace?last=5", GOOD)
    assert saved.headers["content-type"] == "application/octet-stream"
    assert len(saved.content) > 1000
    assert asked("/api/v1/trace").status_code == 401
    for bad in ("0", "61", "-1", "1e9", "nan"):
        assert asked(f"/api/v1/trace?last={bad}", GOOD).status_code == 400


def test_one_page_at_a_time_asks_for_a_timeline() -> None:
    entered, free = threading.Event(), threading.Event()

    class Slow(Imagined):
        def timeline(self) -> Mapping[str, Any]:
            entered.set()
            assert free.wait(20)
            return {}

    async def both() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(app_of(Slow(scene())).asgi)
        base = f"http://{HOST}"
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            first = asyncio.create_task(client.get("/api/v1/timeline", headers=GOOD))
            await asyncio.to_thread(entered.wait, 20)
            second = await client.get("/api/v1/timeline", headers=GOOD)
            free.set()
            return await first, second

    first, second = asyncio.run(both())
    assert (first.status_code, second.status_code) == (200, 409)
