"""What became of a cluster, told by its tasks and by the logs of its processes."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from jgraph.client.cluster import connect
from jgraph.cluster.events import (
    Event,
    EventLog,
    LogFiles,
    from_json,
    in_order,
    lone_loop,
)
from jgraph.cluster.log_tail import FORMAT
from jgraph.errors import GraphError, JGError, TaskLostError, VersionError
from jgraph.server.server import Server

PS, WORKER = "/job:ps/task:0", "/job:worker/task:1"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """Logs of a ps and of what started it."""
    path = tmp_path / "ps-0.log"
    handler, logger = logging.FileHandler(path), logging.getLogger("jgraph.events")
    handler.setFormatter(logging.Formatter(FORMAT))
    logger.addHandler(handler)
    yield path
    logger.removeHandler(handler)
    handler.close()


@pytest.fixture
def events() -> EventLog:
    """What a master notes."""
    return EventLog(WORKER)


def noted(events: EventLog) -> list[tuple[str, str]]:
    return [(event.kind, event.text) for event in events.newest()]


def test_the_log_of_a_task_tells_what_it_noted(log: Path, tmp_path: Path) -> None:
    files = LogFiles(tmp_path)
    assert files.new() == []
    events, text = EventLog(PS), f"{WORKER} ended its connection;\nwhat"
    events.note("lost", text, level=logging.WARNING)
    (found,), (kept,) = files.new(), events.newest()
    assert (found.kind, found.text) == (
        "lost",
        f"{WORKER} ended its connection; what",
    )
    assert (found.by, found.subject) == (PS, WORKER)
    assert abs(found.time_s - kept.time_s) < 1
    assert files.new() == []


@pytest.mark.parametrize("line", ['{"kind": "joined", "colour": 3}', "[1]", "{"])
def test_an_event_of_another_version_is_named_in_a_sentence(line: str) -> None:
    with pytest.raises(VersionError, match=r"cannot read.*install the version"):
        from_json(line)


def test_a_line_that_is_being_written_is_told_when_it_is_whole(tmp_path: Path) -> None:
    files, path = LogFiles(tmp_path), tmp_path / "daemon.log"
    line = f"2026-11-22 01:02:03,004 WARNING jgraph.events: [died] {WORKER} died\n"
    path.write_text(line[:40])
    assert files.new() == []
    path.write_text(line)
    (event,) = files.new()
    assert (event.by, event.kind, event.subject) == ("launcher", "died", WORKER)
    path.write_text(line + "2026-11-22 01:02:04,004 INFO jgraph.server: [x] else\n")
    assert files.new() == []


def test_a_task_lost_over_several_connections_is_noted_once(events: EventLog) -> None:
    events.note("lost", f"{PS} ended its connection")
    events.note("lost", f"lost the connection to {PS} at 127.0.0.1:1")
    events.note("lost", "/job:ps/task:1 ended its connection")
    subjects = [event.subject for event in events.newest()]
    assert subjects == [PS, "/job:ps/task:1"]


def test_a_loss_that_many_see_is_told_once_and_the_next_one_again() -> None:
    times = (1.0, 1.5, 2.0, 60.0)
    losses = [Event(t, "lost", "…", f"/job:ps/task:{t}", WORKER) for t in times]
    joined = [Event(t, "joined", "…", WORKER, WORKER) for t in (0.0, 1.7)]
    found = in_order([*losses, *joined])
    assert [(e.kind, e.time_s) for e in found] == [
        ("joined", 0.0),
        ("lost", 1.0),
        ("joined", 1.7),
        ("lost", 60.0),
    ]


@pytest.mark.parametrize("failure", [GraphError("no such node"), TaskLostError("gone")])
def test_a_loop_of_no_run_fails_by_whatever_ends_it(
    events: EventLog, failure: JGError
) -> None:
    with lone_loop(events, "a", "10 steps"):
        assert noted(events) == [("began", "run 'a' began: 10 steps")]
    with pytest.raises(type(failure)), lone_loop(events, "b", "10 steps"):
        raise failure
    assert noted(events)[1::2] == [
        ("ended", "run 'a' ended"),
        ("failed", f"run 'b' failed: {failure}"),
    ]


def test_what_a_cluster_has_not_says_what_is_written_instead() -> None:
    server = Server({"worker": ["localhost:0"]})
    with connect(server.target) as cluster:
        with pytest.raises(AttributeError, match=r"write trainer\.attach\(name\)"):
            cluster.attach  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
            cluster.nonsense  # type: ignore[attr-defined]  # noqa: B018
    server.stop()


def test_clusters_of_one_process_tell_each_what_became_of_it() -> None:
    servers = [Server({"worker": ["localhost:0"]}) for _ in range(2)]
    for server in servers:
        with connect(server.target) as cluster:
            (event,) = cluster.events()
        who = "/job:worker/task:0"
        assert (event.kind, event.by, event.subject) == ("joined", who, who)
        assert event.text == f"{who} listens on {server.address}"
        assert event.text in str(event)
    for server in servers:
        server.stop()
