"""Workers as processes at several addresses of this machine, which count as hosts."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jgraph.client.cluster import Cluster, connect
from jgraph.cluster.spec import ClusterSpec
from jgraph.launch.hosts import cluster_file
from tests.support.free_port import free_port


def begin_server(
    stack: ExitStack, command: list[str], log: Path
) -> "subprocess.Popen[bytes]":
    """Starts a server that ends with its input, as the stack does."""
    file = stack.enter_context(log.open("w"))
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=file)
    stack.callback(server.wait, 30)
    assert server.stdin is not None
    stack.callback(server.stdin.close)
    return server


def wait_serving(
    stack: ExitStack, servers: Iterable["subprocess.Popen[bytes]"]
) -> None:
    """Waits until each says that it serves."""
    for server in servers:
        assert server.stdout is not None
        assert b"serves at" in server.stdout.readline()
        stack.callback(server.stdout.close)


@contextmanager
def workers_on(
    hosts: int, each: int, path: Path
) -> Iterator[tuple[Cluster, list["subprocess.Popen[bytes]"]]]:
    """Starts workers, so many on each host; gives a client, and their processes.

    Args:
      hosts: how many.
      each: workers of each.
      path: of a directory for files and logs.
    """
    places = [f"127.0.0.{1 + n // each}" for n in range(hosts * each)]
    spec = ClusterSpec({"worker": [f"{host}:{free_port()}" for host in places]})
    file = path / "cluster.toml"
    file.write_bytes(cluster_file(spec))
    servers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        for number, host in enumerate(places):
            which = ["--job", "worker", "--task", str(number), "--bind", host]
            command = [sys.executable, "-m", "jgraph", "server", "--end-with-input"]
            words = [*command, *which, "--cluster", str(file)]
            log = path / f"worker{number}.log"
            servers.append(begin_server(stack, words, log))
        wait_serving(stack, servers)
        target = f"jgraph://{spec.address('/job:worker/task:0')}"
        with connect(target, timeout_s=60) as cluster:
            yield cluster, servers
