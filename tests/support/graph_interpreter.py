"""Graph interpreter: runs all partitions of a program in one thread."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jgraph.errors import FeedError, GraphError, InternalError, UninitializedError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.accumulate import mean, mean_of_rows
from jgraph.plan.program.nodes import (
    AggregateNode,
    CheckNode,
    ConstNode,
    ContributeNode,
    FeedNode,
    FetchNode,
    JoinNode,
    LookupNode,
    MergeNode,
    Node,
    ReadNode,
    RecvNode,
    RouteNode,
    Rows,
    SegmentNode,
    SendNode,
    SplitNode,
    UnpackNode,
    ValueId,
    WriteNode,
    outputs_of,
    runs,
)
from jgraph.plan.program.program import Partition, Program, row_type
from jgraph.plan.program.row_values import (
    at_level,
    cuts_of,
    level_of,
    moved,
    packed,
    padded,
    unpacked,
)

Array: TypeAlias = "np.ndarray[Any, Any]"
Store: TypeAlias = MutableMapping[tuple[str, str], Array]
"""Plain arrays by (container, name)."""

Compiled: TypeAlias = dict[tuple[str, tuple[int, ...]], tuple[Any, bool]]
"""By (digest, donated arguments): executables, and whether they take any size."""


def run_program(
    program: Program,
    store: Store,
    feeds: Mapping[str, Any],
    compiled: Compiled | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> list[Array]:
    """Runs one step of all partitions and returns the fetches.

    Args:
      program: the program.
      store: all variables of all tasks; new values are put into it.
      feeds: plain arrays by feed name.
      compiled: executables to use and add to, for several runs.
      compiler_options: XLA options for all segments.

    Raises:
      FeedError: a feed that a partition needs is missing.
      UninitializedError: a variable that a node needs is not in ``store``.
      InternalError: partitions wait for each other, or a node for a later one.
      GraphError: the program uses a hash table.
    """
    _refuse_hash_tables(program)
    step = _Step(
        program,
        store,
        feeds,
        {} if compiled is None else compiled,
        dict(compiler_options or {}),
    )
    waiting = {p.task: _Running(p) for p in program.partitions}
    while any(not r.done for r in waiting.values()):
        advanced = [step.advance(r) for r in waiting.values()]
        if not any(advanced):
            stuck = {
                t: r.partition.nodes[r.next] for t, r in waiting.items() if not r.done
            }
            raise InternalError(f"partitions wait for each other: {stuck}")
    assert step.fetched is not None, "the driver has no FetchNode"
    return step.fetched


@final
@dataclass(slots=True)
class _Running:
    partition: Partition
    values: dict[ValueId, Any] = field(default_factory=dict)
    next: int = 0

    @property
    def done(self) -> bool:
        return self.next == len(self.partition.nodes)

    def get(self, ids: tuple[ValueId, ...]) -> list[Any]:
        return [self.values[i] for i in ids]

    def padded(self, ids: tuple[ValueId, ...], level: int = 0) -> list[Any]:
        types = self.partition.values
        return [padded(self.values[i], at_level(types[i], level)) for i in ids]

    def key(self, variable: int) -> tuple[str, str]:
        stored = self.partition.variables[variable]
        return stored.container, stored.name


def _refuse_hash_tables(program: Program) -> None:
    for partition in program.partitions:
        for variable in partition.variables:
            if variable.table is not None:
                raise GraphError(
                    f"'{variable.name}' on {partition.task} is a column of the hash "
                    f"table '{variable.table.name}': which rows it has follows from "
                    "the policies of its task's store, and here are plain arrays; run "
                    "the program on a cluster",
                    variable=variable.name,
                )


@final
@dataclass(slots=True)
class _Step:
    program: Program
    store: Store
    feeds: Mapping[str, Any]
    compiled: Compiled
    options: dict[str, Any]
    messages: dict[tuple[TaskName, TaskName, str], list[Any]] = field(
        default_factory=dict
    )
    fetched: list[Array] | None = None

    def advance(self, running: _Running) -> bool:
        """Runs nodes until one must wait; returns whether any ran."""
        start = running.next
        while not running.done:
            node = running.partition.nodes[running.next]
            if (
                isinstance(node, RecvNode)
                and self._key(running, node) not in self.messages
            ):
                break
            self._check_order(running, node)
            self._run(running, node)
            running.next += 1
        return running.next > start

    def _key(self, running: _Running, node: RecvNode) -> tuple[TaskName, TaskName, str]:
        return node.src, running.partition.task, node.key

    def _check_order(self, running: _Running, node: Node) -> None:
        after = getattr(node, "after", ())
        if any(n >= running.next for n in after):
            raise InternalError(f"{node} is to follow nodes that come later")

    def _run(self, running: _Running, node: Node) -> None:
        match node:
            case SegmentNode():
                self._segment(running, node)
            case WriteNode():
                for v, value in zip(node.variables, node.values, strict=True):
                    self.store[running.key(v)] = np.array(running.values[value])
            case ContributeNode():
                self._contribute(running, node)
            case AggregateNode():
                self._average(running, node)
            case SendNode():
                key = (running.partition.task, node.dst, node.key)
                self.messages[key] = [np.array(v) for v in running.get(node.values)]
            case FetchNode():
                self.fetched = [np.array(v) for v in running.padded(node.values)]
            case _:
                self._produce(running, node)

    def _produce(
        self,
        running: _Running,
        node: FeedNode
        | ConstNode
        | ReadNode
        | RecvNode
        | LookupNode
        | RouteNode
        | CheckNode
        | MergeNode
        | SplitNode
        | UnpackNode
        | JoinNode,
    ) -> None:
        values = running.values
        match node:
            case FeedNode():
                if node.name not in self.feeds:
                    raise FeedError(f"feed '{node.name}' is missing", feed=node.name)
                values[node.out] = self.feeds[node.name]
            case ConstNode():
                values[node.out] = node.value
            case ReadNode():
                read = self._packed(running, node.variables, node.packs)
                values.update(zip(node.outs, read, strict=True))
            case RecvNode():
                got = self.messages.pop(self._key(running, node))
                values.update(zip(node.outs, got, strict=True))
            case LookupNode():
                found = [self._rows(running, r) for r in node.rows]
                values.update(zip(node.outs, found, strict=True))
            case _:
                made = moved(node, values.__getitem__, running.partition.values)
                values.update(zip(outputs_of(node), made, strict=True))

    def _rows(self, running: _Running, rows: Rows) -> Array:
        found: Array = self._load(running, rows.variable)[running.values[rows.ids]]
        return found

    # Contributions lie beside their variable, as "name@slot".

    def _contribute(self, running: _Running, node: ContributeNode) -> None:
        slot = int(running.values[node.slot])
        for v, value in zip(node.variables, node.values, strict=True):
            container, name = running.key(v)
            self.store[container, f"{name}@{slot}"] = np.array(running.values[value])

    def _average(self, running: _Running, node: AggregateNode) -> None:
        for v in node.variables:
            self.store[running.key(v)] = mean(self._contributed(running, v))
        for rows in node.row_means:
            names = rows.ids, *rows.rows
            columns = [self._contributed(running, v) for v in names]
            count = running.partition.variables[rows.ids].type.shape[0]
            means = mean_of_rows(list(zip(*columns, strict=True)), count)
            for v, value in zip(names, means, strict=True):
                self.store[running.key(v)] = value

    def _contributed(self, running: _Running, variable: int) -> list[Array]:
        container, name = running.key(variable)
        keys = [
            key
            for key in self.store
            if key[0] == container and key[1].rpartition("@")[0] == name
        ]
        keys.sort(key=lambda key: int(key[1].rpartition("@")[2]))
        return [self.store.pop(key) for key in keys]

    def _load(self, running: _Running, variable: int) -> Array:
        key = running.key(variable)
        if key not in self.store:
            raise UninitializedError(
                f"variable '{key[1]}' on {running.partition.task} has no value yet; "
                "initialize it first",
                variable=key[1],
            )
        return self.store[key]

    def _packed(
        self, running: _Running, variables: Sequence[int], lengths: Sequence[int]
    ) -> list[Array]:
        """Returns values of variables, runs of these lengths as flat arrays."""
        stored = running.partition.variables
        packs, alone = runs(variables, lengths)
        flat = [
            packed(
                [self._load(running, v) for v in pack], [stored[v].type for v in pack]
            )
            for pack in packs
        ]
        return [*flat, *(self._load(running, v) for v in alone)]

    def _segment(self, running: _Running, node: SegmentNode) -> None:
        variables = [
            *self._packed(running, node.updates, node.packs),
            *self._packed(running, node.reads, node.read_packs),
        ]
        owned = [jnp.array(v, copy=True) for v in variables]
        run, has_open_sizes = self._executable(node)
        level = 0
        if has_open_sizes:
            level = level_of(running.partition, node, running.values)
        rows = [
            padded(
                self._rows(running, r), at_level(row_type(running.partition, r), level)
            )
            for r in (*node.row_updates, *node.row_reads)
        ]
        inputs = running.padded(node.inputs, level)
        results = iter(run(*owned, *rows, *inputs))
        packs, alone = runs(node.updates, node.packs)
        for pack in packs:
            types = [running.partition.variables[v].type for v in pack]
            parts = unpacked(np.asarray(next(results)), cuts_of(types))
            for v, part in zip(pack, parts, strict=True):
                self.store[running.key(v)] = np.array(part)
        for v in alone:
            self.store[running.key(v)] = np.array(next(results))
        for r in node.row_updates:
            ids = running.values[r.ids]
            changed = np.array(self._load(running, r.variable))
            changed[ids] = np.asarray(next(results))[: len(ids)]
            self.store[running.key(r.variable)] = changed
        outs = list(results)
        running.values.update(zip(node.outs, outs, strict=True))

    def _executable(self, node: SegmentNode) -> tuple[Any, bool]:
        """Returns the code, and whether it takes any number of rows."""
        rows = len(node.row_updates) + len(node.row_reads)
        updates = len(node.updates) - sum(node.packs) + len(node.packs)
        reads = len(node.reads) - sum(node.read_packs) + len(node.read_packs)
        offset = updates + reads + rows
        donate = (
            *range(updates),
            *(offset + n for n in node.donate),
        )
        if (node.digest, donate) not in self.compiled:
            code = next(s for s in self.program.segments if s.digest == node.digest)
            exported = jax.export.deserialize(bytearray(code.exported))
            call = jax.jit(
                exported.call, donate_argnums=donate, compiler_options=self.options
            )
            sizes = [size for aval in exported.in_avals for size in aval.shape]
            is_open = not all(isinstance(size, int) for size in sizes)
            self.compiled[node.digest, donate] = call, is_open
        return self.compiled[node.digest, donate]
