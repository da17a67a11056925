"""Choice of a sharding for an unplaced operation: the one that gathers least."""

from dataclasses import dataclass
from typing import final

from jgraph._compat import Atom, Equation
from jgraph.plan.analysis.axes import Axes, combined_axes, operand_axes, result_axis
from jgraph.plan.program.types import value_type
from jgraph.plan.sharding.sharded_values import ShardedLayout, Values
from jgraph.plan.sharding.wanted import WantedCuts


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


def choose(equation: Equation, values: Values, wanted: WantedCuts) -> Choice | None:
    """Returns the way by shards that gathers least; None if there is none."""
    if equation.effects:
        return None
    choices = []
    for cut, name in (wanted[v] for v in equation.outvars if v in wanted):
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
