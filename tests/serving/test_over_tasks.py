"""Models over several tasks: exported as programs, served by a cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.errors import ArtifactError, TaskLostError
from jgraph.serving.tasks.program_file import program_from
from tests.support.servers import Servers
from tests.support.waiting import wait_until

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


def stages() -> tuple[jg.Pipeline, list[Any]]:
    rng = np.random.default_rng(0)
    params = [rng.standard_normal((3, 4)), rng.standard_normal((4, 2))]
    pipe = jg.Pipeline(
        [lambda w, x: jnp.tanh(x @ w), lambda w, x: x @ w],
        lambda y, t: ((y - t) ** 2).mean(),
        microbatches=2,
    )
    return pipe, [one.astype(np.float32) for one in params]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers(worker=2)
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def cluster(servers: Servers) -> Iterator[Cluster]:
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def models(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A pipeline after two steps of training, and what it gives for ``X``."""
    path = tmp_path_factory.mktemp("models")
    pipe, params = stages()
    step = pipe.step(params, optax.sgd(0.1))
    with cluster.session(container="training") as session:
        for _ in range(2):
            session.run(step.train, X, np.ones((8, 2), np.float32))
        exported = jg.export(step.forward, X, path / "deep", session=session)
        assert exported.manifest.kind == "program"
        assert set(exported.manifest.arrays) == {"params/0", "params/1"}
        first, second = step.params(session)
    return path, np.tanh(X @ first) @ second


def test_a_pipeline_is_served_by_the_tasks_that_it_was_cut_for(
    cluster: Cluster, models: tuple[Path, Any]
) -> None:
    path, expected = models
    cluster.reset()  # what trained it is gone
    with jg.serve(path, cluster=cluster, http_port=None) as server:
        for rows in (1, 3, 8):
            found = server.predict("deep", X[:rows])["y"]
            np.testing.assert_allclose(found, expected[:rows], rtol=1e-5)
        held = {t.task: t.programs for t in cluster.status().tasks}
        assert all(held.values())  # each computes its stage
    assert not any(t.programs for t in cluster.status().tasks)


def test_other_tasks_take_the_place_of_those_that_it_was_cut_for(
    models: tuple[Path, Any],
) -> None:
    path, expected = models
    servers = Servers(ps=1, serve=2)
    try:
        with (
            connect(servers.servers[0].target, timeout_s=20) as other,
            jg.serve(path, cluster=other, http_port=None) as server,
        ):
            np.testing.assert_allclose(
                server.predict("deep", X)["y"], expected, rtol=1e-5
            )
    finally:
        servers.stop()


def test_a_lost_task_is_told_and_the_model_comes_back_with_it(
    models: tuple[Path, Any],
) -> None:
    path, expected = models
    servers = Servers(worker=2)
    try:
        with (
            connect(servers.servers[0].target, timeout_s=20) as cluster,
            jg.serve(path, cluster=cluster, http_port=None) as server,
        ):
            servers.lose("/job:worker/task:1")
            with pytest.raises(TaskLostError, match="deep/1"):
                server.predict("deep", X)
            assert not server._models.is_ready
            servers.start_again("/job:worker/task:1")
            wait_until(lambda: server._models.is_ready)
            np.testing.assert_allclose(
                server.predict("deep", X)["y"], expected, rtol=1e-5
            )
    finally:
        servers.stop()


def test_what_no_cluster_could_serve_is_refused(
    cluster: Cluster, models: tuple[Path, Any], tmp_path: Path
) -> None:
    path, _ = models
    with pytest.raises(ArtifactError, match="cluster="):
        jg.ExportedModel(path / "deep").predict(X)
    with jg.serve(path, http_port=None) as alone:
        (row,) = alone.status()
        assert row["state"] == "FAILED"
        assert "jgraph serve --cluster" in row["reason"]
    servers = Servers(worker=1)
    try:
        with (
            connect(servers.servers[0].target, timeout_s=20) as small,
            jg.serve(path, cluster=small, http_port=None) as server,
        ):
            assert "cluster has 1" in server.status()[0]["reason"]
    finally:
        servers.stop()
    with cluster.session() as session:
        for options, match in (
            ({"params": np.ones(3)}, "no params="),
            ({"format": "saved_model"}, "no format="),
        ):
            with pytest.raises(ArtifactError, match=match):
                jg.export(lambda x: x, X, tmp_path / "m", session=session, **options)
        with pytest.raises(ArtifactError, match="a row for each example"):
            jg.export(lambda x: x.sum(0), X, tmp_path / "m", session=session)
        with pytest.raises(ArtifactError, match=r"step\.forward"):
            jg.export(X, X, tmp_path / "m", session=session)


def test_a_file_that_has_no_program_is_refused(models: tuple[Path, Any]) -> None:
    path, _ = models
    (file,) = (path / "deep" / "1" / "programs").iterdir()
    data = file.read_bytes()
    assert program_from(data).driver.startswith("/job:worker/")
    for wrong in (b"", data[:-1], data + data, b"\0" * 100, data[:40] + b"\xff" * 40):
        with pytest.raises(ArtifactError):
            program_from(wrong)
