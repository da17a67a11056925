"""Versions that are served live: exported by who trains, served by other processes."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.errors import ArtifactError, TaskLostError
from jgraph.serving.artifact import (
    digest_of,
    read_example,
    read_manifest,
    write_version,
)
from jgraph.serving.live.live_file import LiveDescription
from tests.support.live_models import batch, fit, score, trained
from tests.support.servers import Servers
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=1)
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def cluster(servers: Servers) -> Iterator[Cluster]:
    with connect(servers.server("/job:worker/task:0").target, timeout_s=20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trainer(cluster: Cluster) -> Iterator[jg.Trainer]:
    with trained(cluster) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def models(trainer: jg.Trainer, tmp_path_factory: Any) -> Path:
    models: Path = tmp_path_factory.mktemp("models")
    (models / "ctr").mkdir()
    (models / "ctr" / "model.toml").write_text("[batching]\nmax_rows = 4\n")
    jg.export(trainer, batch(2), models / "ctr", fn=score, rows="ps", label="stable")
    return models


def served(models: Path, cluster: Cluster | None) -> jg.ModelServer:
    return jg.serve(models, cluster=cluster, http_port=None, watch_s=3600)


def test_a_server_answers_with_what_is_trained_after_the_export(
    models: Path, cluster: Cluster, trainer: jg.Trainer
) -> None:
    known = batch(7, seed=1)
    new = batch(3, seed=2, first_key=10**9)
    with served(models, cluster) as server:
        for x in (known, new):
            expected = trainer.predict(x, fn=score)["score"]
            found = server.predict("ctr", x, version="label:stable")["score"]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
        fit(trainer)
        changed = trainer.predict(known, fn=score)["score"]
        # A copy of dense parameters is taken once a second.
        wait_until(
            lambda: np.allclose(server.predict("ctr", known)["score"], changed, 1e-5)
        )


def test_without_a_cluster_it_is_refused_and_says_what_to_type(models: Path) -> None:
    with served(models, None) as server:
        (row,) = server.status()
        assert row["state"] != "READY"
        assert "is in training" in row["reason"]
        assert "--cluster jgraph://" in row["reason"]
    with pytest.raises(ArtifactError, match="in training"):
        jg.ExportedModel(models / "ctr").predict(batch(1))


def test_what_is_damaged_is_found(models: Path, tmp_path: Path) -> None:
    copy = tmp_path / "ctr"
    shutil.copytree(models / "ctr", copy)
    jg.ExportedModel(copy / "1").verify()
    for code in sorted((copy / "1" / "programs").iterdir()):
        data = code.read_bytes()
        code.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ArtifactError, match=code.name):
            jg.ExportedModel(copy / "1").verify()
        code.unlink()
        with pytest.raises(ArtifactError, match=code.name):
            jg.ExportedModel(copy / "1").verify()
        code.write_bytes(data)


def description(models: Path) -> dict[str, Any]:
    signature = next(iter(jg.ExportedModel(models / "ctr").signatures.values()))
    data = (models / "ctr" / "1" / "programs" / signature.program).read_bytes()
    assert digest_of(data) == signature.program
    body: dict[str, Any] = json.loads(data)
    return body


def test_a_description_comes_back_as_it_was(models: Path) -> None:
    body = description(models)
    read = LiveDescription.from_bytes(json.dumps(body).encode())
    assert json.loads(read.to_bytes()) == body


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"batches": []},
        {"options": {"refresh_s": 0}},
        {"options": {"on_loss": "ignore"}},
        {"count": {}},
        {"dense": [{"name": ""}]},
        {"tables": 7},
    ],
    ids=str,
)
def test_a_description_that_means_nothing_is_refused(
    models: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(ArtifactError, match="means nothing"):
        LiveDescription.from_bytes(json.dumps(description(models) | change).encode())


def with_ids_of(number: int, models: Path) -> bytes:
    body = description(models)
    for code in body["batches"]:
        for table in code["tables"]:
            table["inputs"] = [number]
    return json.dumps(body).encode()


def test_ids_of_an_input_that_is_none_are_refused(
    models: Path, cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="an input below 0"):
        LiveDescription.from_bytes(with_ids_of(-1, models))
    path = models / "ctr" / "1"
    manifest, code = read_manifest(path), with_ids_of(9, models)
    one = {
        name: replace(s, program=digest_of(code))
        for name, s in manifest.signatures.items()
    }
    programs = {p.stem: p.read_bytes() for p in (path / "programs").iterdir()}
    write_version(
        tmp_path / "ctr",
        replace(manifest, signatures=one),
        {},
        programs | {digest_of(code): code},
        read_example(path, manifest),
    )
    with served(tmp_path, cluster) as server:
        (row,) = server.status()
        assert row["state"] == "FAILED"
        assert "has ids of an input 9, and 3 inputs" in row["reason"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rows": "live"}, 'give "copy", or "ps"'),
        ({"rows": "ps", "platforms": ("cpu",)}, "no platforms="),
        ({"rows": "ps", "signatures": {"a": score}}, "no signatures="),
    ],
    ids=["rows", "platforms", "signatures"],
)
def test_options_that_do_not_go_with_it_are_refused(
    trainer: jg.Trainer, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ArtifactError, match=match):
        jg.export(trainer, batch(2), tmp_path / "m", fn=score, **options)


def test_a_model_of_this_process_has_no_parameter_servers(tmp_path: Path) -> None:
    x = batch(1)
    with pytest.raises(ArtifactError, match="the Trainer or the Run"):
        jg.export(lambda x: x, x["place"], tmp_path / "m", rows="ps")


@pytest.mark.nightly  # smaller: tests/train/live/test_live.py
def test_a_lost_ps_is_told_for_rows_that_nobody_asked_for(tmp_path: Path) -> None:
    servers = Servers(ps=2, worker=1)
    target = servers.server("/job:worker/task:0").target
    with connect(target, timeout_s=20) as cluster, trained(cluster) as trainer:
        jg.export(trainer, batch(2), tmp_path / "ctr", fn=score, rows="ps")
        known = batch(4, seed=3)
        with served(tmp_path, cluster) as server:
            before = server.predict("ctr", known)["score"]
            servers.lose("/job:ps/task:1")
            assert server.predict("ctr", known)["score"].tolist() == before.tolist()
            with pytest.raises(TaskLostError):
                server.predict("ctr", batch(4, seed=9, first_key=77_000))
    servers.stop()
