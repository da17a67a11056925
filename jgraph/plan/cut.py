"""Cutting: placed operations become clusters, one per segment-to-be.

A cluster is a set of operations of one task that will run as one unit. Levels count
the task changes between an operation and the end of the step; operations of equal
task and level are a cluster, and clusters of one task merge while no cycle arises; then
``jgraph.plan.overlap`` cuts those that would keep long work waiting.

What is free, and a read of a variable for use on its own task, belongs to no cluster:
every cluster that needs it makes it again. Hence the cluster that writes a variable
also reads it, at one moment, and no concurrent update is lost.

An operation that is to run alone (``jgraph.graph.alone``) is a cluster of its own, and
those of one task follow one another in program order.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from jgraph._compat import Literal, Var
from jgraph.graph.ir import TaskName
from jgraph.plan.flow import Flow, Version
from jgraph.plan.id_checks import awaited_checks
from jgraph.plan.merge import Kind, merge, topological
from jgraph.plan.overlap import overlap


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """Operations of one task that run as one unit.

    Attributes:
      task: where.
      kind: ``read`` for whole reads whose values leave the task, ``lookup`` for such
        reads of rows, ``route``, ``merge`` and ``split`` for what moves rows,
        ``alone`` for one operation that says so, else ``segment``.
      ops: indices, in program order, with the copies of what is repeated.
      roots: the ops that are not copies.
    """

    task: TaskName
    kind: Kind
    ops: tuple[int, ...]
    roots: frozenset[int]


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """Clusters in an order in which they can run, and who needs which value.

    Attributes:
      flow: the graph that was cut.
      clusters: in topological order.
      users: positions of the clusters that take each value from outside.
      awaited: values that an op must wait for and does not take, see ``id_checks``.
    """

    flow: Flow
    clusters: tuple[Cluster, ...]
    users: Mapping[Var, tuple[int, ...]]
    awaited: Mapping[int, Sequence[Var]]


def cut(flow: Flow, task: Mapping[int, TaskName], driver: TaskName) -> Cut:
    """Returns the clusters of a placed graph.

    Args:
      flow: the analyzed graph.
      task: from ``place``.
      driver: where fetches leave; what is free and fetched is made there.
    """
    links = _Links(flow, dict(task), driver)
    levels = links.levels()
    merged = merge(*links.quotient(levels))
    return links.finish(overlap(flow, merged, links.before, links.after))


@dataclass(slots=True)
class _Links:
    """The order between the ops that clusters are made of (roots)."""

    flow: Flow
    task: dict[int, TaskName]
    driver: TaskName
    roots: list[int] = field(default_factory=list)
    after: dict[int, set[int]] = field(default_factory=dict)
    before: dict[int, set[int]] = field(default_factory=dict)
    awaited: dict[int, list[Var]] = field(default_factory=dict)
    _reread: set[int] = field(default_factory=set)
    _followed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._followed = self._find_followed()
        self._find_reread()
        self._find_roots()
        self.after = {i: set() for i in self.roots}
        self.before = {i: set() for i in self.roots}
        for index in self.roots:
            for var in self.taken(index):
                self._link(self.flow.producer.get(var), index)
        self._order_state()
        self._order_alone()
        self._order_checks()

    def taken(self, index: int) -> list[Var]:
        """Returns the values that a root and its copies take from others."""
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
        todo = list(roots)
        here = self.task[todo[0]]
        while todo:
            op = self.flow.ops[todo.pop()]
            # What moves rows is no code that could read a variable.
            reads = not self.flow.moves_rows(op)
            for var in self.flow.inputs(op):
                producer = self.flow.producer.get(var)
                if producer is None or producer in found:
                    continue
                if producer in self.flow.free or (
                    reads and producer in self._reread and self.task[producer] == here
                ):
                    found.add(producer)
                    todo.append(producer)
        return found

    def kind(self, index: int) -> Kind:
        op = self.flow.ops[index]
        if op.is_whole_read:
            return "read"
        if not op.writes and self.flow.is_row_access(op):
            return "lookup"
        if op.equation.primitive.name == "alone":
            return "alone"
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
        if not later:
            return True
        if len(later) != 1:
            return False
        whole = self.flow.ops[later[0]].is_whole_write
        return whole or later[0] not in self._followed

    def _find_followed(self) -> set[int]:
        """Returns the writes whose results something takes or reads."""
        ops = self.flow.ops.values()
        taken = {v for op in ops for v in self.flow.inputs(op)}
        taken |= {a for a in self.flow.fetches if not isinstance(a, Literal)}
        read = {written for op in ops for _, written in op.reads}
        return {
            op.index
            for op in ops
            if op.writes and (op.index in read or taken & set(op.equation.outvars))
        }

    def _find_roots(self) -> None:
        optional = self._reread | self.flow.free
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
            makers = {self.flow.producer.get(v, -1) for v in self.taken(todo.pop())}
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
        self.awaited = awaited_checks(self.flow, self.task, self.after, self.taken)
        for index, values in self.awaited.items():
            for value in values:
                self._link(self.flow.producer[value], index)

    def _state_reads(self, index: int) -> set[Version]:
        ops = [self.flow.ops[i] for i in (index, *self.copies([index]))]
        return {read for op in ops for read in op.reads}

    def levels(self) -> dict[int, int]:
        """Returns, per root, the most task changes between it and the step's end."""
        order = topological({i: self.before[i] for i in self.roots})
        level: dict[int, int] = {}
        for index in reversed(order):
            here = self.task[index], self.kind(index)
            level[index] = max(
                (
                    level[s]
                    + (here[1] == "alone" or (self.task[s], self.kind(s)) != here)
                    for s in self.after[index]
                ),
                default=0,
            )
        self._write_early(level)
        return level

    def _write_early(self, level: dict[int, int]) -> None:
        """Moves writes to the level of the op that makes their value.

        A segment that computes a variable's new value from the old one should write it
        too. It cannot where someone still needs the old value later.
        """
        for index in self.roots:
            op = self.flow.ops[index]
            value = op.equation.invars[1] if op.is_whole_write else None
            if value is None or isinstance(value, Literal):
                continue
            producer = self.flow.producer.get(value)
            if producer not in level or self.task[producer] != self.task[index]:
                continue
            if all(level[b] >= level[producer] for b in self.before[index]):
                level[index] = level[producer]

    def quotient(
        self, levels: dict[int, int]
    ) -> tuple[list[tuple[TaskName, Kind, int]], list[set[int]], list[set[int]]]:
        """Returns (key, members, successors) of the first clusters."""
        keys = sorted(
            {(self.task[i], self.kind(i), levels[i]) for i in self.roots},
            key=lambda k: (-k[2], k[1], k[0]),
        )
        position = {key: n for n, key in enumerate(keys)}
        cluster = {
            i: position[self.task[i], self.kind(i), levels[i]] for i in self.roots
        }
        members: list[set[int]] = [set() for _ in keys]
        successors: list[set[int]] = [set() for _ in keys]
        for index in self.roots:
            members[cluster[index]].add(index)
            successors[cluster[index]].update(cluster[s] for s in self.after[index])
        for n, found in enumerate(successors):
            found.discard(n)
        return keys, members, successors

    def finish(self, merged: list[tuple[TaskName, Kind, set[int]]]) -> Cut:
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
            clusters.append(Cluster(where, kind, ops, frozenset(roots)))
        home = {i: rank[n] for i, n in home.items()}
        return Cut(self.flow, tuple(clusters), self._users(home), self.awaited)

    def _users(self, home: dict[int, int]) -> dict[Var, tuple[int, ...]]:
        users: dict[Var, set[int]] = {}
        for index in self.roots:
            for var in (*self.taken(index), *self.awaited.get(index, ())):
                producer = self.flow.producer.get(var)
                if producer is None or home[producer] != home[index]:
                    users.setdefault(var, set()).add(home[index])
        return {v: tuple(sorted(u)) for v, u in users.items()}
