"""What is said while something takes long."""

import threading

import pytest

from jgraph.cluster import wait_message
from jgraph.cluster.wait_message import WaitMessage, hide_wait, show_wait


def wait_for(text: str, said: list[str], heard: threading.Event) -> None:
    assert heard.wait(20), f"nobody said {text}"
    assert said[0].startswith(text)


def test_what_takes_long_is_said_with_its_seconds_and_taken_away() -> None:
    said: list[str] = []
    heard = threading.Event()

    def show(text: str) -> None:
        said.append(text)
        heard.set()

    with show_wait("starting 2 tasks", show):
        wait_for("starting 2 tasks … 1 s", said, heard)
    assert said[-1] == ""


def test_what_is_quick_is_not_said() -> None:
    said: list[str] = []
    with show_wait("nothing", said.append):
        pass
    assert said == []


def test_what_is_inside_of_something_said_is_not_said_besides() -> None:
    outer: list[str] = []
    inner: list[str] = []
    heard = threading.Event()

    def show(text: str) -> None:
        outer.append(text)
        heard.set()

    with show_wait("outer", show), show_wait("inner", inner.append):
        assert heard.wait(20)
    assert inner == []


def test_where_nothing_is_wanted_nobody_waits_to_say_it() -> None:
    with hide_wait(), show_wait("silent", print):
        assert "jgraph-wait-message" not in {t.name for t in threading.enumerate()}


def test_where_nothing_can_be_redrawn_lines_come_and_stay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = threading.Event()
    written = wait_message._line

    def hearing(text: str) -> None:
        written(text)
        heard.set()

    monkeypatch.setattr(wait_message, "_line", hearing)
    monkeypatch.setattr(wait_message, "_LINE_QUIET_S", 0.01)
    with show_wait("starting 2 tasks"):
        assert heard.wait(20)
    assert capsys.readouterr().err.splitlines()[0] == "starting 2 tasks … 0 s"


def test_lines_become_fewer_in_a_long_wait() -> None:
    telling = WaitMessage("nothing", print, lines=True)
    telling.end()
    assert telling._pause_s(0.0, is_shown=False) == 2.0
    assert telling._pause_s(2.0, is_shown=True) == 5.0
    assert telling._pause_s(60.0, is_shown=True) == 30.0


def test_what_is_told_is_of_now() -> None:
    said: list[str] = []
    heard = threading.Event()
    why = ["refused"]

    def show(text: str) -> None:
        said.append(text)
        why[0] = "no answer"
        if len(said) == 2:
            heard.set()

    with show_wait(lambda: why[0], show):
        assert heard.wait(20)
    assert [text.partition(" …")[0] for text in said[:2]] == ["refused", "no answer"]
