"""Dataflow analysis: values, state accesses, and operations free to duplicate.

The pass forwards whole writes to later whole reads, joins equal reads, drops what no
fetch and no variable needs, and finds what is free: cheap equations over literals and
over single numbers (iota, masks, step counters, learning rates, keys, the factor of a
clipped gradient). These have no task: whoever needs one makes it again.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal as TypingLiteral, TypeAlias, final

import jax
import numpy as np

from jgraph import _compat
from jgraph._compat import Atom, Equation, Literal, Var
from jgraph.graph.graph import Graph
from jgraph.graph.tracing.taps import is_name
from jgraph.plan.analysis.carriers import carriers_of, with_carriers
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.types import is_float0, num_elements, value_type


def row_ids(equation: Equation) -> Var | None:
    """Returns the ids of a read or write of whole rows; None for other accesses."""
    operands = {"get": 1, "swap": 2}.get(equation.primitive.name)
    if operands is None or len(equation.invars) != operands + 1:
        return None
    ids = equation.invars[-1]
    indexers = jax.tree.unflatten(equation.params["tree"], [ids])
    if len(indexers) != 1 or type(indexers[0]).__name__ != "NDIndexer":
        return None
    first, *others = indexers[0].indices
    if first is not ids or isinstance(ids, Literal) or ids.aval.ndim != 1:
        return None
    sizes = equation.invars[0].aval.shape[1:]
    whole = [
        (getattr(s, "start", None), getattr(s, "size", None), getattr(s, "stride", 1))
        for s in others
    ]
    return ids if whole == [(0, size, 1) for size in sizes] else None


Version: TypeAlias = tuple[int, int]
"""(variable, index of the equation that wrote it, or -1 for the step's start)."""

SMALL_CONST_BYTES = 1024
"""Constants below this stay inside the segments that use them."""

SCALAR_ELEMENTS = 8
"""Stored values up to this size count as a number; it covers the data of a few keys."""

RowMove: TypeAlias = TypingLiteral["route", "merge", "split", "check"]

ROW_MOVES: dict[str, RowMove] = {
    "route_rows": "route",
    "merge_rows": "merge",
    "split_rows": "split",
    "checked_ids": "check",
}
"""Primitives that runtime nodes do, and the kind of their clusters."""

# What makes a value without reading much: repeating it beats sending it.
_CHEAP = re.compile(
    r"(iota|broadcast_in_dim|convert_element_type|reshape|squeeze|expand_dims|transpose"
    r"|rev|pad|slice|split|concatenate|copy|copy_p|random_(seed|wrap|unwrap|fold_in)"
    r"|eq|ne|lt|le|gt|ge|and|or|not|select_n|clamp|max|min|add|add_any|sub|mul|div|neg"
    r"|abs|sign|floor|ceil|exp|log|sqrt|rsqrt|square|one_minus_square|pow|integer_pow"
    r")\Z"
)


@final
@dataclass(frozen=True, slots=True)
class Op:
    """One live equation: its state accesses beside the equation itself.

    ``whole`` marks a read of all of one variable, or a write of all of one variable
    whose old value nobody takes. ``rows`` are the ids of an access to whole rows of
    one variable.
    """

    index: int
    equation: Equation
    reads: tuple[Version, ...] = ()
    writes: tuple[int, ...] = ()
    whole: bool = False
    rows: Var | None = None
    sizes: tuple[Var, ...] = ()

    @property
    def is_whole_read(self) -> bool:
        """Whether this only reads all of one variable."""
        return self.whole and not self.writes

    @property
    def is_whole_write(self) -> bool:
        """Whether this only replaces all of one variable."""
        return self.whole and bool(self.writes)


@final
@dataclass(frozen=True, slots=True)
class Flow:
    """A graph's live equations and where every value comes from.

    Attributes:
      graph: the graph; its equations' indices name the ops.
      ops: live equations by index, in program order.
      fetches: what each fetch gives, after forwarding.
      producer: the op that makes a value.
      feeds: position of the feed that a value is.
      consts: captured arrays, small and large.
      free: ops without a task, repeated by whoever needs them.
      ragged: values that have fewer rows at run time, with the routed ids whose rows
        they are: these ids themselves, and rows of them.
    """

    graph: Graph
    ops: dict[int, Op]
    fetches: tuple[Atom, ...]
    producer: dict[Var, int]
    feeds: dict[Var, int]
    consts: dict[Var, Any]
    free: frozenset[int]
    ragged: dict[Var, Var]
    _inputs: dict[int, tuple[Var, ...]] = field(default_factory=dict, repr=False)

    def is_row_access(self, op: Op) -> bool:
        """Whether ``op`` reads or writes the rows that routed ids name."""
        return op.rows is not None and op.rows in self.ragged

    def moves_rows(self, op: Op) -> "RowMove | None":
        """Returns which runtime node does ``op``, if one does."""
        kind = ROW_MOVES.get(op.equation.primitive.name)
        if kind is None or kind in {"route", "check"}:
            return kind
        routed = [v for v in self.inputs(op) if v in self.ragged]
        shards = op.equation.params["layout"].shards
        at = slice(shards) if kind == "merge" else slice(1, 1 + shards)
        return kind if all(v in routed for v in op.equation.invars[at]) else None

    def type_of(self, atom: Atom) -> ValueType:
        """Returns the plain type of a value between nodes."""
        ragged = not isinstance(atom, Literal) and atom in self.ragged
        type_ = value_type(atom.aval, ragged=ragged)
        # In a graph, keys of hash tables are stood for by int32: JAX has no int64.
        return replace(type_, dtype="int64") if self._is_keys(atom) else type_

    def _is_keys(self, atom: Atom) -> bool:
        if isinstance(atom, Literal) or atom not in self.ragged:
            return False
        equation = self.ops[self.producer[atom]].equation
        is_route = equation.primitive.name == "route_rows"
        return bool(is_route and equation.params["layout"].kind == "hash")

    def inputs(self, op: Op) -> tuple[Var, ...]:
        """Returns the distinct values that ``op`` takes: no Ref, no small constant."""
        if op.index not in self._inputs:
            self._inputs[op.index] = tuple(
                var
                for var in _distinct((*op.equation.invars, *op.sizes))
                if not _compat.is_ref(var.aval) and not self.is_small_const(var)
            )
        return self._inputs[op.index]

    def is_small_const(self, atom: Atom) -> bool:
        """Whether ``atom`` is part of the code rather than a value between nodes."""
        if isinstance(atom, Literal):
            return True
        if atom not in self.consts:
            return False
        return value_type(atom.aval).nbytes < SMALL_CONST_BYTES

    def sources(self, values: Iterable[Var]) -> list[Var]:
        """Returns what must be at hand to have ``values``: free ones are made."""
        found: dict[Var, None] = {}
        seen: set[int] = set()
        todo = list(values)[::-1]
        while todo:
            var = todo.pop()
            producer = self.producer.get(var)
            if producer not in self.free:
                found[var] = None
            elif producer not in seen:
                seen.add(producer)
                todo += self.inputs(self.ops[producer])
        return list(found)


def analyze(graph: Graph) -> Flow:
    """Returns the live equations of ``graph`` with forwarded state."""
    graph, carriers = with_carriers(graph)
    walk = _Walk(graph)
    for index, equation in enumerate(graph.equations):
        walk.visit(index, equation)
    fetches = tuple(walk.renamed(a) for a in graph.jaxpr.outvars)
    if carriers:
        for index, op in walk.ops.items():
            sizes = carriers_of(op.equation, carriers)
            walk.ops[index] = replace(op, sizes=sizes)
    ops = _live(walk.ops, fetches)
    consts = dict(zip(graph.jaxpr.constvars, graph.consts, strict=True))
    flow = Flow(
        graph=graph,
        ops=ops,
        fetches=fetches,
        producer={v: op.index for op in ops.values() for v in op.equation.outvars},
        feeds={v: i for i, v in enumerate(graph.jaxpr.invars[len(graph.variables) :])},
        consts=consts,
        free=frozenset(),
        ragged=_ragged(ops.values()),
    )
    return replace(flow, free=_free(flow))


@dataclass(slots=True)
class _Walk:
    """Program-order walk that knows the last value of every variable."""

    graph: Graph
    ops: dict[int, Op] = field(default_factory=dict)
    _variables: dict[Var, int] = field(default_factory=dict)
    _used: set[Var] = field(default_factory=set)
    _names: dict[Var, Atom] = field(default_factory=dict)
    _version: dict[int, int] = field(default_factory=dict)
    _value: dict[int, Atom] = field(default_factory=dict)
    _reads: dict[Version, Var] = field(default_factory=dict)
    _unseen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        jaxpr = self.graph.jaxpr
        refs = jaxpr.invars[: len(self.graph.variables)]
        self._variables = {ref: i for i, ref in enumerate(refs)}
        taken = [v for e in jaxpr.eqns for v in e.invars] + list(jaxpr.outvars)
        self._used = {v for v in taken if not isinstance(v, Literal)}

    def renamed(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return atom
        aval: Any = atom.aval
        if is_float0(aval):
            # float0 holds no information: every user makes its own.
            return Literal(np.zeros(aval.shape, jax.dtypes.float0), aval)
        return self._names.get(atom, atom)

    def visit(self, index: int, equation: Equation) -> None:
        outvars = list(equation.outvars)
        new = _compat.rebuild_equation(equation, self.renamed, outvars)
        refs = [v for v in new.invars if isinstance(v, Var) and v in self._variables]
        if is_name(new):
            self._names[equation.outvars[0]] = new.invars[0]
        elif not refs:
            self.ops[index] = Op(index, new)
        elif len(refs) == 1 and _is_whole(new, "get", 1):
            self._whole_read(index, new)
        elif len(refs) == 1 and _is_whole(new, "swap", 2):
            self._whole_write(index, new)
        else:
            self._other_access(index, new, refs)

    def _at(self, variable: int) -> Version:
        return variable, self._version.get(variable, -1)

    def _whole_read(self, index: int, equation: Equation) -> None:
        variable, out = self._variables[equation.invars[0]], equation.outvars[0]
        known = self._value.get(variable, self._reads.get(self._at(variable)))
        if known is not None:
            self._names[out] = known
            return
        version = self._at(variable)
        self._reads[version] = out
        self._unseen.pop(variable, None)
        self.ops[index] = Op(index, equation, reads=(version,), whole=True)

    def _whole_write(self, index: int, equation: Equation) -> None:
        variable, old = self._variables[equation.invars[0]], equation.outvars[0]
        version = self._at(variable)
        known = self._value.get(variable, self._reads.get(version))
        if known is not None:
            self._names[old] = known
        blind = known is not None or old not in self._used
        if blind and variable in self._unseen:
            # Overwritten before anyone could see it.
            del self.ops[self._unseen[variable]]
        reads = () if blind else (version,)
        self.ops[index] = Op(index, equation, reads, (variable,), whole=blind)
        self._wrote(variable, index)
        self._value[variable] = equation.invars[1]
        self._unseen.pop(variable, None)
        if blind:
            self._unseen[variable] = index

    def _other_access(self, index: int, equation: Equation, refs: list[Var]) -> None:
        read = tuple(dict.fromkeys(self._variables[r] for r in refs))
        write = tuple(v for v in read if _compat.writes(equation, self._ref(v)))
        reads = tuple(self._at(v) for v in read)
        rows = row_ids(equation)
        self.ops[index] = Op(index, equation, reads, write, rows=rows)
        for variable in read:
            self._unseen.pop(variable, None)
        for variable in write:
            self._wrote(variable, index)

    def _ref(self, variable: int) -> Var:
        ref: Var = self.graph.jaxpr.invars[variable]
        return ref

    def _wrote(self, variable: int, index: int) -> None:
        self._version[variable] = index
        self._value.pop(variable, None)


def _distinct(atoms: Iterable[Atom]) -> Iterator[Var]:
    return iter(dict.fromkeys(a for a in atoms if not isinstance(a, Literal)))


def _is_whole(equation: Equation, name: str, operands: int) -> bool:
    if equation.primitive.name != name or len(equation.invars) != operands:
        return False
    if equation.outvars[0].aval.shape != equation.invars[0].aval.shape:
        return False
    indexers = jax.tree.unflatten(equation.params["tree"], ())
    return all(type(i).__name__ == "NDIndexer" for i in indexers)


def _ragged(ops: Iterable[Op]) -> dict[Var, Var]:
    found: dict[Var, Var] = {}
    for op in ops:
        name, outvars = op.equation.primitive.name, op.equation.outvars
        if name == "route_rows":
            found.update({v: v for v in outvars[1:]})
        elif name == "get" and op.rows in found:
            found[outvars[0]] = op.rows
        elif name == "split_rows":
            local = op.equation.invars[1:]
            if all(v in found for v in local):
                found.update(zip(outvars, local, strict=True))
    return found


def _live(ops: dict[int, Op], fetches: Iterable[Atom]) -> dict[int, Op]:
    needed: set[Var] = set(_distinct(fetches))
    live: dict[int, Op] = {}
    for index in sorted(ops, reverse=True):
        op = ops[index]
        if op.writes or any(v in needed for v in op.equation.outvars):
            live[index] = op
            needed.update(_distinct((*op.equation.invars, *op.sizes)))
    return {index: live[index] for index in sorted(live)}


def _free(flow: Flow) -> frozenset[int]:
    # What each free op needs of the single numbers that other ops compute.
    computed: dict[int, frozenset[Var]] = {}
    constant: set[int] = set()
    # A node that moves rows takes values: it cannot make any again.
    moved = {
        flow.producer.get(v)
        for op in flow.ops.values()
        if op.equation.primitive.name in ROW_MOVES
        for v in flow.inputs(op)
    }
    for op in flow.ops.values():
        if op.reads or op.writes or op.index in moved or not is_cheap(op):
            continue
        if all(flow.producer.get(v) in constant for v in flow.inputs(op)):
            constant.add(op.index)
        elif flow.graph.stamps[op.index]:
            continue  # somebody placed it: there it stays
        needs = _computed_numbers(flow, op, computed)
        # With two, sending the one result costs less than sending both.
        if needs is not None and len(needs) <= 1:
            computed[op.index] = needs
    return frozenset(computed)


def _computed_numbers(
    flow: Flow, op: Op, computed: dict[int, frozenset[Var]]
) -> frozenset[Var] | None:
    """Returns the computed numbers behind ``op``; None if it takes anything larger."""
    found: frozenset[Var] = frozenset()
    for var in flow.inputs(op):
        producer = flow.producer.get(var)
        if producer in computed:
            found |= computed[producer]
            continue
        maker = None if producer is None else flow.ops[producer]
        stored = maker is not None and maker.equation.primitive.name == "get"
        if num_elements(var.aval) > (SCALAR_ELEMENTS if stored else 1):
            return None
        if maker is not None and not stored:
            found |= {var}
    return found


def is_cheap(op: Op) -> bool:
    """Whether repeating ``op`` costs less than a message with its result."""
    equation = op.equation
    if equation.effects or any(_compat.inner_jaxprs(equation)):
        return False
    if equation.primitive.name in ROW_MOVES:
        return False
    return bool(_CHEAP.match(equation.primitive.name)) or is_scalar(op)


def is_scalar(op: Op) -> bool:
    """Whether all results of ``op`` are a handful of elements."""
    outvars = op.equation.outvars
    return all(num_elements(v.aval) <= SCALAR_ELEMENTS for v in outvars)
