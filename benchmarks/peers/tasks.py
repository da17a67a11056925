"""Processes of a peer's tasks, told over pipes how many steps to run.

A peer's module is run once per task with ``--task`` and ``--cluster``; it prints a line
when it is up, and then answers each line with a number of steps by the times at which
they were done. Needs nothing but numpy.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

import numpy as np

from benchmarks import measure

EXAMPLES, BATCH, SIZES = 4096, 128, (784, 512, 512, 10)
Reply = Callable[[Any], None]


class Cluster(Protocol):
    """What takes the orders of ``serve_orders``."""

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by task."""

    def run(self, workers: int, steps: int) -> list[list[float]]:
        """Runs steps on the first workers; returns when each step was done."""

    def close(self) -> None:
        """Ends everything."""


class Tasks:
    """One process per task; ends them all when it is closed.

    Args:
      module: the peer, in ``benchmarks.peers``.
      options: what every task is told: kind, mb, rows.
      ps: parameter servers.
      workers: workers.
    """

    def __init__(
        self, module: str, options: Sequence[str], ps: int, workers: int
    ) -> None:
        names = [
            *(f"ps:{i}" for i in range(ps)),
            *(f"worker:{i}" for i in range(workers)),
        ]
        self.spec: dict[str, list[str]] = {"worker": []}
        for name, port in zip(names, free_ports(len(names)), strict=True):
            addresses = self.spec.setdefault(name.partition(":")[0], [])
            addresses.append(f"127.0.0.1:{port}")
        self._tasks: dict[str, subprocess.Popen[str]] = {}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in close()
        command = [sys.executable, "-m", f"benchmarks.peers.{module}", *options]
        try:
            for name in names:
                self._tasks[name] = subprocess.Popen(
                    [*command, "--task", name, "--cluster", json.dumps(self.spec)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                )
            for name in names:
                self._hear(name)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by task."""
        return {
            f"/job:{name.replace(':', '/task:')}": process.pid
            for name, process in self._tasks.items()
        }

    def run(self, workers: int, steps: int) -> list[list[float]]:
        """Runs steps on the first workers; returns when each step was done."""
        for i in range(workers):
            self._tell(f"worker:{i}", steps)
        return [self._hear(f"worker:{i}") for i in range(workers)]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._tasks.values():
            process.kill()
        for process in self._tasks.values():
            process.communicate()
        self._log.close()

    def _tell(self, name: str, steps: int) -> None:
        pipe = self._tasks[name].stdin
        assert pipe is not None  # asked for
        pipe.write(f"{steps}\n")
        pipe.flush()

    def _hear(self, name: str) -> Any:
        pipe = self._tasks[name].stdout
        assert pipe is not None  # asked for
        line = pipe.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{name} of the peer ended: {self._log.read()[-2000:]}")
        return json.loads(line)


def free_ports(count: int) -> list[int]:
    """The peers' servers must be told their ports before they start."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def take_over_stdout() -> Reply:
    """Returns what answers the parent; what libraries print goes to the log."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(value: Any) -> None:
        answer.write(json.dumps(value) + "\n")
        answer.flush()

    return reply


def random_examples(seed: int) -> tuple[Any, Any]:
    """Vectors and labels of 10 classes for the MLP."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(EXAMPLES, SIZES[0])).astype(np.float32)
    return x, rng.integers(0, SIZES[-1], EXAMPLES)


def threads_each(workers: int) -> int:
    """Threads of one worker, so that all together fit the cores."""
    return max(1, (os.cpu_count() or 1) // workers)


def parser(description: str | None, kinds: Sequence[str]) -> argparse.ArgumentParser:
    """Returns a parser with what all peers are told."""
    made = measure.parser(description)
    made.add_argument("--kind", choices=list(kinds), default=kinds[0])
    made.add_argument("--mb", type=float, default=8)
    made.add_argument("--rows", type=int, default=1_000_000)
    made.add_argument("--ps", type=int, default=1)
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--serve", action="store_true", help="take orders")
    made.add_argument("--task", help="used inside: the task of this process")
    made.add_argument("--cluster", help="used inside: all addresses, as JSON")
    return made


def serve(name: str, cluster: Cluster, a: argparse.Namespace, orders: TextIO) -> None:
    """Answers orders until they end, or measures once; closes the cluster."""
    try:
        if a.serve:
            serve_orders(cluster, orders)
            return
        cluster.run(a.workers, min(a.steps, 20))
        rounds = [cluster.run(a.workers, a.steps) for _ in range(a.rounds)]
        found = [measure.rates([np.asarray(s) for s in times]) for times in rounds]
        measure.emit(
            name,
            kind=a.kind,
            ps=a.ps,
            workers=a.workers,
            steps=a.steps,
            rounds=a.rounds,
            **measure.rate_figures(found),
        )
    finally:
        cluster.close()


def serve_orders(cluster: Cluster, orders: TextIO) -> None:
    """Answers orders ``{"workers": 2, "steps": 100}`` until their end."""
    about = {"tasks": cluster.pids, **measure.circumstances()}
    print(json.dumps(about), flush=True)
    for line in orders:
        order = json.loads(line)
        seconds = cluster.run(order["workers"], order["steps"])
        print(json.dumps(seconds), flush=True)
