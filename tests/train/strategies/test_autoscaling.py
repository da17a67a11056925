"""A policy of a run starts workers and lets them go, and says why."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.coordination.run.autoscale import RunSample, Scale
from jgraph.errors import ConfigError
from jgraph.graph.device import TaskName
from jgraph.server import task_facts
from jgraph.server.members.joining import join_cluster
from jgraph.server.server import Server
from jgraph.train.strategies import autoscaling
from tests.support.servers import Servers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Here(Cluster):
    """Starts its workers in this process."""

    joined: list[Server]

    @property
    def starts_workers(self) -> bool:
        return True

    def _start_tasks(self, job: str, count: int) -> None:
        self.joined += [join_cluster(self.target, job) for _ in range(count)]

    def leave(self, task: TaskName) -> None:
        super().leave(task)
        (leaver,) = [one for one in self.joined if one.task == task]
        self.joined.remove(leaver)
        leaver.stop()


@pytest.fixture
def cluster() -> Iterator[Here]:
    servers = Servers(ps=1, worker=1)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        cluster.__class__ = Here
        assert isinstance(cluster, Here)
        cluster.joined = []
        yield cluster
        for server in cluster.joined:
            server.stop(0.0)
    servers.stop()


class Told:
    """A policy that says what it was told to, one after the other."""

    def __init__(self, *workers: int) -> None:
        self.samples: list[RunSample] = []
        self._workers = list(workers)

    def handle(self, sample: RunSample) -> Scale | None:
        self.samples.append(sample)
        if not self._workers:
            return None
        return Scale(self._workers.pop(0), "it was told to", {"of": sample.workers})


def loss(model: Any, batch: Any) -> Any:
    return (model(batch) ** 2).mean()


def no_more(cluster: Any) -> None:
    """Makes a cluster one that starts no workers from here."""
    cluster.__class__ = Cluster


def begun(cluster: Cluster, policy: Any, strategy: Any = jg.AsyncPS) -> Any:
    elastic = jg.Elastic(workers=(1, 2), policy=policy)
    trainer = jg.Trainer(
        nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
        loss,
        optax.sgd(1e-3),
        cluster=cluster,
        strategy=strategy(elastic=elastic),
    )
    data = np.ones((64, 3), np.float32)
    run = trainer.fit(data, steps=10**7, batch_size=4, block=False, progress=False)
    return trainer, run


@pytest.mark.parametrize(
    "strategy", [jg.SyncPS, pytest.param(jg.AsyncPS, marks=pytest.mark.nightly)]
)
def test_a_policy_lets_workers_join_and_leave_within_the_bounds(
    cluster: Here, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "WINDOW_S", 0.6)
    policy = Told(9, 9, 1)  # the second asks for no more than there may be
    trainer, run = begun(cluster, policy, strategy)
    wait_until(lambda: len(policy.samples) >= 4)
    run.stop()
    run.wait(30)
    assert [sample.workers for sample in policy.samples[:4]] == [1, 2, 2, 1]
    assert all(sample.batches_per_s > 0 for sample in policy.samples)
    told = [event.text for event in cluster.events() if event.kind == "scaled"]
    assert [text.partition("is scaled ")[2] for text in told] == [
        "from 1 to 2 workers: it was told to (of 1)",
        "from 2 to 1 workers: it was told to (of 2)",
    ]
    assert run.repeated() == 0
    trainer.close()


def test_a_ps_is_added_before_one_has_no_memory_left(
    cluster: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_facts, "memory_free", lambda: 0.1)
    policy = jg.AutoScale(window_s=0.3, pause_s=0.0)
    elastic = jg.Elastic(workers=(1, 1), ps=(1, 2), policy=policy)
    trainer = jg.Trainer(
        nnx.Linear(3, 8, rngs=nnx.Rngs(0)),
        loss,
        optax.sgd(1e-3),
        cluster=cluster,
        strategy=jg.AsyncPS(elastic=elastic),
    )
    data = np.ones((64, 3), np.float32)
    run = trainer.fit(data, steps=10**7, batch_size=4, block=False, progress=False)
    wait_until(run.rescales)
    assert [(one.before, one.ps, one.why) for one in run.rescales()] == [(1, 2, "")]
    (told,) = [e.text for e in cluster.notes.newest() if e.kind == "scaled"]
    assert "is scaled from 1 to 2 ps: a ps has 90% of its memory in use" in told
    run.stop()
    run.wait(30)
    trainer.close()


def test_a_dry_run_says_what_it_would_do_and_does_nothing(cluster: Here) -> None:
    policy = jg.AutoScale(window_s=0.2, pause_s=0.0, dry_run=True)
    no_more(cluster)
    trainer, run = begun(cluster, policy)

    def says() -> list[str]:
        return [e.text for e in cluster.notes.newest() if e.kind == "scaled"]

    wait_until(says)
    run.stop()
    run.wait(30)
    assert "would be scaled from 1 to 2 workers: 1 workers make" in says()[0]
    assert cluster.tasks("worker") == ["/job:worker/task:0"]
    trainer.close()


def test_a_policy_that_fails_ends_and_the_run_goes_on(
    cluster: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autoscaling, "WINDOW_S", 0.1)

    class Broken:
        def handle(self, sample: RunSample) -> Scale | None:
            raise ValueError("no idea")

    trainer, run = begun(cluster, Broken())
    wait_until(lambda: "it decides no more" in caplog.text)
    steps = run.steps
    wait_until(lambda: run.steps > steps)
    run.stop()
    run.wait(30)
    assert run.state == "stopped"
    trainer.close()


@pytest.mark.bad_input_row(27)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jg.AutoScale(window_s=0), r"AutoScale\(window_s=0\): give a number"),
        (lambda: jg.AutoScale(least_gain=2), "from 0.01 to 1"),
        (lambda: jg.AutoScale(pause_s=True), "from 0 to 86400"),
        (lambda: jg.Elastic(policy=jg.AutoScale), "decides nothing"),  # type: ignore[arg-type]
    ],
)
def test_policies_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.bad_input_row(27)
def test_who_cannot_start_workers_is_told_so(cluster: Here) -> None:
    no_more(cluster)
    for detached, says in (False, "dry_run=True"), (True, "in the process that began"):
        trainer = jg.Trainer(
            nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
            loss,
            optax.sgd(1e-3),
            cluster=cluster,
            strategy=jg.AsyncPS(elastic=jg.Elastic(policy=jg.AutoScale())),
        )
        data = np.ones((64, 3), np.float32)
        with pytest.raises(ConfigError, match=says):
            trainer.fit(data, steps=1, batch_size=4, progress=False, detached=detached)
        trainer.close()
