"""Backward sharding propagation: values cut where they are made, for later shards.

A worker's gradient should leave the worker in slices, one for each ps. Nobody says so;
it follows from where the gradient goes: back from each write of a sharded variable,
through operations that can be done shard by shard.
"""

from typing import Any, TypeAlias

from jgraph._compat import Literal, Var
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.plan.analysis.axes import operand_axes
from jgraph.plan.sharding.access import Accesses
from jgraph.plan.sharding.sharded_values import ShardedLayout

WantedCuts: TypeAlias = dict[Var, tuple[ShardedLayout, str]]
"""How a value should be cut, and for which variable."""


def is_placed(stamp: DeviceSpec) -> bool:
    """Whether a device scope says on which task an operation is to run."""
    return any(x is not None for x in (stamp.job, stamp.task, stamp.beside))


def wanted_cuts(graph: Graph, accesses: Accesses) -> WantedCuts:
    """Returns how values should be cut, as far as writes of shards tell."""
    cuts: WantedCuts = {}
    for number in reversed(range(len(graph.equations))):
        equation = graph.equations[number]
        touched = accesses.touched(equation)
        spread = accesses.spread(equation)
        if spread is not None:
            # Its rows travel, not the table that they are spread over.
            _want(cuts, equation.invars[1], spread, "")
        elif touched:
            cut = accesses.rows(equation) or accesses.whole(equation)
            if cut is not None and equation.primitive.name != "get":
                name = graph.variables[touched[0]].name
                _want(cuts, equation.invars[1], cut, name)
        elif not is_placed(graph.stamps[number]):
            _carry_back(cuts, equation)
    return cuts


def _carry_back(cuts: WantedCuts, equation: Any) -> None:
    if equation.primitive.name == "optimization_barrier":
        for operand, result in zip(equation.invars, equation.outvars, strict=True):
            if result in cuts:
                _want(cuts, operand, *cuts[result])
        return
    found = next((cuts[v] for v in equation.outvars if v in cuts), None)
    if found is None:
        return
    cut, name = found
    axes = operand_axes(equation, cut.axis) or ()
    for operand, axis in zip(equation.invars, axes, strict=False):
        if axis is not None:
            _want(cuts, operand, cut.at(axis), name)


def _want(cuts: WantedCuts, atom: Any, cut: ShardedLayout, name: str) -> None:
    if not isinstance(atom, Literal):
        cuts.setdefault(atom, (cut, name))
