"""Starts the tasks of a host: ``start_host.py cluster.toml nodeA``."""

import signal
import subprocess
import sys

import jgraph as jg

file, host = sys.argv[1:]
cluster = jg.ClusterSpec.from_toml(file)
command = [sys.executable, "-m", "jgraph", "server", "--cluster", file]
command += ["--bind", "0.0.0.0", "--end-with-input"]
servers = [
    subprocess.Popen(
        [*command, "--job", job, "--task", str(index)],
        stdin=subprocess.PIPE,  # held open: they end with this script
    )
    for job in cluster.jobs
    for index in cluster.task_indices(job)
    if cluster.task_address(job, index).rpartition(":")[0] == host
]
if not servers:
    sys.exit(f"{file} has no task on '{host}'; name the host as the file does")


def end(*_: object) -> None:
    """Lets steps in flight end first."""
    for server in servers:
        server.terminate()


signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
sys.exit(max(abs(server.wait()) for server in servers))
