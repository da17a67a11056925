"""Order of id checks and writes: a refused step writes nothing.

Routing refuses ids that name no row, and so does a look at those of a whole table.
Most writes follow from the rows, so they come later anyway; a counter, say, does not,
and may be on another task. What it writes may still be computed where the check is:
then that waits. Or something comes that follows from the check, as gradients do: then
the write waits for that. In both cases nothing is sent for it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from jgraph._compat import Var
from jgraph.graph.ir import TaskName
from jgraph.plan.analysis.flow import Flow, Op

Taken: TypeAlias = Callable[[int], Iterable[Var]]
"""Returns the values that an op takes from others."""


def awaited_checks(
    flow: Flow,
    task: Mapping[int, TaskName],
    after: Mapping[int, Iterable[int]],
    taken: Taken,
    can_wait: Callable[[int], bool],
) -> dict[int, list[Var]]:
    """Returns, per write, a value behind each check that it does not follow from yet.

    Or per op that makes what is written. A write that ids of this step are made from
    comes before their check.

    Args:
      flow: the graph.
      task: of each op.
      after: per op, those that follow it.
      taken: what an op takes from others.
      can_wait: whether an op that writes nothing waits for what it does not take.
    """
    checks = [i for i in after if _refuses(flow.ops[i])]
    if not checks:
        return {}
    followers = {check: _reached([check], after) for check in checks}
    earlier = _reached(checks, _reversed(after))
    # What no write leads to can be waited for by any of them.
    before_writes = {i for i in after if not flow.ops[i].writes}
    before_writes -= _reached(after.keys() - before_writes, after)
    here: dict[TaskName, set[Var]] = {}
    for index in after:
        here.setdefault(task[index], set()).update(taken(index))
    awaited: dict[int, list[Var]] = {}
    for index in after:
        made_by = {flow.producer.get(v, -1) for v in taken(index)}
        if not flow.ops[index].writes or index in earlier or made_by & earlier:
            continue
        for check in checks:
            if index in followers[check]:
                continue
            waits = index
            if task[index] != task[check]:
                # One is enough: the write takes what each of them makes.
                beside = [m for m in made_by & after.keys() if task[m] == task[check]]
                waits = min(filter(can_wait, beside), default=index)
            there = here.get(task[waits], set())
            behind = followers[check] & before_writes
            behind = {i for i in behind if task[i] != task[waits]}
            value = _coming(flow, behind, there) or _least(flow, check, there)
            here[task[waits]].add(value)
            values = awaited.setdefault(waits, [])
            if value not in values:
                values.append(value)
    return awaited


def _refuses(op: Op) -> bool:
    if op.equation.primitive.name == "checked_ids":
        return True
    if op.equation.primitive.name != "route_rows":
        return False
    params = op.equation.params
    # Every key may have a row, but not every number of them.
    may_be_wrong = not params["drop"] and params["layout"].kind != "hash"
    return bool(may_be_wrong or params["most"])


def _reversed(after: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
    before: dict[int, list[int]] = {i: [] for i in after}
    for first, later in after.items():
        for then in later:
            before[then].append(first)
    return before


def _coming(flow: Flow, behind: set[int], there: set[Var]) -> Var | None:
    """Returns the first value that some ops make, of those needed on a task."""
    makers = {flow.producer[v] for v in there if v in flow.producer} & behind
    if not makers:
        return None
    results: list[Var] = flow.ops[min(makers)].equation.outvars
    return next(v for v in results if v in there)


def _reached(start: Iterable[int], after: Mapping[int, Iterable[int]]) -> set[int]:
    found: set[int] = set()
    todo = list(start)
    while todo:
        for index in after[todo.pop()]:
            if index not in found:
                found.add(index)
                todo.append(index)
    return found


def _least(flow: Flow, check: int, there: set[Var]) -> Var:
    """Returns the result of a check that costs least where some are needed anyway."""
    outputs: list[Var] = flow.ops[check].equation.outvars
    return min(outputs, key=lambda v: (v not in there, flow.type_of(v).nbytes))
