"""A report is a page in one file, in which only its own scripts run."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from jgraph import cli
from jgraph.clock import WallClock
from jgraph.dashboard.journaled_board import JournaledBoard
from jgraph.dashboard.report import report
from jgraph.dashboard.sources import ReplaySource
from jgraph.dashboard.timeline_view import timeline_view
from tests.support.cli import run
from tests.support.dashboards import scene
from tests.support.flights import imagined_trace


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "board.jsonl"
    board = JournaledBoard(WallClock(), path)
    for fact in scene(evil=True):
        board.take(fact)
    board.close()
    return path


def digest(text: str) -> str:
    sha = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{sha}'"


def test_it_has_what_the_journal_shows_and_loads_nothing(journal: Path) -> None:
    source = ReplaySource(journal)
    page = report(source)
    (data,) = re.findall(r'<script type="application/json" [^>]*>(.*?)</script>', page)
    answers = json.loads(data)
    assert answers["api/v1/state"] == source.view(None)
    assert answers["api/v1/config"]["kind"] == "report"
    assert not re.findall(r'(?:src|href)="(?!data:,)[^"]*"', page.split("<script")[0])
    assert "<img" not in page, "a text of others begins no element"
    assert not re.search(r"^(?:import|export) ", page, re.M)


def test_only_its_own_scripts_and_styles_run(journal: Path) -> None:
    page = report(ReplaySource(journal))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "unsafe" not in policy
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', page, re.S)
    styles = re.findall(r"<style>(.*?)</style>", page, re.S)
    assert (len(scripts), len(styles)) == (2, 1)
    assert all(digest(text) in policy for text in [*scripts, *styles])


def test_the_command_writes_it_as_of_a_time(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    typed = ("dashboard", "--report", str(journal), "-o", str(path))
    code, out, _ = run(capsys, *typed)
    assert code == cli.OK
    assert str(path) in out
    whole = path.read_text("utf-8")
    assert '"step": 4860' in whole
    code, _, err = run(capsys, *typed[:-1], str(tmp_path / "none" / "report.html"))
    assert code == cli.FAILURE
    assert "--output" in err


def test_a_journal_is_not_written_over_by_its_report(
    journal: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(journal.parent)
    before, name = journal.read_bytes(), journal.name
    for typed, said in (
        (("--report", name, "-o", str(journal)), "the journal itself, which would be"),
        (("--report", name, "--replay", name), "leave out --replay"),
        (("--replay", name, "-o", "x.html"), "name its journal with --report"),
    ):
        code, out, err = run(capsys, "dashboard", *typed)
        assert (code, out) == (cli.USAGE, "")
        assert said in " ".join(err.replace("│", " ").split())
    assert journal.read_bytes() == before
    assert [*journal.parent.glob("*.html")] == []


def test_the_timeline_of_the_page_has_the_last_steps_alone() -> None:
    view = timeline_view(imagined_trace(), 2)
    assert view["path"]["steps"] == 20
    bars = [bar for task in view["tasks"] for row in task["rows"] for bar in row]
    assert sum(bar["name"] == "gradient" for bar in bars) == 2
    assert view["ms"] == pytest.approx(19.0, abs=0.2)
    assert min(bar["at_ms"] for bar in bars) == 0
    sent = {bar["sends"] for bar in bars} - {""}
    assert sent == {bar["receives"] for bar in bars} - {""}
