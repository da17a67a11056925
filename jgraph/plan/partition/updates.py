"""Update paths: the operations between the read of a variable and its write.

What computes a variable's new value from its old one must not let another step's update
in between: that one would be lost. All of it belongs on the variable's task, and there
into one segment, whatever it computes. Operations that somebody placed on another task
end a way: they are where the user wants them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from jgraph import _compat
from jgraph.graph.ir import TaskName
from jgraph.plan.analysis.flow import Flow, Op

_ALL: Final = -1
_NAMED: Final = 3
"""How many variables a note names."""


def ways_of_updates(flow: Flow, may_lead: Mapping[int, int]) -> dict[int, int]:
    """Returns, for ops between a variable's read and its write, which variables.

    Args:
      flow: the graph.
      may_lead: variables whose ways may lead through each op; all, if it is not there.

    Sets of variables are the bits of a number, so that one pass serves them all.
    """
    inputs = {v for op in flow.ops.values() for v in flow.inputs(op)}
    before = {op.index: _before(flow, op) for op in flow.ops.values()}
    follows: dict[int, int] = {}
    for index, op in flow.ops.items():
        # A write that gives nobody the old value reads nothing.
        reads = not op.writes or not inputs.isdisjoint(op.equation.outvars)
        found = _bits(variable for variable, _ in op.reads) if reads else 0
        for other in before[index]:
            found |= follows[other]
        follows[index] = found & may_lead.get(index, _ALL)
    leads = {index: _bits(op.writes) for index, op in flow.ops.items()}
    for index in reversed(flow.ops):
        leads[index] &= may_lead.get(index, _ALL)
        if leads[index]:
            for other in before[index]:
                leads[other] |= leads[index]
    ways = {index: follows[index] & leads[index] for index in flow.ops}
    return {index: found for index, found in ways.items() if found}


def not_code(flow: Flow) -> dict[int, int]:
    """Returns the ops that no way in a segment leads through, as ``may_lead``."""
    return {
        index: 0
        for index, op in flow.ops.items()
        if flow.moves_rows(op) or op.equation.primitive.name == "alone"
    }


def local_ways(flow: Flow, task: Mapping[int, TaskName]) -> dict[int, int]:
    """Returns the ways that lead over no other task than the variable's."""
    on: dict[TaskName, int] = {}
    for op in flow.ops.values():
        if op.reads or op.writes:
            used = _bits([*(v for v, _ in op.reads), *op.writes])
            on[task[op.index]] = on.get(task[op.index], 0) | used
    here = {index: on.get(where, 0) for index, where in task.items()}
    return ways_of_updates(flow, here | not_code(flow))


def lost_updates(flow: Flow, task: Mapping[int, TaskName]) -> list[str]:
    """Returns a line for each task that computes new values of another's variables.

    Of those that no way on their own task leads from the old value to the new one.
    """
    anywhere, here = ways_of_updates(flow, {}), local_ways(flow, task)
    writes = {
        variable: op
        for op in flow.ops.values()
        for variable in op.writes
        if (anywhere.get(op.index, 0) & ~here.get(op.index, 0)) >> variable & 1
    }
    found: dict[tuple[TaskName, TaskName], tuple[list[str], str]] = {}
    for variable, write in writes.items():
        home = task[write.index]
        elsewhere = (
            op
            for op in flow.ops.values()
            if anywhere.get(op.index, 0) >> variable & 1
            and task.get(op.index, home) != home
        )
        if (between := next(elsewhere, None)) is None:
            continue  # rows move on their own task, as those that only one step has
        line = _compat.user_line(between.equation)
        first = f"'{between.equation.primitive}' at {line}"
        names, _ = found.setdefault((home, task[between.index]), ([], first))
        names.append(flow.graph.variables[variable].name)
    return [
        f"of steps that run at once, updates of {_names(names)} may be lost: {where} "
        f"computes them from the old values ({first}); on {home} none would be"
        for (home, where), (names, first) in found.items()
    ]


def _names(names: Sequence[str]) -> str:
    named = ", ".join(f"'{name}'" for name in names[:_NAMED])
    rest = len(names) - _NAMED
    return f"{named} and {rest} more" if rest > 0 else named


def _bits(variables: Iterable[int]) -> int:
    found = 0
    for variable in variables:
        found |= 1 << variable
    return found


def _before(flow: Flow, op: Op) -> set[int]:
    """Returns the ops whose results, or whose writes, an op takes."""
    makers = {flow.producer[v] for v in flow.inputs(op) if v in flow.producer}
    makers |= {written for _, written in op.reads if written >= 0}
    return makers - {op.index}  # what tells a size takes itself
