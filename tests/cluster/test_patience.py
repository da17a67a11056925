"""What is said while something takes long."""

import threading

from jgraph.cluster.patience import saying, unsaid


def wait_for(text: str, said: list[str], heard: threading.Event) -> None:
    assert heard.wait(20), f"nobody said {text}"
    assert said[0].startswith(text)


def test_what_takes_long_is_said_with_its_seconds_and_taken_away() -> None:
    said: list[str] = []
    heard = threading.Event()

    def show(text: str) -> None:
        said.append(text)
        heard.set()

    with saying("starting 2 tasks", show):
        wait_for("starting 2 tasks … 1 s", said, heard)
    assert said[-1] == ""


def test_what_is_quick_is_not_said() -> None:
    said: list[str] = []
    with saying("nothing", said.append):
        pass
    assert said == []


def test_what_is_inside_of_something_said_is_not_said_besides() -> None:
    outer: list[str] = []
    inner: list[str] = []
    heard = threading.Event()

    def show(text: str) -> None:
        outer.append(text)
        heard.set()

    with saying("outer", show), saying("inner", inner.append):
        assert heard.wait(20)
    assert inner == []


def test_where_nothing_is_wanted_nobody_waits_to_say_it() -> None:
    with unsaid(), saying("silent", print):
        assert "jgraph-patience" not in {t.name for t in threading.enumerate()}
