"""Traced steps of real models, stamped at random."""

import dataclasses
import functools

import numpy as np

from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName, VariableKey
from tests.support.plans import TASKS, Values, graph_of, initial_values
from tests.support.programs import EXAMPLES, Example


@functools.cache
def traced(name: str) -> tuple[Example, Graph, Values]:
    example = EXAMPLES[name]()
    graph = graph_of(example.fn, *example.args, variables=example.variables)
    return example, graph, initial_values(example.variables)


def scattered(
    graph: Graph, seed: int
) -> tuple[Graph, list[TaskName], dict[VariableKey, TaskName]]:
    """Returns the graph stamped at random in runs of equations, tasks, variables."""
    rng = np.random.default_rng(seed)
    tasks = TASKS[1 : 2 + seed % 4]
    bounds = np.sort(rng.integers(0, len(graph.stamps), rng.integers(0, 4)))
    devices = [DeviceSpec(), *map(DeviceSpec.from_string, tasks)]
    picks = rng.integers(0, len(devices), len(bounds) + 1)
    stamps = tuple(
        devices[picks[np.searchsorted(bounds, i)]] for i in range(len(graph.stamps))
    )
    homes = {v.key: tasks[rng.integers(len(tasks))] for v in graph.variables}
    free = tuple(dataclasses.replace(v, device=DeviceSpec()) for v in graph.variables)
    return dataclasses.replace(graph, stamps=stamps, variables=free), tasks, homes
