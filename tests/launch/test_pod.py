"""A container as the manifests describe it, run here: it serves and is probed."""

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jgraph.graph.device import TaskName
from jgraph.launch.kubernetes import Deployment, Manifest
from jgraph.launch.kubernetes_serving import ModelDeployment
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.token import Token
from tests.support.exported import half_plus_three
from tests.support.free_port import free_port

ROOT = Path(__file__).parents[2]
TASK = TaskName("/job:ps/task:0")


def run(
    container: Manifest, mounts: dict[str, Path], environ: dict[str, str]
) -> "subprocess.Popen[str]":
    """Starts a container's command; ``mounts`` says what its volumes are here."""
    words = list(container["args"])
    for volume in container["volumeMounts"]:
        if volume["name"] in mounts:
            here = str(mounts[volume["name"]])
            words = [word.replace(volume["mountPath"], here) for word in words]
    return subprocess.Popen(
        [sys.executable, "-m", "jgraph", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        | {one["name"]: one["value"] for one in container["env"]}
        | environ,
    )


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize(
    ("kind", "environ", "task"),
    [
        (
            "StatefulSet",
            {"HOSTNAME": "jgraph-ps-1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            "/job:ps/task:1",
        ),
        pytest.param(
            *("Job", {"JOB_COMPLETION_INDEX": "1"}, "/job:worker/task:1"),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["ps", "worker"],
)
def test_the_container_of_a_pod_finds_its_task_and_answers_its_probes(
    kind: str, environ: dict[str, str], task: str, tmp_path: Path
) -> None:
    port, health_port, data_port = free_port(), free_port(), free_port()
    pods = Deployment(
        *("image", 2, 2),
        port=port,
        health_port=health_port,
        data_port=data_port,
    )
    found = {one["kind"]: one for one in pods.plain()}
    mounts = {"cluster": tmp_path, "secret": tmp_path / "certs"}
    for name, text in found["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    make_certificates(mounts["secret"], [TaskName(task)])
    (container,) = found[kind]["spec"]["template"]["spec"]["containers"]
    with run(container, mounts, environ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith(f"{task} serves at jgraphs://")
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert healthy(container[probe]["grpc"]["port"])
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.procs
def test_the_container_of_a_server_of_models_answers_its_probes_and_callers(
    tmp_path: Path,
) -> None:
    models, token, tls = (tmp_path / name for name in ("models", "token", "tls"))
    half_plus_three(models)
    token.mkdir()
    bearer = f"Bearer {Token.make(token / 'token').value}"
    certificate, key = (
        path for path in make_certificates(tls, [TASK]) if path.stem == "ps-0"
    )
    certificate.rename(tls / "tls.crt")
    key.rename(tls / "tls.key")
    servers = ModelDeployment(
        "image", "claim", http_port=free_port(), grpc_port=free_port()
    )
    found = {one["kind"]: one for one in servers.manifests()}
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    mounts = {"models": models, "token": token, "tls": tls}
    anyone = ssl._create_unverified_context()  # as the kubelet does
    with run(container, mounts, {"HOME": str(tmp_path)}) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("REST https://")
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container[probe]["httpGet"]
                assert asked["scheme"] == "HTTPS"
                url = f"https://127.0.0.1:{asked['port']}{asked['path']}"
                with urllib.request.urlopen(url, context=anyone, timeout=10) as reply:
                    assert reply.status == 200
            url = f"https://127.0.0.1:{servers.http_port}/v1/models/half_plus_three"
            body = json.dumps({"instances": [1.0, 2.0, 5.0]}).encode()
            headers = {"Authorization": bearer, "Content-Type": "application/json"}
            ask = urllib.request.Request(f"{url}:predict", body, headers)
            with urllib.request.urlopen(ask, context=anyone, timeout=10) as reply:
                assert json.load(reply) == {"predictions": [3.5, 4.0, 5.5]}
        finally:
            server.terminate()
        assert server.wait(30) == 0


def healthy(port: int) -> bool:
    """What the kubelet asks."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
