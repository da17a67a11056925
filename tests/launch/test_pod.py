"""A container as the manifests describe it, run here: it serves and is probed."""

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jgraph.graph.device import TaskName
from jgraph.launch.kubernetes import Deployment, Manifest
from jgraph.rpc.security.certificates import make_certificates
from tests.support.free_port import free_port

ROOT = Path(__file__).parents[2]


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
        ("Job", {"JOB_COMPLETION_INDEX": "1"}, "/job:worker/task:1"),
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


def healthy(port: int) -> bool:
    """What the kubelet asks."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
