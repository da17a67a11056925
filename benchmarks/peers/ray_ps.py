"""A parameter server of Ray actors, doing what our benchmarks do.

Run in an environment of its own (``make peers-ray``): ``.venv-peers-ray/bin/python -m
benchmarks.peers.ray_ps --kind mlp --workers 4``. The asynchronous pattern of Ray's
documentation ("Parameter Server"): an actor holds the parameters, one actor per worker
computes gradients, and the driver hands references from the one to the other, so that
arrays go through Ray's shared memory and not through the driver. PyTorch computes.
"""

import argparse
import itertools
import logging
import os
import secrets
import time
import warnings
from typing import Any

import numpy as np

from benchmarks.peers import tasks

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A key for this run alone; otherwise Ray would leave one in the home directory.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
Arrays = list[np.ndarray[Any, Any]]


class Mlp:
    """The MLP with Adam, or a copy of it that computes gradients."""

    def __init__(self, threads: int, seed: int) -> None:
        import torch

        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        layers: list[Any] = []
        for rows, columns in itertools.pairwise(tasks.SIZES):
            layers += [torch.nn.Linear(rows, columns), torch.nn.ReLU()]
        self.torch = torch
        self.model = torch.nn.Sequential(*layers[:-1])
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-3, fused=True)
        self.data = [torch.from_numpy(x) for x in tasks.random_examples(seed)]

    def values(self) -> Arrays:
        return [p.detach().numpy() for p in self.parameters]

    def update(self, gradients: Arrays) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = self.torch.from_numpy(gradient)
        self.optimizer.step()

    def gradients(self, values: Arrays) -> Arrays:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data.copy_(self.torch.from_numpy(value))
        picked = self.torch.randint(tasks.EXAMPLES, (tasks.BATCH,))
        images, labels = (x[picked] for x in self.data)
        loss = self.torch.nn.functional.cross_entropy(self.model(images), labels)
        self.model.zero_grad()
        loss.backward()
        return [p.grad.numpy() for p in self.parameters]


class Dense:
    """Megabytes that are read, and added to."""

    def __init__(self, mb: float) -> None:
        self.array = np.zeros(int(mb * 1e6 / 4), np.float32)

    def values(self) -> Arrays:
        return [self.array]

    def update(self, gradients: Arrays) -> None:
        self.array += gradients[0]

    def gradients(self, values: Arrays) -> Arrays:
        return [values[0] * np.float32(0) + np.float32(1)]


def make(kind: str, mb: float, threads: int, seed: int) -> Mlp | Dense:
    return Mlp(threads, seed) if kind == "mlp" else Dense(mb)


class ParameterServer:
    """The actor that holds the parameters."""

    def __init__(self, *options: Any) -> None:
        self.work = make(*options)

    def pid(self) -> int:
        return os.getpid()

    def values(self) -> Arrays:
        return self.work.values()

    def apply(self, gradients: Arrays) -> Arrays:
        self.work.update(gradients)
        return self.work.values()


class Worker:
    """An actor that computes gradients."""

    def __init__(self, *options: Any) -> None:
        self.work = make(*options)

    def pid(self) -> int:
        return os.getpid()

    def gradients(self, values: Arrays) -> Arrays:
        return self.work.gradients(values)


class Cluster:
    """Ray on this machine with one parameter server and some workers."""

    def __init__(self, a: argparse.Namespace) -> None:
        import ray

        self.ray: Any = ray
        # As many CPUs as actors, so that Ray starts them all.
        ray.init(
            num_cpus=1 + a.workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        server: Any = ray.remote(ParameterServer)
        worker: Any = ray.remote(Worker)
        threads = tasks.threads_each(a.workers)
        self.server = server.remote(a.kind, a.mb, threads, 0)
        self.workers = [
            worker.remote(a.kind, a.mb, threads, i) for i in range(a.workers)
        ]
        self.run(a.workers, 3)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by task."""
        names = [f"/job:worker/task:{i}" for i in range(len(self.workers))]
        actors = [self.server, *self.workers]
        pids = self.ray.get([actor.pid.remote() for actor in actors])
        return dict(zip(["/job:ps/task:0", *names], pids, strict=True))

    def run(self, workers: int, steps: int) -> list[list[float]]:
        """Runs steps on the first workers; returns when each gradient was there."""
        values = self.server.values.remote()
        running = {
            worker.gradients.remote(values): i
            for i, worker in enumerate(self.workers[:workers])
        }
        seconds: list[list[float]] = [[] for _ in range(workers)]
        while running:
            (ready,), _ = self.ray.wait(list(running))
            i = running.pop(ready)
            seconds[i].append(time.perf_counter())
            values = self.server.apply.remote(ready)
            if len(seconds[i]) < steps:
                running[self.workers[i].gradients.remote(values)] = i
        self.ray.wait([values])
        return seconds

    def close(self) -> None:
        """Ends Ray's processes."""
        self.ray.shutdown()


def main() -> None:
    a = tasks.parser(__doc__, ["mlp", "dense"]).parse_args()
    if a.ps != 1:
        raise SystemExit("this pattern has one parameter server; leave out --ps")
    orders = os.fdopen(os.dup(0))
    tasks.serve("ray_ps", Cluster(a), a, orders)


if __name__ == "__main__":
    main()
