"""Segmentation: placed operations are grouped, one group per segment-to-be.

A cluster is a set of operations of one task that will run as one unit. Levels count
the task changes between an operation and the end of the step; operations of equal
task and level are a cluster, and clusters of one task merge while no cycle arises; then
``jgraph.plan.partition.overlap`` cuts those that would keep long work waiting, and
``jgraph.plan.partition.buckets`` those whose large values can travel meanwhile.

What is free, and a read of a variable for use on its own task, belongs to no cluster:
every cluster that needs it makes it again. A read is put off in this way if the write
that ends what it reads is the last one, and nothing follows from that: the write can
wait. Two such writes that each need what the other one ends are made together.

What computes a variable's new value from its old one, on the variable's task, is made
together as well: the cluster that writes a variable also reads it, at one moment, and
no concurrent update is lost. Only what another task computes from in between cannot be.

An operation that is to run alone (``jgraph.graph.tracing.alone``) is a cluster of its
own, and those of one task follow one another in program order.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from jgraph._compat import Literal, Var
from jgraph.errors import InternalError
from jgraph.graph.ir import TaskName
from jgraph.graph.sharding import PAGE_BYTES
from jgraph.plan.analysis.flow import Flow, Op, Version
from jgraph.plan.partition.buckets import Crossing, in_buckets
from jgraph.plan.partition.id_checks import awaited_checks
from jgraph.plan.partition.merge import Kind, circles, merge, topological
from jgraph.plan.partition.overlap import overlap
from jgraph.plan.partition.updates import local_ways

JOIN_BYTES: Final = 1 << 20
"""Less is copied in a fraction of a millisecond."""


@final
@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Operations of one task that run as one unit.

    Attributes:
      task: where.
      kind: ``read`` for whole reads whose values leave the task, ``lookup`` for such
        reads of rows, ``route``, ``merge`` and ``split`` for what moves rows,
        ``join`` for what puts parts of variables together, see ``part_joins``,
        ``alone`` for one operation that says so, else ``segment``.
      ops: indices, in program order, with the copies of what is repeated.
      roots: the ops that are not copies.
    """

    task: TaskName
    kind: Kind
    ops: tuple[int, ...]
    roots: frozenset[int]

    def only_writes(self, flow: Flow) -> bool:
        """Whether all that it does is to write whole variables: no code is needed."""
        return all(flow.ops[i].is_whole_write for i in self.ops)


@final
@dataclass(frozen=True, slots=True)
class Segmentation:
    """Clusters in an order in which they can run, and who needs which value.

    Attributes:
      flow: the graph that was cut.
      clusters: in topological order.
      users: positions of the clusters that take each value from outside.
      awaited: values that an op must wait for and does not take, see ``id_checks``.
      buckets: large values travel in several messages, in the order of their users.
    """

    flow: Flow
    clusters: tuple[SegmentGroup, ...]
    users: Mapping[Var, tuple[int, ...]]
    awaited: Mapping[int, Sequence[Var]]
    buckets: bool


def cut(
    flow: Flow,
    task: Mapping[int, TaskName],
    driver: TaskName,
    *,
    buckets: bool,
) -> Segmentation:
    """Returns the clusters of a placed graph.

    Args:
      flow: the analyzed graph.
      task: from ``place``.
      driver: where fetches leave; what is free and fetched is made there.
      buckets: whether segments become several, so that large values travel while they
        compute.
    """
    joins = frozenset() if buckets else part_joins(flow, task)
    links = _links(flow, task, driver, joins)
    merged = merge(*links.quotient(links.levels()))
    together = {i: unit for unit in links.members.values() for i in unit}
    pieces = overlap(flow, merged, links.before, links.after, together)
    if buckets:
        pieces = in_buckets(flow, pieces, *links.crossing(), links.before, together)
    return links.finish(pieces, buckets=buckets)


def part_joins(flow: Flow, task: Mapping[int, TaskName]) -> frozenset[int]:
    """Returns the operations that put large parts of variables together.

    A parameter that is cut over several tasks is needed whole. XLA would copy all of it
    into memory of its own; the runtime maps parts that lie in shared memory one behind
    the other, where each ends with a page. Some part is of another task: what is here
    may as well be read where it is used.

    Args:
      flow: the analyzed graph.
      task: of each operation.
    """
    return frozenset(
        op.index
        for op in flow.ops.values()
        if op.equation.primitive.name == "concatenate" and _is_join(flow, task, op)
    )


def _is_join(flow: Flow, task: Mapping[int, TaskName], op: Op) -> bool:
    operands = op.equation.invars
    if op.equation.params["dimension"] or op.index in flow.free:
        return False
    if any(isinstance(v, Literal) or v not in flow.producer for v in operands):
        return False
    makers = [flow.producer[v] for v in operands]
    if not all(flow.ops[maker].is_whole_read for maker in makers):
        return False
    if all(task[maker] == task[op.index] for maker in makers):
        return False
    sizes = [flow.type_of(v).nbytes for v in operands]
    in_pages = not any(size % PAGE_BYTES for size in sizes[:-1])
    return in_pages and sum(sizes) >= JOIN_BYTES


def _links(
    flow: Flow, task: Mapping[int, TaskName], driver: TaskName, joins: frozenset[int]
) -> "_Links":
    ways = local_ways(flow, task)
    links = _Links(flow, dict(task), driver, ways, joins)
    apart = links.led_away()
    if apart:
        ways = {i: way for i, way in ways.items() if i not in apart}
        links = _Links(flow, dict(task), driver, ways, joins)
    if links.tangled():
        raise InternalError.of(
            f"operations of '{flow.graph.name}' that wait for each other"
        )
    return links


@dataclass(slots=True)
class _Links:
    """The order between the ops that clusters are made of (roots).

    Attributes:
      ways: variables that each op of an update made together computes anew.
      joins: ops that are no code, but put parts together.
      unit: for each root, the number of what it is made together with.
      members: the roots of each unit, alone or not.
    """

    flow: Flow
    task: dict[int, TaskName]
    driver: TaskName
    ways: Mapping[int, int]
    joins: frozenset[int]
    roots: list[int] = field(default_factory=list)
    after: dict[int, set[int]] = field(default_factory=dict)
    before: dict[int, set[int]] = field(default_factory=dict)
    awaited: dict[int, list[Var]] = field(default_factory=dict)
    unit: dict[int, int] = field(default_factory=dict)
    members: dict[int, set[int]] = field(default_factory=dict)
    _copied: dict[int, set[int]] = field(default_factory=dict)
    _inputs: dict[int, list[Var]] = field(default_factory=dict)
    _reread: set[int] = field(default_factory=set)
    _followed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._followed = self._find_followed()
        self._find_reread()
        self._find_roots()
        self.after = {i: set() for i in self.roots}
        self.before = {i: set() for i in self.roots}
        for index in self.roots:
            for var in self.inputs(index):
                self._link(self.flow.producer.get(var), index)
        self._order_state()
        self._order_alone()
        self._order_checks()
        self._find_units()

    def inputs(self, index: int) -> list[Var]:
        """Returns the values that a root and its copies take from others."""
        if index not in self._inputs:
            self._inputs[index] = self._find_inputs(index)
        return self._inputs[index]

    def _find_inputs(self, index: int) -> list[Var]:
        members = [index, *sorted(self.copies([index]))]
        inputs = [v for i in members for v in self.flow.inputs(self.flow.ops[i])]
        return [
            v
            for v in dict.fromkeys(inputs)
            if self.flow.producer.get(v) not in members[1:]
        ]

    def copies(self, roots: Iterable[int]) -> set[int]:
        """Returns the ops that roots of one task make again for themselves."""
        found: set[int] = set()
        for root in roots:
            if root not in self._copied:
                self._copied[root] = self._find_copies(root)
            found |= self._copied[root]
        return found

    def _find_copies(self, root: int) -> set[int]:
        found: set[int] = set()
        todo = [root]
        here, way = self.task[root], self.ways.get(root, 0)
        while todo:
            op = self.flow.ops[todo.pop()]
            # What moves rows is no code that could read a variable.
            reads = not self.flow.moves_rows(op) and op.index not in self.joins
            for var in self.flow.inputs(op):
                producer = self.flow.producer.get(var)
                if producer is None or producer in found:
                    continue
                if producer in self.flow.free or (
                    reads
                    and self.task[producer] == here
                    and (producer in self._reread or self._begins(producer, way))
                ):
                    found.add(producer)
                    todo.append(producer)
        return found

    def _begins(self, index: int, way: int) -> bool:
        """Whether an op only reads a variable that ``way`` computes anew."""
        if index not in self.ways or self.flow.ops[index].writes:
            return False
        return any(way >> v & 1 for v, _ in self.flow.ops[index].reads)

    def kind(self, index: int) -> Kind:
        op = self.flow.ops[index]
        if op.is_whole_read:
            return "read"
        if not op.writes and self.flow.is_row_access(op):
            return "lookup"
        if op.equation.primitive.name == "alone":
            return "alone"
        if index in self.joins:
            return "join"
        return self.flow.moves_rows(op) or "segment"

    def _find_reread(self) -> None:
        last = self._last_writes()
        for op in self.flow.ops.values():
            read = op.reads and op.equation.primitive.name == "get"
            if read and all(self._stays_readable(v, last) for v in op.reads):
                self._reread.add(op.index)

    def _last_writes(self) -> dict[int, list[int]]:
        writes: dict[int, list[int]] = {}
        for op in self.flow.ops.values():
            for variable in op.writes:
                writes.setdefault(variable, []).append(op.index)
        return writes

    def _stays_readable(self, version: Version, writes: dict[int, list[int]]) -> bool:
        """Whether a read of this version may be put off to any of its users.

        So it is when the next write is the last one and nothing depends on it: it can
        wait for every reader.
        """
        variable, written = version
        later = [w for w in writes.get(variable, ()) if w > written]
        return not later or (len(later) == 1 and later[0] not in self._followed)

    def _find_followed(self) -> set[int]:
        """Returns the writes whose results something takes or reads."""
        ops = self.flow.ops.values()
        inputs = {v for op in ops for v in self.flow.inputs(op)}
        inputs |= {a for a in self.flow.fetches if not isinstance(a, Literal)}
        read = {written for op in ops for _, written in op.reads}
        return {
            op.index
            for op in ops
            if op.writes and (op.index in read or inputs & set(op.equation.outvars))
        }

    def _find_roots(self) -> None:
        begin = {i for i, way in self.ways.items() if self._begins(i, way)}
        optional = self._reread | self.flow.free | begin
        wanted = set()
        for atom in self.flow.fetches:
            producer = (
                None if isinstance(atom, Literal) else self.flow.producer.get(atom)
            )
            if producer is not None:
                wanted.add(producer)
            if producer in self.flow.free:
                self.task[producer] = self._home_of_free(producer)
        todo = [i for i in self.flow.ops if i not in optional or i in wanted]
        while todo:  # a read that is wanted may want another: that of its rows' ids
            makers = {self.flow.producer.get(v, -1) for v in self.inputs(todo.pop())}
            todo += (makers & optional) - wanted
            wanted |= makers
        self.roots = [i for i in self.flow.ops if i not in optional or i in wanted]

    def _home_of_free(self, index: int) -> TaskName:
        """Returns where a fetched free op is made: with the number it follows from."""
        sources = self.flow.sources(self.flow.inputs(self.flow.ops[index]))
        makers = [self.flow.producer.get(v, -1) for v in sources]
        computed = [p for p in makers if p >= 0 and not self.flow.ops[p].reads]
        return self.task[computed[0]] if computed else self.driver

    def _link(self, first: int | None, then: int) -> None:
        if first is not None and first != then:
            self.after[first].add(then)
            self.before[then].add(first)

    def _order_state(self) -> None:
        writes = self._last_writes()
        for index in self.roots:
            for variable, written in self._state_reads(index):
                if written >= 0:
                    self._link(written, index)
                later = [w for w in writes.get(variable, ()) if w > written]
                if later:
                    self._link(index, later[0])
        for indices in writes.values():
            for first, then in itertools.pairwise(indices):
                self._link(first, then)

    def _order_alone(self) -> None:
        last: dict[TaskName, int] = {}
        for index in self.roots:
            if self.kind(index) == "alone":
                self._link(last.get(self.task[index]), index)
                last[self.task[index]] = index

    def _order_checks(self) -> None:
        after = self._with_updates()
        self.awaited = awaited_checks(
            *(self.flow, self.task, after, self.inputs),
            lambda index: self.kind(index) in {"segment", "alone"},
        )
        for index, values in self.awaited.items():
            for value in values:
                self._link(self.flow.producer[value], index)

    def _state_reads(self, index: int) -> set[Version]:
        ops = [self.flow.ops[i] for i in (index, *self.copies([index]))]
        return {read for op in ops for read in op.reads}

    def _find_units(self) -> None:
        """Finds the ops of one update, and what waits for each other."""
        for members in circles(self._with_updates()):
            number = min(members)
            self.members[number] = members
            self.unit |= dict.fromkeys(members, number)

    def _with_updates(self) -> dict[int, set[int]]:
        """Returns what comes after each root; in one update, also what comes before."""
        joined: dict[int, set[int]] = {i: set() for i in self.roots}
        for index in self.roots:
            way = self.ways.get(index, 0)
            for var in self.inputs(index) if way else ():
                maker = self.flow.producer.get(var, -1)
                if way & self.ways.get(maker, 0) and not self._begins(maker, way):
                    joined[index].add(maker)
                    joined[maker].add(index)
        return {i: self.after[i] | joined[i] for i in self.roots}

    def tangled(self) -> list[set[int]]:
        """Returns the units that cannot be one segment."""
        return [
            members
            for members in self.members.values()
            if len(members) > 1
            and not all(self._fits(i, self.task[min(members)]) for i in members)
        ]

    def led_away(self) -> set[int]:
        """Returns the ops of updates that cannot be in one segment with the rest.

        What is on another task, or is no code, needs them, and the rest needs that.
        """
        found: set[int] = set()
        for members in self.tangled():
            for task in {self.task[i] for i in members}:
                away = {i for i in members if not self._fits(i, task)}
                todo = [*away]
                while todo:
                    new = (self.before[todo.pop()] & members) - away
                    away |= new
                    todo += new
                found |= {i for i in away if self.task[i] == task and i in self.ways}
        return found

    def _fits(self, index: int, task: TaskName) -> bool:
        """Whether a root can be part of a segment on ``task``."""
        is_code = self.kind(index) in {"segment", "read", "lookup"}
        return is_code and self.task[index] == task

    def _place(self, unit: int) -> tuple[TaskName, Kind]:
        members = self.members[unit]
        first = min(members)
        return self.task[first], self.kind(first) if len(members) == 1 else "segment"

    def _between_units(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """Returns the order between units: what comes after each, and before."""
        after: dict[int, set[int]] = {unit: set() for unit in self.members}
        before: dict[int, set[int]] = {unit: set() for unit in self.members}
        for index in self.roots:
            first = self.unit[index]
            for then in (self.unit[s] for s in self.after[index]):
                if then != first:
                    after[first].add(then)
                    before[then].add(first)
        return after, before

    def levels(self) -> dict[int, int]:
        """Returns, per root, the most task changes between it and the step's end."""
        after, before = self._between_units()
        level: dict[int, int] = {}
        for unit in reversed(topological(before)):
            here = self._place(unit)
            level[unit] = max(
                (
                    level[s] + (here[1] == "alone" or self._place(s) != here)
                    for s in after[unit]
                ),
                default=0,
            )
        self._write_early(level, before)
        return {i: level[self.unit[i]] for i in self.roots}

    def _write_early(
        self, level: dict[int, int], before: Mapping[int, Iterable[int]]
    ) -> None:
        """Moves writes to the level of the op that makes their value.

        A segment that computes a variable's new value should write it too. It cannot
        where someone still needs the old value later.
        """
        for unit, members in self.members.items():
            op = self.flow.ops[min(members)]
            value = op.equation.invars[1] if op.is_whole_write else None
            if len(members) > 1 or value is None or isinstance(value, Literal):
                continue
            producer = self.unit.get(self.flow.producer.get(value, -1), unit)
            if self._place(producer) != self._place(unit):
                continue
            if all(level[b] >= level[producer] for b in before[unit]):
                level[unit] = level[producer]

    def quotient(
        self, levels: dict[int, int]
    ) -> tuple[list[tuple[TaskName, Kind, int]], list[set[int]], list[set[int]]]:
        """Returns (key, members, successors) of the first clusters."""
        key_of = {i: (*self._place(self.unit[i]), levels[i]) for i in self.roots}
        keys = sorted(set(key_of.values()), key=lambda k: (-k[2], k[1], k[0]))
        position = {key: n for n, key in enumerate(keys)}
        cluster = {i: position[key] for i, key in key_of.items()}
        members: list[set[int]] = [set() for _ in keys]
        successors: list[set[int]] = [set() for _ in keys]
        for index in self.roots:
            members[cluster[index]].add(index)
            successors[cluster[index]].update(cluster[s] for s in self.after[index])
        for n, found in enumerate(successors):
            found.discard(n)
        return keys, members, successors

    def crossing(self) -> tuple[Crossing, Crossing]:
        """Returns the bytes that roots take from other tasks, and those they give."""
        arriving, leaving = Crossing(), Crossing()
        takers: dict[Var, set[TaskName]] = {}
        for index in self.roots:
            here = self.task[index]
            for value in self.inputs(index):
                tasks, maker = takers.setdefault(value, set()), self._maker(value)
                if here not in tasks and maker != here:
                    arriving.add(index, self.flow.type_of(value).nbytes, [maker])
                tasks.add(here)
        for atom in self.flow.fetches:
            if not isinstance(atom, Literal):
                takers.setdefault(atom, set()).add(self.driver)
        for value, tasks in takers.items():
            index = self.flow.producer.get(value, -1)
            others = tasks - {self._maker(value)}
            if others and index in self.after:
                leaving.add(index, self.flow.type_of(value).nbytes, others)
        return arriving, leaving

    def _maker(self, value: Var) -> TaskName:
        """Returns the task that makes a value; what is fed comes from the driver."""
        index = self.flow.producer.get(value, -1)
        return self.task[index] if index in self.after else self.driver

    def finish(
        self, merged: list[tuple[TaskName, Kind, set[int]]], *, buckets: bool
    ) -> Segmentation:
        """Returns the cut, with the clusters in an order in which they can run."""
        home = {i: n for n, (_, _, ops) in enumerate(merged) for i in ops}
        before: dict[int, set[int]] = {n: set() for n in range(len(merged))}
        for index in self.roots:
            before[home[index]].update(home[b] for b in self.before[index])
        for n, found in before.items():
            found.discard(n)
        order = topological(before)
        rank = {n: position for position, n in enumerate(order)}
        clusters = []
        for n in order:
            where, kind, roots = merged[n]
            ops = tuple(sorted(roots | self.copies(roots)))
            clusters.append(SegmentGroup(where, kind, ops, frozenset(roots)))
        home = {i: rank[n] for i, n in home.items()}
        return Segmentation(
            self.flow, tuple(clusters), self._users(home), self.awaited, buckets
        )

    def _users(self, home: dict[int, int]) -> dict[Var, tuple[int, ...]]:
        users: dict[Var, set[int]] = {}
        for index in self.roots:
            for var in (*self.inputs(index), *self.awaited.get(index, ())):
                producer = self.flow.producer.get(var)
                if producer is None or home[producer] != home[index]:
                    users.setdefault(var, set()).add(home[index])
        return {v: tuple(sorted(u)) for v, u in users.items()}
