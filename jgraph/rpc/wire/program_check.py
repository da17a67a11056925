"""Validation of a program that came over the wire.

Only the structure is checked here: names, ids, order, types. Whether its code may run
is the business of who runs it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import assert_never

from jgraph.errors import InvalidProgramError, JGError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.sizes import is_feed_symbol
from jgraph.plan.program.nodes import (
    PACKABLE,
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
    packed_types,
    runs,
)
from jgraph.plan.program.program import Partition, Program
from jgraph.rpc.wire.row_check import check_rows, require, require_types, rows_of
from jgraph.rpc.wire.table_codec import check_table


def check_program(program: Program) -> None:
    """Checks a program, which may hold the partitions of some tasks only.

    Raises:
      InvalidProgramError: naming the program, task and node.
    """
    try:
        _check_task(program.driver)
        _check_unique([p.task for p in program.partitions], "partition of task")
        _check_unique([s.digest for s in program.segments], "segment")
        _check_unique([name for name, _ in program.feeds], "feed")
        for name, type_ in program.feeds:
            known = all(not text or is_feed_symbol(text) for text in type_.symbols)
            require(known, f"feed '{name[:80]}' has a size that nothing can tell")
        for partition in program.partitions:
            _PartitionCheck(program, partition).run()
        _check_messages(program)
    except InvalidProgramError as error:
        raise InvalidProgramError(
            f"program '{program.name[:80]}': {error.message}", **error.details
        ) from None


class _PartitionCheck:
    """The rules of one partition; ``known`` are the values made so far."""

    def __init__(self, program: Program, partition: Partition) -> None:
        self.program = program
        self.partition = partition
        self.digests = {s.digest for s in program.segments}
        self.feeds = dict(program.feeds)
        self.known: set[ValueId] = set()

    def run(self) -> None:
        task = _check_task(self.partition.task)
        names = [(v.container, v.name) for v in self.partition.variables]
        _check_unique(names, f"variable of {task}")
        for variable in self.partition.variables:
            check_table(variable)
        nodes = self.partition.nodes
        _check_unique([n.name for n in nodes if isinstance(n, FeedNode)], "feed")
        fetching = [n for n in nodes if isinstance(n, FetchNode)]
        require(len(fetching) <= 1, f"{task} has {len(fetching)} fetch nodes")
        for index, node in enumerate(nodes):
            try:
                self.node(index, node)
            except InvalidProgramError as error:
                raise InvalidProgramError(
                    f"node {index} ({type(node).__name__}) of {task}: {error.message}",
                    task=task,
                    node=index,
                ) from None

    def node(self, index: int, node: Node) -> None:
        after = getattr(node, "after", ())
        require(all(0 <= i < index for i in after), "it waits for a later node")
        for value in inputs_of(node):
            require(value in self.known, f"value {value} is used before it is made")
        for value in outputs_of(node):
            require(
                0 <= value < len(self.partition.values) and value not in self.known,
                f"value {value} does not exist or is made twice",
            )
            self.known.add(value)
        for variable in _variables(node):
            require(
                0 <= variable < len(self.partition.variables),
                f"variable {variable} does not exist",
            )
        for variable in _used_whole(node):
            stored = self.partition.variables[variable]
            require(stored.table is None, f"hash table '{stored.name[:80]}' is whole")
        self.details(node)

    def details(self, node: Node) -> None:
        """Checks what is particular to the kind of node."""
        match node:
            case FeedNode():
                self.driver_only()
                same = self.feeds.get(node.name) == self.type(node.out)
                require(same, f"'{node.name[:80]}' is no feed of this type")
            case FetchNode():
                self.driver_only()
                count, due = len(node.values), len(self.program.fetches)
                require(count == due, f"{count} values for {due} fetches")
            case ConstNode():
                value = ValueType(node.value.shape, node.value.dtype.name)
                self.same_types([value], [node.out])
            case ReadNode() | WriteNode():
                self.access(node)
            case UnpackNode() | JoinNode():
                self.cut_or_joined(node)
            case SegmentNode():
                self.segment(node)
            case LookupNode() | RouteNode() | CheckNode() | MergeNode() | SplitNode():
                check_rows(self.partition, node)
            case SendNode() | RecvNode():
                self.other_task(node.dst if isinstance(node, SendNode) else node.src)
            case ContributeNode() | AggregateNode():
                self.gated(node)
            case _:
                assert_never(node)

    def access(self, node: ReadNode | WriteNode) -> None:
        stored = self.stored(node.variables)
        if isinstance(node, WriteNode):
            self.same_types(stored, node.values)
            _check_unique(node.variables, "written variable")
            return
        self.packed(node.variables, node.packs)
        self.same_types(packed_types(stored, node.packs), node.outs)

    def segment(self, node: SegmentNode) -> None:
        require(node.digest in self.digests, "its code did not come with the program")
        _check_unique(node.updates, "updated variable")
        for rows in (*node.row_updates, *node.row_reads):
            rows_of(self.partition, rows)
        _check_unique(list(_variables(node)), "variable")
        _check_unique(node.donate, "donated input")
        inside = all(0 <= i < len(node.inputs) for i in node.donate)
        require(inside, "it donates an input that it does not have")
        self.packed(node.updates, node.packs)
        self.packed(node.reads, node.read_packs)

    def packed(self, variables: Sequence[int], packs: Sequence[int]) -> None:
        """Checks that runs of variables can each be one flat array."""
        fits = all(n > 0 for n in packs) and sum(packs) <= len(variables)
        require(fits, "it packs variables that it does not have")
        for run in runs(self.stored(variables), packs)[0]:
            _check_packed(run)

    def cut_or_joined(self, node: UnpackNode | JoinNode) -> None:
        if isinstance(node, JoinNode):
            self.joined(node)
            return
        outs = [self.type(v) for v in node.outs]
        require(bool(outs), "it makes no value")
        _check_packed(outs)
        self.same_types([packed_type(outs)], [node.value])

    def joined(self, node: JoinNode) -> None:
        parts = [self.type(v) for v in node.values]
        require(bool(parts) and all(p.shape for p in parts), "it joins no arrays")
        plain = not any(p.ragged or p.symbols for p in parts)
        require(plain, "it joins arrays whose size is not known")
        rows = sum(p.shape[0] for p in parts)
        whole = replace(parts[0], shape=(rows, *parts[0].shape[1:]))
        self.same_types([whole], [node.out])
        for part, value in zip(parts, node.values, strict=True):
            due = replace(whole, shape=(part.shape[0], *whole.shape[1:]))
            self.same_types([due], [value])

    def gated(self, node: ContributeNode | AggregateNode) -> None:
        require(bool(self.partition.gate), "its partition names no gate")
        _check_unique(list(_variables(node)), "averaged variable")
        if isinstance(node, ContributeNode):
            # Of rows, only those that are there are contributed.
            types = [replace(self.type(v), ragged=False) for v in node.values]
            require_types(types, self.stored(node.variables))
            self.same_types([ValueType((), "int32")], [node.slot])
            return
        for mean in node.row_means:
            ids, *rows = self.stored([mean.ids, *mean.rows])
            kind = len(ids.shape), ids.dtype, ids.shape[1:]
            known = kind in ((1, "int32", ()), (2, "uint32", (2,)))
            require(known, f"ids of type {ids}")
            same = all(type_.shape[:1] == ids.shape[:1] for type_ in rows)
            require(same, "another number of rows than of ids")

    def driver_only(self) -> None:
        driver = self.program.driver
        require(self.partition.task == driver, f"only the driver {driver} has these")

    def other_task(self, task: str) -> None:
        _check_task(task)
        require(task != self.partition.task, "it talks to its own task")

    def type(self, value: ValueId) -> ValueType:
        return self.partition.values[value]

    def stored(self, variables: Sequence[int]) -> list[ValueType]:
        return [self.partition.variables[i].type for i in variables]

    def same_types(self, due: Sequence[ValueType], values: Sequence[ValueId]) -> None:
        require_types([self.type(v) for v in values], due)


def _variables(node: Node) -> Iterator[int]:
    match node:
        case ReadNode() | WriteNode() | ContributeNode():
            return iter(node.variables)
        case AggregateNode():
            return iter(node.all_variables)
        case SegmentNode():
            rows = chain(node.row_updates, node.row_reads)
            return chain(node.updates, node.reads, (r.variable for r in rows))
        case LookupNode():
            return (r.variable for r in node.rows)
        case _:
            return iter(())


def _used_whole(node: Node) -> Iterator[int]:
    if isinstance(node, SegmentNode):
        return chain(node.updates, node.reads)
    return iter(()) if isinstance(node, LookupNode) else _variables(node)


def _check_messages(program: Program) -> None:
    """Every message between partitions that are both here has its two ends."""
    here = {p.task for p in program.partitions}
    sent: dict[tuple[str, str, str], list[ValueType]] = {}
    received: dict[tuple[str, str, str], list[ValueType]] = {}
    for p in program.partitions:
        for node in p.nodes:
            if isinstance(node, SendNode):
                types = [p.values[v] for v in node.values]
                _put(sent, (p.task, node.dst, node.key), types)
            elif isinstance(node, RecvNode):
                types = [p.values[v] for v in node.outs]
                _put(received, (node.src, p.task, node.key), types)
    for src, dst, key in sorted(sent.keys() | received.keys()):
        if src in here and dst in here:
            ends = sent.get((src, dst, key)), received.get((src, dst, key))
            require(
                ends[0] == ends[1] and ends[0] is not None,
                f"message '{key[:80]}' from {src} to {dst} is not sent and received "
                f"with the same types",
            )


def _put(
    table: dict[tuple[str, str, str], list[ValueType]],
    end: tuple[str, str, str],
    types: list[ValueType],
) -> None:
    src, dst, key = end
    require(end not in table, f"message '{key[:80]}' from {src} to {dst} comes twice")
    table[end] = types


def _check_packed(types: Sequence[ValueType]) -> None:
    """Checks that values can lie in one flat array."""
    alike = len({type_.dtype for type_ in types}) == 1 and types[0].dtype in PACKABLE
    known = not any(type_.ragged or type_.symbols for type_ in types)
    require(alike and known, "it packs values that cannot lie in one array")


def _check_task(name: str) -> str:
    try:
        canonical = DeviceSpec.from_string(name).task_name
    except JGError:
        canonical = None
    require(canonical == name, f"'{name[:80]}' is not the name of a task")
    return name


def _check_unique(items: Sequence[object], what: str) -> None:
    seen: set[object] = set()
    for item in items:
        require(item not in seen, f"{what} {str(item)[:80]} comes twice")
        seen.add(item)
