"""Sharding pass: a graph over logical variables becomes one over their shards.

The pass evaluates the graph once more under tracing, with sharded values as one value
per shard. What runs on no task in particular runs shard by shard where it can (updates,
norms); what somebody placed, such as the loss on a worker, gets whole values and runs
as it is, and what it makes for a shard is cut there. What cannot be done by shards is
done whole, and the graph says so in ``gathered``.
"""

from dataclasses import dataclass, field, replace
from typing import Any, final

from jax import lax

from jgraph import _compat
from jgraph._compat import Atom, Equation, Var
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.tracing.trace import retrace
from jgraph.plan.analysis.axes import (
    Axes,
    combined_axes,
    combiner,
    is_light,
    operand_axes,
    result_axis,
)
from jgraph.plan.program.types import value_type
from jgraph.plan.sharding.access import Accesses
from jgraph.plan.sharding.branches import without_branches
from jgraph.plan.sharding.shard_state import ShardState
from jgraph.plan.sharding.sharded_values import ShardedLayout, Value, Values
from jgraph.plan.sharding.wanted import WantedCuts, is_placed, wanted_cuts


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """A way to do an operation by shards.

    Attributes:
      axes: per operand, the axis to cut, None for one that all shards take whole.
      cut: how operands are cut, but for the axis.
      result: how the results are cut; None: those of the shards are combined.
      origin: the sharded variable that it is for.
    """

    axes: Axes
    cut: ShardedLayout
    result: ShardedLayout | None
    origin: str

    def operands(self, equation: Equation) -> list[tuple[Atom, ShardedLayout | None]]:
        """Returns each operand and how it must be cut, None for whole."""
        return [
            (atom, None if axis is None else self.cut.at(axis))
            for atom, axis in zip(equation.invars, self.axes, strict=True)
        ]


def choose(equation: Equation, values: Values, cuts: WantedCuts) -> Choice | None:
    """Returns the way by shards that gathers least; None if there is none."""
    if equation.effects:
        return None
    choices = []
    for cut, name in (cuts[v] for v in equation.outvars if v in cuts):
        axes = operand_axes(equation, cut.axis)
        if axes is not None:
            choices.append(Choice(axes, cut, cut, name))
    for position, atom in enumerate(equation.invars):
        value = values.of(atom)
        if value.cut is not None:
            choices += _carried(equation, position, value.cut, value.origin)
    return min(choices, key=lambda c: _cost(equation, values, c), default=None)


def _carried(
    equation: Equation, position: int, cut: ShardedLayout, origin: str
) -> list[Choice]:
    out = result_axis(equation, position, cut.axis)
    if out is not None:
        axes = operand_axes(equation, out)
        assert axes is not None  # result_axis found it
        return [Choice(axes, cut, cut.at(out), origin)]
    combined = combined_axes(equation, position, cut.axis)
    return [] if combined is None else [Choice(combined, cut, None, origin)]


def _cost(equation: Equation, values: Values, choice: Choice) -> int:
    return sum(
        value_type(atom.aval).nbytes
        for atom, cut in choice.operands(equation)
        if values.needs_gather(atom, cut)
    )


def shard(graph: Graph) -> Graph:
    """Returns the graph over shards; the same graph if nothing in it is sharded.

    Variables with a sharding are replaced by ``<name>/part_<k>``; ``unique_rows`` by
    ``route_rows``, and what reads and writes tables by rows by one access per shard.
    Feeds, fetches and the meaning stay; sums over shards may be rounded in another
    order.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.tracing.trace import trace
      >>> from jgraph.graph.variable import Variable
      >>> w = Variable("w", jnp.ones(3), partitioner=lambda shape, dtype: [2])
      >>> def halve():
      ...     w[...] = w[...] / 2
      >>> [v.name for v in shard(trace(halve)[0]).variables]
      ['w/part_0', 'w/part_1']
    """
    if not Accesses(graph).is_any:
        return graph
    logical = tuple(v for v in graph.variables if v.sharding is not None)
    graph = without_branches(graph, {v.shape for v in logical})
    accesses = Accesses(graph)
    cuts = wanted_cuts(graph, accesses)
    physical = [s for v in graph.variables for s in v.shards]
    values = Values()

    def run(refs: list[Any], feeds: list[Any]) -> list[Any]:
        return _Sharder(graph, accesses, cuts, values).run(refs, feeds)

    sharded = retrace(graph, physical, run)
    return replace(sharded, logical=logical, gathered=tuple(values.gathered))


@final
@dataclass(slots=True)
class _Sharder:
    graph: Graph
    accesses: Accesses
    cuts: WantedCuts
    values: Values
    _refs: dict[Var, list[Any]] = field(default_factory=dict)

    def run(self, refs: list[Any], feeds: list[Any]) -> list[Any]:
        """Evaluates the graph; returns the fetches."""
        jaxpr, unbound = self.graph.jaxpr, list(refs)
        count = len(self.graph.variables)
        for var, spec in zip(jaxpr.invars[:count], self.graph.variables, strict=True):
            shards = len(spec.shards)
            self._refs[var], unbound = unbound[:shards], unbound[shards:]
        known = [*zip(jaxpr.constvars, self.graph.consts, strict=True)]
        known += zip(jaxpr.invars[count:], feeds, strict=True)
        self.values.entries.update({var: Value(value) for var, value in known})
        state = ShardState(self.accesses, self.values, self._refs)
        for number, equation in enumerate(self.graph.equations):
            stamp = self.graph.stamps[number]
            if number in self.accesses.layouts:
                state.route(number, equation, stamp)
            elif self.accesses.touched(equation):
                state.run(equation, stamp)
            elif (cut := self.accesses.handed_in(equation)) is not None:
                state.hand_in(equation, cut)
            elif (cut := self.accesses.spread(equation)) is not None:
                state.spread(equation, cut)
            elif is_placed(stamp) and not self._casts_shards(equation):
                self._run_whole(equation, stamp)
                self._cut_results(equation)
            elif equation.primitive.name == "optimization_barrier":
                self._barrier(equation)
            else:
                self._run_anywhere(equation)
        return [self.values.whole(v) for v in jaxpr.outvars]

    def _casts_shards(self, equation: Equation) -> bool:
        """Whether this changes the dtype of shards, or of what will meet shards.

        Each is then cast by itself, where fewer bytes cross.
        """
        if equation.primitive.name != "convert_element_type":
            return False
        is_cut = self.values.of(equation.invars[0]).cut is not None
        return is_cut or equation.outvars[0] in self.cuts

    def _run_whole(self, equation: Equation, stamp: DeviceSpec) -> None:
        with _compat.under(equation):
            operands = [self.values.whole(v, stamp) for v in equation.invars]
        self.values.results(equation, _compat.run_equation(equation, operands))

    def _cut_results(self, equation: Equation) -> None:
        """Cuts what will meet shards, under the device scope that made it."""
        for var in equation.outvars:
            if var in self.cuts:
                cut, self.values.entries[var].origin = self.cuts[var]
                with _compat.under(equation):
                    self.values.parts(var, cut)

    def _run_anywhere(self, equation: Equation) -> None:
        choice = choose(equation, self.values, self.cuts)
        if choice is None:
            for atom in equation.invars:
                self.values.note_gather(equation, atom, None)
            self._run_whole(equation, DeviceSpec())
            if is_light(equation):
                self.values.makers[equation.outvars[0]] = equation
        else:
            for atom, cut in choice.operands(equation):
                self.values.note_gather(equation, atom, cut)
            self._by_shards(equation, choice)

    def _by_shards(self, equation: Equation, choice: Choice) -> None:
        results = self.values.by_shards(
            equation, choice.axes, choice.cut, choice.result
        )
        if choice.result and self.values.follows_from_ids(equation, choice.result):
            self.values.by_ids[equation.outvars[0]] = equation
        for var, parts in zip(equation.outvars, results, strict=True):
            if choice.result is not None:
                value = Value(parts={choice.result: parts}, origin=choice.origin)
            else:
                value = Value(_combined(equation, parts))
            self.values.entries[var] = value

    def _barrier(self, equation: Equation) -> None:
        """A barrier holds back all its operands, whole or in shards, at once."""
        old = [self.values.of(v) for v in equation.invars]
        forms = [v.parts[v.cut] if v.cut else (v.whole,) for v in old]
        with _compat.under(equation):
            held = list(lax.optimization_barrier([x for form in forms for x in form]))
        for var, value, form in zip(equation.outvars, old, forms, strict=True):
            parts, held = tuple(held[: len(form)]), held[len(form) :]
            self.values.entries[var] = (
                Value(parts={value.cut: parts}, origin=value.origin)
                if value.cut
                else Value(parts[0])
            )


def _combined(equation: Equation, parts: tuple[Any, ...]) -> Any:
    total = parts[0]
    with _compat.under(equation):
        for part in parts[1:]:
            total = getattr(lax, combiner(equation))(total, part)
    return total
