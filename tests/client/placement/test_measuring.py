"""Measuring a running cluster."""

import json

import pytest
from typer.testing import CliRunner

from jgraph.cli import app
from jgraph.client.placement.measuring import measure
from jgraph.errors import DeadlineError
from jgraph.plan.auto.cost_model import CostModel
from tests.support.servers import connected


def test_every_task_and_every_link_is_measured_and_printed() -> None:
    with connected(worker=2) as cluster:
        done = CliRunner().invoke(app, ["doctor", cluster.target, "--links", "--json"])
        assert done.exit_code == 0, done.output
        model = CostModel.from_dict(json.loads(done.output))
        tasks = cluster.tasks()
        model.check(tasks)
        assert list(model.tasks) == tasks
        assert len(model.links) == len(tasks) * (len(tasks) - 1)
        assert all(1e-6 < link.latency_s < 1 for link in model.links.values())
        assert all(1e6 < link.bytes_per_s < 1e13 for link in model.links.values())
        first, second = model.tasks.values()
        assert 1e8 < first.flops_per_s < 1e13
        # Of one kind, on one host.
        assert first == second
        assert list(model.crowding) == ["127.0.0.1"]
        assert model.call.latency_s >= 0
        # Nothing of it stays.
        assert all(not task["programs"] for task in cluster.status().to_dict()["tasks"])


def test_a_measurement_that_takes_too_long_says_what_it_was_at() -> None:
    now = iter(range(10_000))

    class Hours:
        """A clock on which everything takes an hour."""

        def now(self) -> float:
            return 3600.0 * next(now)

    told = pytest.raises(DeadlineError, match="/job:worker/task:0")
    with connected(worker=1) as cluster, told:
        measure(cluster, clock=Hours())
