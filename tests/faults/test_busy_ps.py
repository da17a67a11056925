"""Many callers push more at once than a ps takes in."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from typing import Any

import grpc
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jgraph.client.cluster import Cluster, connect
from jgraph.cluster.spec import ClusterSpec
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import Variable
from jgraph.launch.hosts import cluster_file
from jgraph.rpc.calls.connections import FEW_CALLS
from jgraph.rpc.grpc import transport
from tests.support.fault import Fault

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

MIB = 1 << 20
CALLERS, PUSHES, PUSH, LIMIT = 48, 100, 8 * MIB, 16 * MIB
KEPT = 32 * MIB
"""Memory for tensors that a task keeps for the next ones."""
AHEAD = FEW_CALLS * 8 * MIB
"""Of the calls that are sent before there is room: gRPC reads them ahead."""
SERVING = health_pb2.HealthCheckResponse.SERVING


@contextmanager
def busy_ps(fault: Fault) -> Iterator[tuple[Cluster, psutil.Process]]:
    """A ps of its own process, with room for ``LIMIT`` bytes, and a client of it."""
    fault.logs.mkdir()
    file = fault.logs / "cluster.toml"
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    file.write_bytes(cluster_file(ClusterSpec({"ps": [f"127.0.0.1:{port}"]})))
    command = [sys.executable, "-m", "jgraph", "server", "--end-with-input", "--json"]
    options = ["--cluster", str(file), "--max-request-bytes", str(LIMIT)]
    with (
        (fault.logs / "ps.log").open("w") as log,
        subprocess.Popen(
            [*command, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as server,
    ):
        assert server.stdout is not None
        with connect(json.loads(server.stdout.readline())["target"]) as cluster:
            yield cluster, psutil.Process(server.pid)


@contextmanager
def health_of(cluster: Cluster) -> Iterator[Callable[[], int]]:
    """Asks the health service of the only task."""
    (ps,) = cluster.status().tasks
    with grpc.insecure_channel(f"127.0.0.1:{ps.health_port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        yield lambda: int(check(health_pb2.HealthCheckRequest(), timeout=10).status)


@pytest.mark.row(28)
@pytest.mark.parametrize(
    "near",
    [pytest.param(True, marks=pytest.mark.nightly), False],
    ids=["auto", "grpc"],
)
def test_memory_of_a_ps_has_a_bound_whatever_is_pushed_at_once(
    fault: Fault, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    """Each push is made once, and the task serves all the time.

    Without a bound it grows by 240 MiB, and by 600 over gRPC.
    """
    monkeypatch.setattr(transport, "is_supported", lambda: near)
    count = Variable("count", jnp.zeros((), jnp.int32), device="/job:ps/task:0")

    @function
    def push(x: Any) -> None:
        count[...] = count[...] + x.max().astype(jnp.int32)

    x, together = np.ones(PUSH, np.uint8), threading.Barrier(CALLERS)
    with busy_ps(fault) as (cluster, ps), cluster.session() as session:

        def push_once(n: int) -> None:
            if n < CALLERS:
                together.wait(30)
            session.run(push, x)

        session.run(push, x)
        before = ps.memory_info().rss
        most, health = before, set()
        with health_of(cluster) as ask_health, ThreadPoolExecutor(CALLERS) as callers:
            left = {callers.submit(push_once, n) for n in range(PUSHES)}
            while left:
                done, left = wait(left, timeout=0.02)
                for push_ended in done:
                    push_ended.result()
                most = max(most, ps.memory_info().rss)
                health.add(ask_health())
        assert int(session.read([count])["count"]) == PUSHES + 1
    assert health == {SERVING}
    assert most - before < LIMIT + KEPT + AHEAD
    # Whether a call is refused or waits until there is room, is chance: nobody is lost.
    fault.is_noticed = False
