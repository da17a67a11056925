"""What a ps pays for workers that are connected and do nothing.

A ps in a process of its own, and servers of many workers in another one, which one step
connects with the ps in both directions. What the ps has resident then, and what CPU it
takes while nothing is done, less the same before, is divided by the number of workers.
"""

import multiprocessing as mp
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import jax.numpy as jnp
import psutil

import jgraph as jg
from benchmarks import measure
from jgraph.client.cluster import Cluster
from jgraph.server.process_setup import set_up_process

_REST_S: Final = 3.0
_START_S: Final = 300.0


def serve(job: str, count: int, pipe: Connection) -> None:
    """Serves tasks of a job in this process until the pipe says something."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    set_up_process()
    servers = [
        jg.Server({job: {index: "127.0.0.1:0"}}, job, index) for index in range(count)
    ]
    pipe.send([server.address for server in servers])
    cluster = jg.ClusterSpec(pipe.recv())
    for server in servers:
        server.set_cluster(cluster)
    pipe.send("ready")
    pipe.recv()
    for server in servers:
        server.stop()


@contextmanager
def tasks(counts: dict[str, int]) -> Iterator[tuple[dict[str, list[str]], int]]:
    """Runs a process for each job; yields the cluster, and the pid of the first."""
    spawn = mp.get_context("spawn")
    pipes, processes = [], []
    for job, count in counts.items():
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(job, count, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        spec = {job: heard(pipe) for job, pipe in zip(counts, pipes, strict=True)}
        for pipe in pipes:
            pipe.send(spec)
        for pipe in pipes:
            heard(pipe)
        pid = processes[0].pid
        assert pid is not None  # it was started
        yield spec, pid
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            if process.is_alive():
                pipe.send("over")
        for process in processes:
            process.join(60)
            process.kill()


def heard(pipe: Connection) -> Any:
    """Returns what a process says.

    Raises:
      TimeoutError: nothing came.
    """
    if not pipe.poll(_START_S):
        raise TimeoutError(f"a process of servers said nothing for {_START_S:g} s")
    return pipe.recv()


def connect_all(cluster: Cluster, workers: int) -> None:
    """Runs one step in which the ps sends each worker a value, and gets one."""
    w = jg.Variable("w", jnp.zeros(4), device="/job:ps/task:0")

    def step() -> Any:
        parts = []
        for number in range(workers):
            with jg.device(f"/job:worker/task:{number}"):
                parts.append(w[...] + 1)
        with jg.device("/job:ps/task:0"):
            return sum(part.sum() for part in parts)

    session = cluster.session()
    session.initialize(w)
    total = float(session.run(step, timeout_s=_START_S))
    assert total == 4.0 * workers, total
    session.close()


def cost(pid: int, seconds: float) -> tuple[float, float]:
    """Returns the MB resident of a process, and its share of a core while it idles."""
    time.sleep(_REST_S)  # what was begun is over then
    process, before, began = psutil.Process(pid), measure.cpu_seconds(pid), time.time()
    time.sleep(seconds)  # nothing happens, which is what is measured
    used = measure.cpu_seconds(pid) - before
    return process.memory_info().rss / 1e6, used / (time.time() - began)


def run(counts: Sequence[int], seconds: float, *, rows: bool) -> None:
    """Prints a line for each number of workers."""
    for workers in counts:
        with tasks({"ps": 1, "worker": workers}) as (spec, pid):
            began = time.perf_counter()
            with jg.connect(spec["ps"][0]) as cluster:
                connected_s = time.perf_counter() - began
                rss, cpu = cost(pid, seconds)
                began = time.perf_counter()
                connect_all(cluster, workers)
                step_s = time.perf_counter() - began
                rss_after, cpu_after = cost(pid, seconds)
                files = psutil.Process(pid).num_fds()
        figures = {
            "workers": workers,
            "mb_per_worker": round((rss_after - rss) / workers, 3),
            "percent_of_a_core_per_worker": round(100 * (cpu_after - cpu) / workers, 4),
            "percent_of_a_core": round(100 * cpu_after, 2),
            "rss_mb": [round(rss, 1), round(rss_after, 1)],
            "files_of_ps": files,
            "connect_s": round(connected_s, 2),
            "first_step_s": round(step_s, 2),
        }
        if rows:
            value = figures.pop("mb_per_worker")
            measure.emit_row(12, value, "MB per idle worker", **figures)
        else:
            measure.emit("scale", idle=True, seconds=seconds, **figures)
