"""A step of one task run in the thread that asks for it.

Handing a step to a task's event loop and its result back costs more than a small step
itself. One that no other task has a part in, and whose work is known to be short, needs
neither the loop nor a deadline: its nodes run one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from jgraph.plan.nodes import (
    ConstNode,
    FeedNode,
    FetchNode,
    Node,
    ReadNode,
    SegmentNode,
    WriteNode,
)
from jgraph.plan.program import Partition, StoredVariable
from jgraph.runtime.loaded import LoadedPartition
from jgraph.runtime.local_mesh import SpreadExecutable
from jgraph.runtime.store import VariableStore

SHORT_S: Final = 5e-3
"""What a step may take, as far as known, to run in the thread that asks for it."""


def is_plain(loaded: LoadedPartition) -> bool:
    """Whether all of a partition is of what ``run_at_once`` knows."""
    if any(isinstance(run, SpreadExecutable) for run in loaded.executables):
        return False
    partition = loaded.partition
    return not partition.gate and all(map(_is_plain, partition.nodes))


def takes_less(loaded: LoadedPartition, limit_s: float) -> bool:
    """Whether all that a partition computes has run before, and took less than that."""
    total = 0.0
    for run, cost in zip(loaded.executables, loaded.costs, strict=True):
        if run is not None:
            total += limit_s if cost.seconds is None else cost.seconds
    return total < limit_s


def run_at_once(
    loaded: LoadedPartition,
    feeds: Mapping[str, Any],
    store: VariableStore,
    now: Callable[[], float],
) -> list[np.ndarray[Any, Any]]:
    """Runs a step and returns its fetches, which are the caller's own.

    Args:
      loaded: a partition of ``is_plain`` nodes that is all of its program.
      feeds: arrays by feed name, of the program's types.
      store: variables of the task; other threads may use them at the same time.
      now: tells monotonic time in seconds.
    """
    partition = loaded.partition
    values: list[Any] = [None] * len(partition.values)
    fetches: list[np.ndarray[Any, Any]] = []
    for index, node in enumerate(partition.nodes):
        if isinstance(node, SegmentNode):
            began = now()
            results = _compute(loaded, index, node, values, store)
            loaded.costs[index].learn(now() - began)
            for out, result in zip(node.outs, results, strict=True):
                values[out] = result
        elif isinstance(node, FeedNode):
            values[node.out] = feeds[node.name]
        elif isinstance(node, ConstNode):
            values[node.out] = node.value
        elif isinstance(node, ReadNode):
            read = store.read(_named(partition, node.variables))
            for out, value in zip(node.outs, read, strict=True):
                values[out] = value
        elif isinstance(node, WriteNode):
            given = [values[value] for value in node.values]
            store.write(_named(partition, node.variables), given)
        elif isinstance(node, FetchNode):
            fetches = [np.array(values[value]) for value in node.values]
    return fetches


def _compute(
    loaded: LoadedPartition,
    index: int,
    node: SegmentNode,
    values: Sequence[Any],
    store: VariableStore,
) -> Sequence[Any]:
    run = loaded.executables[index]
    assert run is not None  # load_partition compiled it
    inputs = [values[value] for value in node.inputs]
    results: Sequence[jax.Array]
    if node.updates or node.reads:
        updates = _named(loaded.partition, node.updates)
        reads = _named(loaded.partition, node.reads)
        results = store.update(updates, reads, lambda *state: run(*state, *inputs))
    else:
        results = run(*inputs)
    # What was fed belongs to the caller again when this returns.
    for result in results:  # JAX's function for all takes three times as long
        result.block_until_ready()
    return results


def _is_plain(node: Node) -> bool:
    if isinstance(node, SegmentNode):
        return not (node.row_updates or node.row_reads)
    return isinstance(node, FeedNode | ConstNode | ReadNode | WriteNode | FetchNode)


def _named(partition: Partition, variables: Sequence[int]) -> list[StoredVariable]:
    return [partition.variables[index] for index in variables]
