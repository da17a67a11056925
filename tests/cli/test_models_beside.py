"""A task of the job serve answers for models, and for those that are in training."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import jgraph as jg
from jgraph.cli import hosts
from jgraph.cli.models_beside import ModelsBeside
from jgraph.client.cluster import connect
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import PortInUseError
from jgraph.rpc.security.certificates import make_certificates
from tests.support.cli import run
from tests.support.free_port import free_port
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
    facts: dict[str, Any] = {"http_port": 0, "grpc_port": -1, "tls": (None, None)}
    facts |= {"bind": "127.0.0.1", "token_file": None, "insecure_i_accept": False}
    facts |= {"watch_s": 0.05, "drain_s": 0}
    task = servers.server(TASK)
    return hosts._models_beside(task, models, (None, None, None), **(facts | options))


def scores(
    url: str, token: str, x: dict[str, Any], authority: Path | None = None
) -> list[float]:
    """The answer over REST, as callers on other hosts get it."""
    context: ssl.SSLContext | bool = False
    if authority is not None:
        context = ssl.create_default_context(cafile=authority)
        context.check_hostname = False  # the certificate is of serve-0.jgraph
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
        f"{url}/v2/models/ctr/infer",
        json={"inputs": inputs},
        headers={"Authorization": f"Bearer {token}"},
        timeout=20,
        verify=context,
    )
    body: dict[str, Any] = json.loads(answer.text)
    assert answer.is_success, body
    found: list[float] = body["outputs"][0]["data"]
    return found


def answers(
    url: str,
    token: str,
    x: dict[str, Any],
    expected: Any,
    authority: Path | None = None,
) -> bool:
    """Whether that is what a server answers; False also while it cannot."""
    try:
        return np.allclose(scores(url, token, x, authority), expected, 1e-5)
    except (httpx.TransportError, AssertionError):
        return False


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
            wait_until(partial(answers, server.url, server.token.value, x, expected))
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tls-cert", "a.pem"], "both or none"),
        (["--http-port", "-1", "--grpc-port", "-1"], "nobody could ask"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_the_task_is_there(
    options: list[str], says: str, tmp_path: Path, capsys: Any
) -> None:
    words = ["server", "--job", "serve", "--task", "0", "--models", str(tmp_path)]
    code, _, error = run(capsys, *words, *options)
    assert code == 1
    assert says in error


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "tls"])
def test_processes_of_a_cluster_file_serve_what_others_of_it_train(
    is_sealed: bool, tmp_path: Path
) -> None:
    jobs = {"ps": free_port(), "worker": free_port(), "serve": free_port()}
    lines = [f'{job} = ["127.0.0.1:{port}"]' for job, port in jobs.items()]
    certificates = tmp_path / "certs"
    authority = certificates / "ca.crt" if is_sealed else None
    if is_sealed:
        lines += ["[tls]", 'dir = "certs"']
    (tmp_path / "cluster.toml").write_text("\n".join(["[cluster]", *lines]))
    home = {**os.environ, "JGRAPH_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    scheme = "https" if is_sealed else "http"
    url = f"{scheme}://127.0.0.1:{free_port()}"
    ports = ["--http-port", url.rpartition(":")[2], "--grpc-port", "-1"]
    if is_sealed:
        tasks = ClusterSpec.from_toml(tmp_path / "cluster.toml").tasks()
        make_certificates(certificates, tasks)
        files = [str(certificates / f"serve-0.{end}") for end in ("crt", "key")]
        ports += ["--tls-cert", files[0], "--tls-key", files[1]]

    def start(job: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "jgraph", "server", "--job", job]
        command += ["--task", "0", "--cluster", str(tmp_path / "cluster.toml")]
        more = ["--models", str(tmp_path / "models"), *ports] if job == "serve" else []
        log = (tmp_path / f"{job}.log").open("ab")
        with log:
            return subprocess.Popen([*command, *more], env=home, stdout=log, stderr=log)

    processes = {job: start(job) for job in jobs}
    try:
        target = f"jgraph{'s' * is_sealed}://127.0.0.1:{jobs['worker']}"
        token_file = (certificates if is_sealed else tmp_path) / "token"
        wait_until(token_file.exists)
        identity: dict[str, Any] = {"token_file": token_file}
        if is_sealed:
            identity = {"tls": certificates}
        with connect(target, timeout_s=60, **identity) as cluster:
            trainer = trained(cluster)
            model = tmp_path / "models" / "ctr"
            jg.export(trainer, batch(2), model, fn=score, rows="ps")
            x = batch(5, seed=1)
            expected = trainer.predict(x, fn=score)["score"]
            serve_token = tmp_path / "serve_token"
            wait_until(serve_token.exists, 60)
            token = serve_token.read_text().strip()
            are = partial(answers, url, token, x, expected, authority)
            wait_until(are, 60)
            processes["serve"].kill()
            processes["serve"].wait(20)
            processes["serve"] = start("serve")
            wait_until(are, 60)
            processes["ps"].kill()  # what was asked for is known without it
            processes["ps"].wait(20)
            wait_until(are, 60)
        processes["serve"].send_signal(signal.SIGTERM)
        assert processes["serve"].wait(60) == 0
    finally:
        for process in processes.values():
            process.kill()
            process.wait(20)
