"""A task of the job serve answers for models, and for those that are in training."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import jgraph as jg
from jgraph.cli.models_beside import ModelsBeside
from jgraph.client.cluster import connect
from jgraph.errors import PortInUseError
from tests.support.live_models import batch, fit, score, trained
from tests.support.servers import Servers
from tests.support.waiting import wait_until

TASK = "/job:serve/task:0"


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=1, serve=1)
    yield servers
    servers.stop()


def beside(servers: Servers, models: Path, **options: Any) -> ModelsBeside:
    facts = {"http_port": 0, "grpc_port": 0, "watch_s": 0.05, "drain_s": 0} | options
    return ModelsBeside(servers.server(TASK), models, None, None, **facts)


def scores(server: jg.ModelServer, x: dict[str, Any]) -> list[float]:
    """The answer over REST, as callers on other hosts get it."""
    types = {"uint32": "UINT32", "int32": "INT32"}
    inputs = [
        {
            "name": name,
            "shape": value.shape,
            "datatype": types[value.dtype.name],
            "data": value.ravel().tolist(),
        }
        for name, value in x.items()
    ]
    answer = httpx.post(
        f"{server.url}/v2/models/ctr/infer",
        json={"inputs": inputs},
        headers={"Authorization": f"Bearer {server.token.value}"},
        timeout=20,
    )
    body: dict[str, Any] = json.loads(answer.text)
    assert answer.is_success, body
    assert body["parameters"]["jgraph_rows"] == "live"
    found: list[float] = body["outputs"][0]["data"]
    return found


def test_what_is_exported_while_it_is_trained_is_served_by_the_job(
    servers: Servers, tmp_path: Path
) -> None:
    models = tmp_path / "models"  # not there yet
    here = beside(servers, models)
    here.start()
    wait_until(lambda: here.server is not None)
    server = here.server
    assert server is not None
    assert server.status() == []
    target = servers.server("/job:worker/task:0").target
    with connect(target, timeout_s=20) as cluster, trained(cluster) as trainer:
        jg.export(trainer, batch(2), models / "ctr", fn=score, rows="ps")
        wait_until(lambda: [row["state"] for row in server.status()] == ["READY"])
        x = batch(5, seed=1)
        for _ in range(2):
            expected = trainer.predict(x, fn=score)["score"]
            wait_until(lambda: np.allclose(scores(server, x), expected, 1e-5))  # noqa: B023
            fit(trainer)
    here.stop()


def test_a_port_that_is_taken_ends_the_task_and_says_why(tmp_path: Path) -> None:
    servers = Servers(ps=1, worker=1, serve=1)
    try:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            here = beside(servers, tmp_path, http_port=taken.getsockname()[1])
            here.start()
            assert servers.server(TASK).join(30)
            with pytest.raises(PortInUseError):
                here.stop()
    finally:
        servers.stop()
