"""A dashboard of a real cluster that trains, in a process of its own."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import optax
import psutil
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.inspect import ClusterInspector, inspecting
from jgraph.client.runs.runs import RunInfo
from jgraph.clock import SystemClock, WallClock
from jgraph.cluster.polling import Polling
from jgraph.coordination.watch.facts import Fact
from jgraph.dashboard.journaled_board import ReplayedBoard
from jgraph.dashboard.poll import Poller
from jgraph.errors import ConfigError, JGError, TaskLostError
from jgraph.rpc.transport import Frame
from tests.support.servers import connected

pytestmark = [pytest.mark.slow, pytest.mark.procs]


def state_at(url: str, path: str = "api/v1/state") -> Any:
    base, _, token = url.partition("#token=")
    asked = urllib.request.Request(base + path)
    asked.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(asked, timeout=10) as reply:
        return json.loads(reply.read())


def wait_for(what: str, is_so: Any) -> Any:
    polling = Polling(0.1, 30.0, SystemClock())
    while not (found := is_so()):
        assert polling.wait(), f"{what} did not come"
    return found


def loss(model: Any, batch: Any) -> Any:
    return optax.l2_loss(model(batch["x"])[:, 0], batch["y"]).mean()


def test_a_run_is_seen_live_and_again_when_all_is_over(tmp_path: Path) -> None:
    journal = tmp_path / "board.jsonl"
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(256, 4)).astype(np.float32)}
    data["y"] = data["x"].sum(1)
    with jg.LocalCluster(ps=1, workers=2) as cluster:
        board = cluster.dashboard(journal=journal)
        (process,) = [
            child
            for child in psutil.Process().children()
            if "dashboard" in child.cmdline()
        ]
        assert "#token" not in " ".join(process.cmdline())
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        with jg.Trainer(model, loss, optax.sgd(0.01), cluster=cluster) as trainer:
            run = trainer.fit(data, steps=100, batch_size=16)
            run.wait()
            steps = run.steps
            wait_for("variables", lambda: state_at(board.url)["shards"])

        def told() -> Any:
            runs = state_at(board.url)["runs"]
            found: Any = next(iter(runs.values()), {"metrics": {}})
            return found if found.get("step") == steps and found["metrics"] else None

        found = wait_for("the run", told)
        assert found["state"] == "done"
        assert set(found["workers"]) <= set(cluster.tasks("worker"))
        curves = state_at(board.url, "api/v1/curves")
        (of_run,) = curves["runs"].values()
        assert of_run["metrics"]["loss"]["x"][-1] == steps
        of_loss = of_run["metrics"]["loss"]
        assert min(of_loss["min"]) < of_loss["max"][0]
        state = state_at(board.url)
        assert set(state["tasks"]) == set(cluster.tasks())
        assert state["traffic"]
        kinds = {event["kind"] for event in state["events"]}
        assert "began" in kinds
        log = state_at(board.url, "api/v1/tasks/ps/0/log")
        assert isinstance(log["lines"], list)
        cluster.kill("/job:worker/task:1")
        wait_for(
            "the alarm",
            lambda: [
                alarm
                for alarm in state_at(board.url)["alarms"]
                if alarm["id"] == "lost:/job:worker/task:1"
            ],
        )
        last = state_at(board.url)
        assert process.memory_info().rss < 150e6
    assert not process.is_running()
    replay = ReplayedBoard(journal)
    assert replay.skipped == 0
    assert replay.at(last["time"]).view()["runs"] == last["runs"]
    assert "lost:/job:worker/task:1" in {a.id for a in replay.at().alarms()}
    assert repr(board) == "<Dashboard closed>"


@pytest.mark.nightly
def test_the_rounds_of_clients_are_seen_live(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(3):
        x = rng.normal(size=(16, 4)).astype(np.float32)
        np.savez(tmp_path / f"{number}.npz", x=x, y=x.sum(1))
    source = jg.Source.npz(str(tmp_path / "{task}.npz"))
    with jg.LocalCluster(ps=1, workers=3) as cluster:
        board = cluster.dashboard()
        model, tx = nnx.Linear(4, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1)
        strategy = jg.Federated()
        with jg.Trainer(model, loss, tx, cluster=cluster, strategy=strategy) as trainer:
            run = trainer.fit(source, steps=5, batch_size=4, progress=False)
            assert len(run.rounds()) == 5

            def told() -> Any:
                (found,) = state_at(board.url)["runs"].values() or [{}]
                return found if len(found.get("rounds", ())) == 5 else None

            seen = wait_for("the rounds", told)
        assert [*seen["rounds"]] == ["1", "2", "3", "4", "5"]
        for number, one in enumerate(run.rounds(), 1):
            assert seen["rounds"][str(number)]["who"] == list(one.members)
        took = {task: {"members": 5} for task in cluster.tasks("worker")}
        assert seen["clients"] == took


class Cut:
    """Asks a cluster; the connection on which it follows a run is lost once.

    Args:
      visit: asks it.
    """

    def __init__(self, visit: ClusterInspector) -> None:
        self._visit = visit
        self._is_cut = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._visit, name)

    def reports(self, run: RunInfo, address: str) -> Iterator[Frame]:
        for message in self._visit.reports(run, address):
            yield message
            if not self._is_cut:
                self._is_cut = True
                raise TaskLostError(f"{run.master} is lost", task=run.master)


def test_a_run_is_followed_again_after_its_connection_was_lost() -> None:
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(256, 4)).astype(np.float32)}
    data["y"] = data["x"].sum(1)
    facts: list[Fact] = []
    with (
        connected(ps=1, worker=1) as cluster,
        inspecting(cluster.target) as visit,
    ):
        poller = Poller(cast(Any, Cut(visit)), facts.append, WallClock(), 0.1)
        poller.start()
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        with jg.Trainer(model, loss, optax.sgd(0.01), cluster=cluster) as trainer:
            run = trainer.fit(data, steps=10**6, batch_size=16, block=False)

            def told_anew() -> bool:
                kinds = [bool(f.get("anew")) for f in facts if f["kind"] == "report"]
                return True in kinds and kinds[-1] is False

            wait_for("the reports of the run, again,", told_anew)
            run.stop()
        poller.stop()


def test_why_a_dashboard_did_not_start_is_said(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine\n")
    server = jg.Server({"worker": ["localhost:0"]})
    with jg.connect(server.target) as cluster:
        with pytest.raises(JGError, match="is not a journal"):
            cluster.dashboard(journal=other)
        with pytest.raises(ConfigError, match="is no origin"):
            cluster.dashboard(embed_origins=["*"])
    server.stop()
    assert other.read_text() == "mine\n"
    shutil.rmtree(tmp_path)
