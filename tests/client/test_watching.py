"""Alarms of a cluster from Python, by two looks at real servers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from jgraph.client.cluster import connect
from jgraph.client.inspect import inspecting
from jgraph.client.runs.runs import info_of
from jgraph.client.watching import report_fact, status_fact
from jgraph.coordination.step.step_metrics import CONTRIBUTIONS, LOCAL_STEPS, WHOLE
from jgraph.coordination.watch.board import Board
from jgraph.coordination.watch.facts import Fact
from jgraph.errors import ConfigError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
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


def told(synchronous: bool, metrics: Mapping[str, Sequence[Any]]) -> Fact | None:
    """Returns what a board is told of two steps with these metrics."""
    info = {"first_step": 0, "steps": 9, "batch_size": 1, "metrics": [*metrics]}
    of_run = {"container": "c", "synchronous": synchronous, "checkpoints": ""}
    run = info_of(pb.RunRow(run="mlp", task="a", info=json.dumps(info | of_run)))
    body = pb.LoopReport(task="/job:worker/task:0")
    fetches = [np.asarray(values, np.float32) for values in metrics.values()]
    steps, seconds = np.arange(2), np.array([1.0, 2.5])
    message = frame(loop_report=body, tensors=[steps, seconds, *fetches])
    return report_fact(run, {}, message, now=5.0)


def test_a_metric_of_whole_numbers_is_told_as_the_numbers_that_it_has() -> None:
    pieces = [[904, 2, 0], [1, 0, 0]]
    fact = told(True, {WHOLE + "count": pieces, CONTRIBUTIONS: [1, 1]})
    assert fact is not None
    assert fact["metrics"]["count"] == {"min": 1, "mean": 2500.5, "max": 5000}


def test_steps_of_clients_that_wait_for_nobody_are_told_as_rounds() -> None:
    fact = told(False, {"loss": [0.5, 0.25], LOCAL_STEPS: [4, 0]})
    assert fact is not None
    assert fact["own_rounds"] == [
        {"seconds": 1.0, "finite": True},
        {"seconds": 2.5, "finite": False},
    ]
    together = told(True, {"loss": [0.5, 0.25], LOCAL_STEPS: [4, 0]})
    assert together is not None
    assert together["own_rounds"] == []
