"""Blocks: groups of operations that automatic placement moves as a unit.

A block is a piece of one module (the user's scopes), or, where there are none, of a run
of operations; forward and backward passes of a module are blocks of their own. Blocks
that belong on one task are a group: the passes of a module, what computes with a
variable and its gradient, and the variable itself. No block waits for one after it.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

from jgraph._compat import Literal, Var
from jgraph.graph.ir import TaskName
from jgraph.graph.show import scopes_of
from jgraph.plan.analysis.affinity import behind_writes, companions
from jgraph.plan.analysis.flow import Flow, Op
from jgraph.plan.auto.work import Work, work_of
from jgraph.plan.placement.colocate import colocated_with
from jgraph.plan.placement.place import state_groups
from jgraph.plan.placement.spread import nbytes_of

MOST_SCOPES: Final = 64
PIECES: Final = 64
"""Into about how many pieces a graph without scopes is taken."""
_SINGLE_NUMBERS = 64
_SMALL = 0.03

Tasks: TypeAlias = tuple[TaskName, ...]


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Operations that are placed together.

    Attributes:
      ops: in program order.
      group: number of its group.
      work: of the operations.
      is_placed: whether they are placed by stamps; else they go with their variable.
    """

    ops: tuple[int, ...]
    group: int
    work: Work
    is_placed: bool


@final
@dataclass(frozen=True, slots=True)
class Passed:
    """Values that a block makes, or a variable's group has, and some blocks take.

    Attributes:
      source: the block; None for a feed; of a variable ``-1 - group``.
      users: blocks.
      nbytes: of all of them.
      fetched: whether the driver takes them.
    """

    source: int | None
    users: tuple[int, ...]
    nbytes: int
    fetched: bool


@final
@dataclass(frozen=True, slots=True)
class Blocks:
    """A graph as blocks.

    Attributes:
      blocks: each after those that it takes from.
      passed: what goes between them.
      options: tasks that each group may be on.
      variables: group of each variable.
      stored: bytes of the variables of each group.
    """

    blocks: tuple[Block, ...]
    passed: tuple[Passed, ...]
    options: tuple[Tasks, ...]
    variables: tuple[int, ...]
    stored: tuple[int, ...]


def blocks_of(
    flow: Flow,
    tasks: Tasks,
    stamped: Mapping[int, Tasks],
    homes: Sequence[Tasks],
    beside: Mapping[int, int] | None = None,
) -> Blocks:
    """Returns the blocks of a graph.

    Args:
      flow: the analyzed graph.
      tasks: where what is free may go.
      stamped: the tasks that the user's scopes leave open, by op.
      homes: the tasks that each variable may be on, none for any.
      beside: the variable that ops are to be beside.
    """
    maker = _Maker(flow, stamped, homes, beside or {})
    maker.cut()
    maker.join()
    return maker.result(tasks)


@final
@dataclass(slots=True)
class _Maker:
    flow: Flow
    stamped: Mapping[int, Tasks]
    homes: Sequence[Tasks]
    beside: Mapping[int, int]
    labels: list[Hashable] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)
    home: dict[int, int] = field(default_factory=dict)
    size: list[float] = field(default_factory=list)
    full: dict[int, float] = field(default_factory=dict)
    _last: dict[Hashable, int] = field(default_factory=dict)
    _union: dict[int, int] = field(default_factory=dict)
    _towards: dict[int, int] = field(default_factory=dict)
    _inputs: dict[int, list[Var]] = field(default_factory=dict)
    _users: dict[Var, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.flow.graph.variables)
        # Variables come before blocks in the numbers of the union.
        self._union = {-1 - v: -1 - v for v in range(count)}
        self._towards = behind_writes(self.flow)
        for op in self.flow.ops.values():
            if not op.is_whole_read and (op.reads or op.writes):
                self._towards[op.index] = [*op.writes, *(v for v, _ in op.reads)][0]
        self._towards.update(self.beside)
        for used in [*state_groups(self.flow), *self._neighbours()]:
            for other in used:
                self._unite(-1 - min(used), -1 - other)
        for near in companions(self.flow):
            first = min(near)
            for other in near:
                if self.homes[other] == self.homes[first]:
                    self._unite(-1 - first, -1 - other)

    def _neighbours(self) -> list[set[int]]:
        specs = self.flow.graph.variables
        found = [
            (n, colocated_with(spec.device, specs)) for n, spec in enumerate(specs)
        ]
        return [{n, other} for n, other in found if other is not None]

    def cut(self) -> None:
        """Puts every op into a block."""
        ops = [
            op
            for op in self.flow.ops.values()
            if op.index not in self.flow.free and not op.is_whole_read
        ]
        for op in ops:
            self._inputs[op.index] = self.flow.sources(self.flow.inputs(op))
            for var in self._inputs[op.index]:
                self._users.setdefault(var, []).append(op.index)
        sizes = {op.index: _size(op) for op in ops}
        limit = sum(sizes.values()) / PIECES
        scopes = _scopes(ops)
        for op in ops:
            near = [self.home[p] for p in self._before(op) if p in self.home]
            latest = max(near, default=-1)
            label = self._label(op, scopes[op.index])
            block = self._last.get(label, -1) if label is not None else latest
            joins = block >= max(latest, 0)
            if label is None and joins:
                full = self._is_full(block, sizes[op.index], limit)
                joins = _is_open(self.labels[block]) and not full
            if not joins:
                block = self._new(label if label is not None else ("run", op.index))
            self.members[block].append(op.index)
            self.home[op.index] = block
            self.size[block] += sizes[op.index]
            if self.size[block] > limit:
                self.full.setdefault(block, self.size[block])

    def join(self) -> None:
        """Makes groups of blocks."""
        first: dict[Hashable, int] = {}
        for number, label in enumerate(self.labels):
            self._unite(first.setdefault(label, number), number)
        for op in self.flow.ops.values():
            if op.is_whole_read and self._is_large(op.reads[0][0]):
                self._join_readers(op)
        for number, label in enumerate(self.labels):
            if isinstance(label, tuple) and label[0] == "variable":
                self._join_gradients(number, label[1])

    def result(self, tasks: Tasks) -> Blocks:
        """Returns the blocks, with groups in the order of their first block."""
        roots = dict.fromkeys(self._root(n) for n in range(len(self.members)))
        roots.update(dict.fromkeys(map(self._root, self._union)))
        number = {root: n for n, root in enumerate(roots)}
        options = [tasks] * len(number)
        for block, label in enumerate(self.labels):
            if isinstance(label, tuple) and label[0] == "stamped":
                options[number[self._root(block)]] = label[1]
        specs = self.flow.graph.variables
        variables = tuple(number[self._root(-1 - v)] for v in range(len(specs)))
        stored = [0] * len(number)
        for v, group in enumerate(variables):
            stored[group] += nbytes_of(specs[v])
            options[group] = self.homes[v] or options[group]
        blocks = tuple(
            Block(
                ops=tuple(ops),
                group=number[self._root(n)],
                work=work_of([self.flow.ops[i].equation for i in ops]),
                is_placed=_is_open(self.labels[n]),
            )
            for n, ops in enumerate(self.members)
        )
        return Blocks(
            blocks, self._passed(variables), tuple(options), variables, tuple(stored)
        )

    def _label(self, op: Op, scope: str) -> Hashable:
        if op.index in self._towards:
            variable = self._towards[op.index]
            return "variable", self._root(-1 - variable)
        if op.index in self.stamped:
            return "stamped", self.stamped[op.index], scope
        return ("scope", scope) if scope else None

    def _is_full(self, block: int, size: float, limit: float) -> bool:
        """Whether an op begins a new block: it is no small addition to a full one."""
        if block not in self.full:
            return False
        added = self.size[block] - self.full[block]
        return size > _SMALL * self.size[block] or added > limit / 2

    def _new(self, label: Hashable) -> int:
        self.labels.append(label)
        self.members.append([])
        self.size.append(0.0)
        number = len(self.members) - 1
        self._last[label] = number
        self._union[number] = number
        return number

    def _before(self, op: Op) -> list[int]:
        makers = map(self.flow.producer.get, self._inputs[op.index])
        return [maker for maker in makers if maker is not None]

    def _is_large(self, variable: int) -> bool:
        spec = self.flow.graph.variables[variable]
        return nbytes_of(spec) > _SINGLE_NUMBERS and not self.homes[variable]

    def _join_readers(self, read: Op) -> None:
        for user in self._users.get(read.equation.outvars[0], ()):
            if _is_open(self.labels[self.home[user]]):
                self._unite(-1 - read.reads[0][0], self.home[user])

    def _join_gradients(self, block: int, root: object) -> None:
        """Joins the update of a variable, and what makes the larger values it takes."""
        assert isinstance(root, int)
        self._unite(root, block)
        variable = -1 - root
        if not self._is_large(variable):
            return
        least = nbytes_of(self.flow.graph.variables[variable]) / 2
        for index in self.members[block]:
            for var in self._inputs[index]:
                maker = self.home.get(self.flow.producer.get(var, -1))
                large = self.flow.type_of(var).nbytes >= least
                if maker is not None and large and _is_open(self.labels[maker]):
                    self._unite(root, maker)

    def _passed(self, variables: Sequence[int]) -> tuple[Passed, ...]:
        fetches = [a for a in self.flow.fetches if not isinstance(a, Literal)]
        fetched = set(self.flow.sources(fetches))
        total: Counter[tuple[int | None, tuple[int, ...], bool]] = Counter()
        for var in dict.fromkeys([*self._users, *fetched]):
            if var not in self.flow.feeds and var not in self.flow.producer:
                continue  # a constant, which is everywhere
            source = self._source(var, variables)
            users = {self.home[user] for user in self._users.get(var, ())}
            takers = tuple(sorted(users - {source}))
            if takers or var in fetched:
                total[source, takers, var in fetched] += self.flow.type_of(var).nbytes
        return tuple(Passed(s, u, n, f) for (s, u, f), n in total.items())

    def _source(self, var: Var, variables: Sequence[int]) -> int | None:
        if var in self.flow.feeds:
            return None
        op = self.flow.ops[self.flow.producer[var]]
        if op.is_whole_read:
            return -1 - variables[op.reads[0][0]]
        return self.home[op.index]

    def _root(self, member: int) -> int:
        while self._union[member] != member:
            self._union[member] = self._union[self._union[member]]
            member = self._union[member]
        return member

    def _unite(self, a: int, b: int) -> None:
        first, second = sorted((self._root(a), self._root(b)))
        self._union[second] = first


def _is_open(label: Hashable) -> bool:
    """Whether a block of this label is placed by its stamps, not by the user's."""
    return isinstance(label, tuple) and label[0] in {"scope", "run"}


def _scopes(ops: Iterable[Op]) -> dict[int, str]:
    """Returns the scope of each op, as deep as there are not too many."""
    paths = {
        op.index: [p.removesuffix(" (grad)") for p in scopes_of(op.equation)]
        for op in ops
    }
    found = dict.fromkeys(paths, "")
    for depth in range(1, max(map(len, paths.values()), default=0) + 1):
        deeper = {i: "/".join(path[:depth]) for i, path in paths.items()}
        if len(set(deeper.values())) > MOST_SCOPES:
            break
        found = deeper
    return found


def _size(op: Op) -> float:
    work = work_of([op.equation])
    return work.flops + work.elements + 10 * work.slow + work.nbytes
