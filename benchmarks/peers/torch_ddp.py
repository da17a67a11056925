"""PyTorch's DistributedDataParallel over gloo, doing what our benchmarks do.

Run in an environment of its own (``make peers-torch``): ``.venv-peers-torch/bin/python
-m benchmarks.peers.torch_ddp --kind mlp --workers 4``. One process per worker, no ps:
every worker holds the model, gradients are averaged in each step, so that it is
synchronous. ``dense``: one all-reduce of ``--mb`` megabytes, which are then added.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers import tasks

MODULE = "torch_ddp"


def serve_task(a: argparse.Namespace) -> None:
    """A worker: joins the others, then answers numbers of steps."""
    reply = tasks.take_over_stdout()
    import torch
    import torch.distributed as dist

    workers = json.loads(a.cluster)["worker"]
    host, _, port = workers[0].rpartition(":")
    rank = int(a.task.partition(":")[2])
    torch.set_num_threads(tasks.threads_each(len(workers)))
    where = f"tcp://{host}:{port}"
    dist.init_process_group("gloo", where, rank=rank, world_size=len(workers))
    step = (mlp_step if a.kind == "mlp" else dense_step)(torch, a, rank)
    for _ in range(3):
        step()
    reply("up")
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            step()
            seconds.append(time.perf_counter())
        reply(seconds)
    os._exit(0)  # the others may have gone already


def mlp_step(torch: Any, a: argparse.Namespace, rank: int) -> Callable[[], None]:
    """A step of Adam on the MLP."""
    torch.manual_seed(0)
    layers: list[Any] = []
    for rows, columns in itertools.pairwise(tasks.SIZES):
        layers += [torch.nn.Linear(rows, columns), torch.nn.ReLU()]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    images, labels = map(torch.from_numpy, tasks.random_examples(rank))

    def step() -> None:
        picked = torch.randint(tasks.EXAMPLES, (tasks.BATCH,))
        logits = model(images[picked])
        loss = torch.nn.functional.cross_entropy(logits, labels[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def dense_step(torch: Any, a: argparse.Namespace, rank: int) -> Callable[[], None]:
    """Every worker sends as much as it holds, and adds the sum of all."""
    values = torch.zeros(int(a.mb * 1e6 / 4))

    def step() -> None:
        update = values * 0 + 1
        torch.distributed.all_reduce(update)
        values.add_(update)

    return step


def main() -> None:
    a = tasks.parser(__doc__, ["mlp", "dense"]).parse_args()
    if a.task:
        serve_task(a)
        return
    options = [f"--kind={a.kind}", f"--mb={a.mb}"]
    cluster = tasks.Tasks(MODULE, options, 0, a.workers)
    tasks.serve(MODULE, cluster, a, orders=sys.stdin)


if __name__ == "__main__":
    main()
