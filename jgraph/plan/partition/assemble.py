"""Assembly of a Program: segments and messages become the nodes of partitions.

Nodes are emitted in an order in which the whole program can run, so each partition
is in topological order, and no set of partitions can wait for each other.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from jgraph._compat import Atom, Equation, Literal, Var
from jgraph.graph.ir import TaskName
from jgraph.plan.analysis.flow import Op
from jgraph.plan.analysis.row_access import RowAccess
from jgraph.plan.lowering.lower import Segment, label_of
from jgraph.plan.lowering.lowered import Lowered
from jgraph.plan.lowering.packed import Pack
from jgraph.plan.partition.buckets import message_groups
from jgraph.plan.partition.packing import Packing
from jgraph.plan.partition.segments import Segmentation, SegmentGroup
from jgraph.plan.program.nodes import (
    CheckNode,
    ConstNode,
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
    ValueType,
    WriteNode,
    inputs_of,
    outputs_of,
    packed_type,
)
from jgraph.plan.program.program import Partition, Program, SegmentCode, StoredVariable
from jgraph.plan.program.types import is_float0, to_plain, value_type


@final
@dataclass(slots=True)
class Builder:
    """One partition while its nodes are emitted."""

    task: TaskName
    nodes: list[Node] = field(default_factory=list)
    types: list[ValueType] = field(default_factory=list)
    ids: dict[Any, ValueId] = field(default_factory=dict)
    variables: dict[int, int] = field(default_factory=dict)
    writer: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)
    made_here: set[ValueId] = field(default_factory=set)
    _alone: int | None = None

    def new(self, type_: ValueType) -> ValueId:
        """Returns the id of a new value."""
        self.types.append(type_)
        return len(self.types) - 1

    def define(self, var: Var, type_: ValueType) -> ValueId:
        """Returns the id that ``var`` has from now on."""
        self.ids[var] = self.new(type_)
        return self.ids[var]

    def variable(self, index: int) -> int:
        """Returns the number that a variable of the graph has here."""
        return self.variables.setdefault(index, len(self.variables))

    def constant(self, atom: Atom, value: Any) -> ValueId:
        """Returns the id of a constant; makes its node once."""
        key: Any = (id(atom), "literal") if isinstance(atom, Literal) else atom
        if key not in self.ids:
            self.ids[key] = self.new(value_type(atom.aval))
            self.nodes.append(ConstNode(_array(atom, value), self.ids[key]))
        return self.ids[key]

    def order(self, reads: set[int], writes: set[int]) -> tuple[int, ...]:
        """Returns the earlier nodes that a node on these variables must follow."""
        node = len(self.nodes)
        after = {self.writer[v] for v in reads | writes if v in self.writer}
        for v in writes:
            after.update(self.readers.pop(v, ()))
            self.writer[v] = node
        for v in reads - writes:
            self.readers.setdefault(v, []).append(node)
        return tuple(sorted(after))

    def order_alone(self) -> tuple[int, ...]:
        """Returns the earlier node that the next one follows if both are alone."""
        last, self._alone = self._alone, len(self.nodes)
        return () if last is None else (last,)


def _array(atom: Atom, value: Any) -> np.ndarray[Any, Any]:
    type_ = value_type(atom.aval)
    if is_float0(atom.aval):
        return np.zeros(type_.shape, type_.np_dtype)
    plain = np.asarray(to_plain(value) if hasattr(value, "dtype") else value)
    return plain.astype(type_.np_dtype)


@final
@dataclass(frozen=True, slots=True)
class Edge:
    """One message of a step: from task, to task, its values and their bytes."""

    src: TaskName
    dst: TaskName
    key: str
    values: tuple[ValueType, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(v.nbytes for v in self.values)


@final
@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """Where a segment runs, and what it computes, for people."""

    task: TaskName
    digest: str
    label: str
    updates: tuple[str, ...]
    body: tuple[Equation, ...] = field(repr=False)

    @property
    def equations(self) -> int:
        """How many equations it has."""
        return len(self.body)


@final
@dataclass(slots=True)
class Assembler:
    """Builds a program from a cut.

    Args:
      cut: the clusters.
      driver: where feeds enter and fetches leave.
      platforms: what each task's segments are exported for; ``("cpu",)`` if unset.
    """

    cut: Segmentation
    driver: TaskName
    platforms: Mapping[TaskName, tuple[str, ...]]
    edges: list[Edge] = field(default_factory=list)
    segments: list[SegmentInfo] = field(default_factory=list)
    _codes: dict[str, SegmentCode] = field(default_factory=dict)
    _lowered: Lowered = field(default_factory=Lowered)
    _builders: dict[TaskName, Builder] = field(default_factory=dict)
    _packing: Packing = field(init=False)

    def __post_init__(self) -> None:
        self._packing = Packing(self.cut, self.driver)

    def program(self) -> Program:
        """Returns the program; fills ``edges`` and ``segments``."""
        flow = self.cut.flow
        self._builder(self.driver)
        self._feeds()
        for position, cluster in enumerate(self.cut.clusters):
            self._cluster(position, cluster)
        self._fetch()
        graph = flow.graph
        return Program(
            name=graph.name,
            driver=self.driver,
            partitions=tuple(
                self._partition(self._builders[t]) for t in sorted(self._builders)
            ),
            segments=tuple(self._codes.values()),
            feeds=tuple((f.name, value_type(f.aval)) for f in graph.feeds),
            fetches=tuple(
                (name, value_type(atom.aval))
                for name, atom in zip(graph.fetches, graph.jaxpr.outvars, strict=True)
            ),
        )

    def _builder(self, task: TaskName) -> Builder:
        return self._builders.setdefault(task, Builder(task))

    def _partition(self, builder: Builder) -> Partition:
        specs = self.cut.flow.graph.variables
        variables = (specs[i] for i in builder.variables)
        return Partition(
            task=builder.task,
            values=tuple(builder.types),
            variables=tuple(
                StoredVariable(v.name, value_type(v.aval), v.container, v.table)
                for v in variables
            ),
            nodes=tuple(_with_donation(builder)),
        )

    def _feeds(self) -> None:
        flow, builder = self.cut.flow, self._builder(self.driver)
        fetched = set(_vars(flow.fetches))
        used = [v for v in flow.feeds if v in self.cut.users or v in fetched]
        for var in used:
            name = flow.graph.feeds[flow.feeds[var]].name
            builder.nodes.append(FeedNode(name, self._define(builder, var)))
        self._send(self.driver, used)

    def _send(self, src: TaskName, values: list[Var]) -> None:
        """Sends values to the other tasks that need them, one message per task.

        Or several, in buckets; what lies in a pack travels in one.
        """
        needs: dict[TaskName, list[Var]] = {}
        for var in dict.fromkeys(values):
            for task in sorted(self._packing.takers(var) - {src}):
                needs.setdefault(task, []).append(var)
        for dst in sorted(needs):
            if not self.cut.buckets:
                self._message(src, dst, needs[dst])
                continue
            packs = self._packing.packs_of(needs[dst])
            alone = [v for v in needs[dst] if v not in self._packing.packs]
            parts: list[Pack] = [*packs, *((v,) for v in alone)]
            for group in message_groups(parts, self._nbytes, self._first_user(dst)):
                self._message(src, dst, [v for part in group for v in part])

    def _nbytes(self, values: Iterable[Var]) -> int:
        return sum(self.cut.flow.type_of(v).nbytes for v in values)

    def _first_user(self, task: TaskName) -> Callable[[Pack], int]:
        """Returns what gives the first cluster of a task that takes one of some values.

        What is only fetched comes last.
        """
        clusters, users = self.cut.clusters, self.cut.users

        def first(values: Pack) -> int:
            found = (u for v in values for u in users.get(v, ()))
            return min(
                (u for u in found if clusters[u].task == task), default=len(clusters)
            )

        return first

    def _message(self, src: TaskName, dst: TaskName, values: list[Var]) -> None:
        flow, key = self.cut.flow, f"m{len(self.edges)}"
        sender, receiver = self._builder(src), self._builder(dst)
        packs = self._packing.packs_of(values)
        alone = [v for v in values if v not in self._packing.packs]
        sent = [sender.ids[v] for v in (*packs, *alone)]
        sender.nodes.append(SendNode(dst, key, tuple(sent)))
        received = [self._define_pack(receiver, pack) for pack in packs]
        received += [self._define(receiver, v) for v in alone]
        receiver.nodes.append(RecvNode(src, key, tuple(received)))
        for pack in packs:
            if self._packing.is_cut(pack, dst):
                outs = tuple(self._define(receiver, v) for v in pack)
                receiver.nodes.append(UnpackNode(receiver.ids[pack], outs))
        types = tuple(flow.type_of(v) for v in values)
        self.edges.append(Edge(src, dst, key, types))

    def _define_pack(self, builder: Builder, pack: Pack) -> ValueId:
        """Returns the id that the flat array of some values has from now on."""
        types = [self.cut.flow.type_of(v) for v in pack]
        builder.ids[pack] = builder.new(packed_type(types))
        return builder.ids[pack]

    def _value(self, builder: Builder, atom: Atom) -> ValueId:
        """Returns the id of a value at a partition; makes a constant's node."""
        if isinstance(atom, Literal):
            return builder.constant(atom, atom.val)
        if atom in self.cut.flow.consts:
            return builder.constant(atom, self.cut.flow.consts[atom])
        return builder.ids[atom]

    def _cluster(self, position: int, cluster: SegmentGroup) -> None:
        builder = self._builder(cluster.task)
        ops = [self.cut.flow.ops[i] for i in cluster.ops]
        leaving = self._packing.leaving[position]
        if cluster.kind == "read":
            self._read(builder, ops)
        elif cluster.kind == "lookup":
            self._lookup(builder, ops)
        elif cluster.kind not in {"segment", "alone"}:
            for op in ops:
                self._move(builder, op)
        elif cluster.only_writes(self.cut.flow):
            pairs = [
                (op.writes[0], self._value(builder, op.equation.invars[1]))
                for op in ops
            ]
            self._write(builder, pairs, self._awaited(builder, cluster))
        else:
            self._segment(builder, position, cluster)
        self._send(cluster.task, leaving)

    def _define(self, builder: Builder, var: Var) -> ValueId:
        return builder.define(var, self.cut.flow.type_of(var))

    def _read(self, builder: Builder, ops: list[Op]) -> None:
        read = {op.equation.outvars[0]: op.reads[0][0] for op in ops}
        after = builder.order(set(read.values()), set())
        packs = self._packing.packs_of(read)
        alone = [v for v in read if v not in self._packing.packs]
        variables = [read[v] for v in (*(v for pack in packs for v in pack), *alone)]
        ids = [self._define_pack(builder, pack) for pack in packs]
        ids += [self._define(builder, v) for v in alone]
        builder.nodes.append(
            ReadNode(
                tuple(builder.variable(v) for v in variables),
                tuple(ids),
                after,
                tuple(map(len, packs)),
            )
        )

    def _lookup(self, builder: Builder, ops: list[Op]) -> None:
        after = builder.order({op.reads[0][0] for op in ops}, set())
        accesses = [(op.reads[0][0], op.rows) for op in ops if op.rows is not None]
        rows = self._rows(builder, accesses)
        outs = tuple(self._define(builder, op.equation.outvars[0]) for op in ops)
        builder.nodes.append(LookupNode(rows, outs, after))

    def _rows(
        self, builder: Builder, accesses: Iterable[RowAccess]
    ) -> tuple[Rows, ...]:
        return tuple(Rows(builder.variable(v), builder.ids[ids]) for v, ids in accesses)

    def _move(self, builder: Builder, op: Op) -> None:
        """Emits the node of a join, or of a primitive of ``jgraph.graph.rows.rows``."""
        params, operands = op.equation.params, op.equation.invars
        values = [self._value(builder, a) for a in operands]
        outs = tuple(self._define(builder, v) for v in op.equation.outvars)
        if op.equation.primitive.name == "checked_ids":
            builder.nodes.append(
                CheckNode(
                    *(values[0], params["rows"], params["feature"]),
                    starts=tuple(start for start, _ in params["part"]),
                    ends=tuple(end for _, end in params["part"]),
                    outs=outs,
                )
            )
            return
        if op.equation.primitive.name == "concatenate":
            builder.nodes.append(JoinNode(tuple(values), outs[0]))
            return
        shards = params["layout"].shards
        match op.equation.primitive.name:
            case "route_rows":
                node: Node = RouteNode(
                    ids=values[0],
                    layout=params["layout"],
                    feature=params["feature"],
                    drop=params["drop"],
                    positions=outs[0],
                    local=outs[1:],
                    most=params["most"],
                )
            case "merge_rows":
                node = MergeNode(
                    tuple(values[:shards]), tuple(values[shards:]), outs[0]
                )
            case _:
                node = SplitNode(values[0], tuple(values[1:]), outs)
        builder.nodes.append(node)

    def _awaited(self, builder: Builder, cluster: SegmentGroup) -> set[int]:
        """Returns the nodes that make what a cluster waits for and does not take."""
        values = [v for i in cluster.roots for v in self.cut.awaited.get(i, ())]
        ids, packs = builder.ids, self._packing.packs
        wanted = {ids[v] if v in ids else ids[packs[v]] for v in values}
        if not wanted:
            return set()
        return {
            n for n, node in enumerate(builder.nodes) if wanted & {*outputs_of(node)}
        }

    def _write(
        self,
        builder: Builder,
        pairs: list[tuple[int, ValueId]],
        awaited: Collection[int] = (),
    ) -> None:
        after = builder.order(set(), {v for v, _ in pairs})
        after = tuple(sorted({*after, *awaited}))
        variables = tuple(builder.variable(v) for v, _ in pairs)
        values = tuple(value for _, value in pairs)
        builder.nodes.append(WriteNode(variables, values, after))

    def _segment(self, builder: Builder, position: int, cluster: SegmentGroup) -> None:
        packed = self._packing.segment(position)
        segment, rest = packed.segment, packed.rest
        code = self._lowered.code(
            self.cut.flow, packed, self.platforms.get(cluster.task, ("cpu",))
        )
        self._codes.setdefault(code.digest, code)
        inputs = [builder.ids[pack] for pack in packed.packs_in]
        inputs += [self._value(builder, v) for v in rest.inputs]
        row_updates = self._rows(builder, segment.row_updates)
        row_reads = self._rows(builder, segment.row_reads)
        after = builder.order(
            {*segment.reads, *(v for v, _ in segment.row_reads)},
            {*segment.updates, *(v for v, _ in segment.row_updates)},
        )
        if cluster.kind == "alone":
            after = (*after, *builder.order_alone())
        after = tuple(sorted({*after, *self._awaited(builder, cluster)}))
        outs = [self._define_pack(builder, pack) for pack in packed.packs_out]
        leaving = len(self._packing.leaving[position])
        first = sum(map(len, packed.packs_out))
        outs += [
            self._define(builder, a)
            if n < leaving and not isinstance(a, Literal)
            else builder.new(value_type(a.aval))
            for n, a in enumerate(segment.outs[first:], first)
        ]
        builder.made_here.update(outs)
        builder.nodes.append(
            SegmentNode(
                digest=code.digest,
                updates=tuple(builder.variable(v) for v in packed.updates),
                reads=tuple(builder.variable(v) for v in packed.reads),
                inputs=tuple(inputs),
                outs=tuple(outs),
                after=after,
                row_updates=row_updates,
                row_reads=row_reads,
                packs=tuple(map(len, packed.update_runs)),
                read_packs=tuple(map(len, packed.read_runs)),
            )
        )
        self._note(cluster, segment, code)
        single = outs[len(packed.packs_out) :]
        pairs = [(v, single[n - first]) for v, n in segment.blind]
        pairs += [(v, self._value(builder, value)) for v, value in segment.passed]
        if pairs:
            self._write(builder, pairs)

    def _note(self, cluster: SegmentGroup, segment: Segment, code: SegmentCode) -> None:
        specs = self.cut.flow.graph.variables
        written = [
            *segment.updates,
            *(v for v, _ in segment.row_updates),
            *(v for v, _ in (*segment.blind, *segment.passed)),
        ]
        self.segments.append(
            SegmentInfo(
                cluster.task,
                code.digest,
                label_of([op.equation for op in segment.ops], call=True),
                tuple(specs[v].name for v in written),
                tuple(op.equation for op in segment.ops),
            )
        )

    def _fetch(self) -> None:
        builder = self._builder(self.driver)
        values = tuple(self._value(builder, a) for a in self.cut.flow.fetches)
        builder.nodes.append(FetchNode(values))


def _vars(atoms: tuple[Atom, ...]) -> list[Var]:
    return [a for a in atoms if not isinstance(a, Literal)]


def _with_donation(builder: Builder) -> list[Node]:
    """Marks the inputs whose buffers a segment may reuse for its results.

    Only what an earlier segment of this partition made and nobody else uses; what
    came over the wire may lie in the transport's memory. One per result of the same
    type, because JAX warns about buffers it has no use for.
    """
    uses = Counter(v for node in builder.nodes for v in inputs_of(node))
    nodes: list[Node] = []
    for node in builder.nodes:
        if not isinstance(node, SegmentNode):
            nodes.append(node)
            continue
        room = Counter(builder.types[v] for v in node.outs)
        donate = []
        for position, value in enumerate(node.inputs):
            type_ = builder.types[value]
            if value in builder.made_here and uses[value] == 1 and room[type_]:
                room[type_] -= 1
                donate.append(position)
        nodes.append(replace(node, donate=tuple(donate)))
    return nodes
