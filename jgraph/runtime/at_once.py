"""Synchronous fast path: a one-task step run in the thread that asks for it.

Handing a step to a task's event loop and its result back costs more than a small step
itself. One that no other task has a part in, and whose work is known to be short, needs
neither the loop nor a deadline: its nodes run one after the other. What can be settled
before is settled when its program is registered.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, final

import jax
import numpy as np

from jgraph.plan.program.nodes import (
    ConstNode,
    FeedNode,
    FetchNode,
    LookupNode,
    MergeNode,
    Node,
    ReadNode,
    RouteNode,
    SegmentNode,
    ValueType,
    WriteNode,
    outputs_of,
)
from jgraph.plan.program.program import Partition, Program
from jgraph.plan.program.row_values import moved, padded
from jgraph.runtime.loaded import LoadedPartition
from jgraph.runtime.node_work import look_up
from jgraph.runtime.store.local_mesh import SpreadExecutable
from jgraph.runtime.store.store import VariableStore

SHORT_S: Final = 5e-3
"""What a step may take, as far as known, to run in the thread that asks for it."""
SHORT_BYTES: Final = 16 << 20
"""And what it may read whole: to copy that takes as long."""

_PLAIN: Final = (
    FeedNode | ConstNode | ReadNode | WriteNode | FetchNode | RouteNode | MergeNode
)
_Do: TypeAlias = Callable[[list[Any]], None]
"""Does what a node does: takes values by their number, and puts others there."""


@final
class AtOnce:
    """The steps of a program that is one ``is_plain`` partition.

    Args:
      program: what the feeds are.
      loaded: its only partition.
      store: variables of the task; other threads may use them at the same time.
      now: tells monotonic time in seconds.
    """

    __slots__ = ("_blank", "_costs", "_do", "_fed", "_feeds", "_fetched", "_reads")

    def __init__(
        self,
        program: Program,
        loaded: LoadedPartition,
        store: VariableStore,
        now: Callable[[], float],
    ) -> None:
        partition = loaded.partition
        unused = len(partition.values)
        self._blank: list[Any] = [None] * (unused + 1)
        self._do: list[_Do] = []
        self._costs = [
            cost
            for node, cost in zip(partition.nodes, loaded.costs, strict=True)
            if isinstance(node, SegmentNode | LookupNode)
        ]
        self._fetched: tuple[tuple[int, ValueType], ...] = ()
        self._reads = 0  # bytes
        fed: dict[str, int] = {}
        for index, node in enumerate(partition.nodes):
            if isinstance(node, SegmentNode):
                self._do.append(_computing(loaded, index, node, store, now))
            elif isinstance(node, FeedNode):
                fed[node.name] = node.out
            elif isinstance(node, ConstNode):
                self._blank[node.out] = node.value
            elif isinstance(node, ReadNode):
                self._reads += sum(partition.values[out].nbytes for out in node.outs)
                self._do.append(_reading(loaded, index, node, store))
            elif isinstance(node, WriteNode):
                self._do.append(_writing(loaded, index, node, store))
            elif isinstance(node, LookupNode):
                self._do.append(_looking_up(loaded, index, node, store, now))
            elif isinstance(node, RouteNode | MergeNode):
                self._do.append(_moving(partition, node))
            elif isinstance(node, FetchNode):
                types = [partition.values[value] for value in node.values]
                self._fetched = tuple(zip(node.values, types, strict=True))
        self._fed = [fed.get(name, unused) for name, _ in program.feeds]
        # A size with a name is of no one shape: such feeds are looked at elsewhere.
        self._feeds = [
            (None if kind.symbols else kind.shape, kind.np_dtype)
            for _, kind in program.feeds
        ]

    def takes_less(self, limit_s: float) -> bool:
        """Whether all that it computes has run before, and took less than that.

        What reads much does not, whatever it computes.
        """
        if self._reads > SHORT_BYTES:
            return False
        total = 0.0
        for cost in self._costs:
            if cost.seconds is None:
                return False
            total += cost.seconds
        return total < limit_s

    def takes(self, arrays: Sequence[Any]) -> bool:
        """Whether these are feeds for it, in order; if not, they may still be."""
        if len(arrays) != len(self._feeds):
            return False
        for array, (shape, dtype) in zip(arrays, self._feeds, strict=True):
            if array.shape != shape or array.dtype != dtype:
                return False
        return True

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """Runs a step with these feeds; the fetches are the caller's own."""
        values = self._blank.copy()
        for at, array in zip(self._fed, arrays, strict=False):
            values[at] = array
        for do in self._do:
            do(values)
        return [
            np.array(padded(values[value], type_)) for value, type_ in self._fetched
        ]


def is_plain(loaded: LoadedPartition) -> bool:
    """Whether all of a partition is of what ``AtOnce`` knows."""
    if any(isinstance(run, SpreadExecutable) for run in loaded.executables):
        return False
    partition = loaded.partition
    return not partition.gate and all(map(_is_plain, partition.nodes))


def _is_plain(node: Node) -> bool:
    if isinstance(node, SegmentNode):
        return not (node.row_updates or node.row_reads)
    if isinstance(node, LookupNode):
        return node.peeks
    return isinstance(node, _PLAIN)


def _computing(
    loaded: LoadedPartition,
    index: int,
    node: SegmentNode,
    store: VariableStore,
    now: Callable[[], float],
) -> _Do:
    run, cost = loaded.executables[index], loaded.costs[index]
    assert run is not None  # load_partition compiled it
    updates, reads = loaded.variables[index]

    def do(values: list[Any]) -> None:
        began = now()
        inputs = [values[value] for value in node.inputs]
        results: Sequence[jax.Array]
        if updates or reads:
            results = store.update(updates, reads, lambda *state: run(*state, *inputs))
        else:
            results = run(*inputs)
        # What was fed belongs to the caller again when this returns.
        for out, result in zip(node.outs, results, strict=True):
            result.block_until_ready()  # JAX's function for all: three times as long
            values[out] = result
        cost.learn(now() - began)

    return do


def _looking_up(
    loaded: LoadedPartition,
    index: int,
    node: LookupNode,
    store: VariableStore,
    now: Callable[[], float],
) -> _Do:
    cost = loaded.costs[index]

    def do(values: list[Any]) -> None:
        began = now()
        found = look_up(loaded, node, values, store)()
        for out, rows in zip(node.outs, found, strict=True):
            values[out] = rows
        cost.learn(now() - began)

    return do


def _moving(partition: Partition, node: RouteNode | MergeNode) -> _Do:
    outs = outputs_of(node)

    def do(values: list[Any]) -> None:
        results = moved(node, values.__getitem__, partition.values)
        for out, result in zip(outs, results, strict=True):
            values[out] = result

    return do


def _reading(
    loaded: LoadedPartition, index: int, node: ReadNode, store: VariableStore
) -> _Do:
    _, variables = loaded.variables[index]

    def do(values: list[Any]) -> None:
        for out, value in zip(node.outs, store.read(variables), strict=True):
            values[out] = value

    return do


def _writing(
    loaded: LoadedPartition, index: int, node: WriteNode, store: VariableStore
) -> _Do:
    variables, _ = loaded.variables[index]

    def do(values: list[Any]) -> None:
        new = [values[v] for v in node.values]
        store.write(variables, new, absent=node.absent)

    return do
