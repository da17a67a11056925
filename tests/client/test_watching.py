"""Alarms of a cluster from Python, by two looks at real servers."""

import pytest

from jgraph.client.cluster import connect
from jgraph.client.inspect import inspecting
from jgraph.client.watching import status_fact
from jgraph.coordination.watch.board import Board
from jgraph.errors import ConfigError
from jgraph.server.server import Server


def test_a_healthy_cluster_has_no_alarm_and_odd_times_are_refused() -> None:
    spec = {"worker": ["localhost:0"]}
    server = Server(spec)
    with connect(server.target) as cluster:
        assert cluster.alarms(0.05) == []
        for odd in (0, -1, 1e9, float("nan")):
            with pytest.raises(ConfigError, match="looks twice"):
                cluster.alarms(odd)
    server.stop()


def test_what_servers_tell_makes_a_board() -> None:
    server = Server({"worker": ["localhost:0"]})
    board = Board()
    with inspecting(server.target) as visit:
        for second in range(3):
            board.take(status_fact(visit.status(), 1000.0 + second))
    server.stop()
    view = board.view()
    (task,) = view["tasks"].values()
    assert task["state"] == "ready"
    assert task["cores"]["process"] >= 0
    calls = {row["method"]: row for row in view["calls"].values()}
    # The master's own question to its task is counted where it is answered.
    assert calls["TaskStatus"]["per_s"] == 1.0
    assert calls["Master.Status"]["errors"] == 0
