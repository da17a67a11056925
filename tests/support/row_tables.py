"""A table that is looked up by rows, and steps of a graph over it."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jgraph.graph.graph import Graph, eval_graph

ROWS, DIM, BATCH = 1000, 4, 8
rng = np.random.default_rng(0)
batch = {
    "ids": rng.integers(0, 40, (BATCH, 3)).astype(np.int32),
    "item": rng.integers(0, 40, BATCH).astype(np.int32),
    "y": rng.normal(size=BATCH).astype(np.float32),
}


class Table(nn.Module):
    """A table and a vector, and nothing else."""

    rows: int = ROWS

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        init = nn.initializers.normal()
        self.param("t", init, (self.rows, DIM))
        self.param("w", init, (DIM,))
        return ids


def trained(
    graph: Graph, values: list[Any], steps: int = 3, data: Any = None
) -> list[Any]:
    @jax.jit
    def run(values: list[Any], feeds: list[Any]) -> Any:
        return eval_graph(graph, values, feeds)

    for n in range(steps):
        feeds = [*jax.tree.leaves(data or batch), np.int32(n), np.int32(0)]
        feeds[0] = np.roll(feeds[0], n) if n else feeds[0]
        _, values = run(values, feeds)
    return values
