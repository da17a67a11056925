"""Program of a run in which one task has the part of another, which is lost."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import (
    AggregateNode,
    ContributeNode,
    LookupNode,
    Node,
    ReadNode,
    RecvNode,
    RowMean,
    Rows,
    SegmentNode,
    SendNode,
    ValueId,
    WriteNode,
    after_of,
    inputs_of,
    outputs_of,
)
from jgraph.plan.program.program import Partition, Program

_Number: TypeAlias = Callable[[int], int]


def standing_in(program: Program, by: Mapping[TaskName, TaskName]) -> Program:
    """Returns a program in which tasks do what others did, beside their own part.

    What the two said to each other stays on the task. Segments are the same: nothing is
    compiled that neither had compiled.

    Args:
      program: a step, as it was planned.
      by: who stands in for each task; one that does is none of these.

    Example:
      >>> worker, ps = TaskName("/job:worker/task:0"), TaskName("/job:ps/task:0")
      >>> parts = tuple(Partition(task, (), (), ()) for task in (worker, ps))
      >>> program = Program("step", worker, parts, (), (), ())
      >>> [part.task for part in standing_in(program, {worker: ps}).partitions]
      ['/job:ps/task:0']
    """
    for lost, heir in by.items():
        alias = program.rename_task(lost, heir)
        own = [part for part in alias.partitions if part.task == heir]
        others = [part for part in alias.partitions if part.task != heir]
        joint = [_merged(*own)] if len(own) == 2 else own
        program = replace(alias, partitions=(*joint, *others))
    return program


def _merged(one: Partition, other: Partition) -> Partition:
    """Returns one partition of two of a task."""
    names = {(v.container, v.name): n for n, v in enumerate(one.variables)}
    variables, places = list(one.variables), list[int]()
    for variable in other.variables:
        key = variable.container, variable.name
        if key not in names:
            names[key] = len(variables)
            variables.append(variable)
        places.append(names[key])
    value, node = len(one.values), len(one.nodes)
    theirs = [
        _numbered(n, lambda v: v + value, places.__getitem__, lambda n: n + node)
        for n in other.nodes
    ]
    return replace(
        one,
        values=(*one.values, *other.values),
        variables=tuple(variables),
        nodes=tuple(_joined([*one.nodes, *theirs], one.task)),
        gate=one.gate or other.gate,
    )


def _joined(nodes: Sequence[Node], task: TaskName) -> list[Node]:
    """Returns the nodes of two partitions as those of one, in an order that can be.

    Args:
      nodes: of both; their values and nodes are numbered together.
      task: that they are on.
    """
    by_number = dict(enumerate(nodes))
    places = _at_gate(by_number)
    messages = {
        n.key: n.values for n in nodes if isinstance(n, SendNode) and n.dst == task
    }
    same: dict[ValueId, ValueId] = {}
    for number, node in enumerate(nodes):
        if isinstance(node, RecvNode) and node.src == task:
            same.update(zip(node.outs, messages[node.key], strict=True))
            del by_number[number]
        elif isinstance(node, SendNode) and node.dst == task:
            del by_number[number]

    def value(v: ValueId) -> ValueId:
        while v in same:  # it may be sent on as it came
            v = same[v]
        return v

    by_number = {
        n: _numbered(node, value, lambda v: v, lambda a: places.get(a, a))
        for n, node in by_number.items()
    }
    makers = {v: n for n, node in by_number.items() for v in outputs_of(node)}
    needs = {
        n: {*(makers[v] for v in inputs_of(node)), *after_of(node)} & by_number.keys()
        for n, node in by_number.items()
    }
    # A message is waited for when all else is done, and those in the order in which
    # the plan numbers them: who runs one node after the other is never stuck.
    turns = {
        n: (len(node.key), node.key, n) if isinstance(node, RecvNode) else (0, "", n)
        for n, node in by_number.items()
    }
    place = {n: new for new, n in enumerate(_sorted(needs, turns))}
    return [
        _numbered(
            _without(by_number[n], by_number),
            lambda v: v,
            lambda v: v,
            place.__getitem__,
        )
        for n in place
    ]


def _at_gate(by_number: dict[int, Node]) -> dict[int, int]:
    """Makes one node of two that give the gate something, or take of it.

    Returns:
      Which node has the place of another.
    """
    places: dict[int, int] = {}
    for kind in (ContributeNode, AggregateNode):
        found = [n for n, node in by_number.items() if isinstance(node, kind)]
        if len(found) == 2:
            first, second = found
            by_number[first] = _both(by_number[first], by_number.pop(second))
            places[second] = first
    return places


def _both(one: Node, other: Node) -> Node:
    match one, other:
        case ContributeNode(), ContributeNode():
            variables = (*one.variables, *other.variables)
            return replace(
                one, variables=variables, values=(*one.values, *other.values)
            )
        case AggregateNode(), AggregateNode():
            means = (*one.row_means, *other.row_means)
            return AggregateNode((*one.variables, *other.variables), means)
        case _:
            raise AssertionError(f"{one} and {other} are not of one kind")


def _sorted(
    needs: Mapping[int, set[int]], turns: Mapping[int, tuple[int, str, int]]
) -> list[int]:
    """Returns the nodes, each after those that it needs; else by their turns."""
    users = defaultdict[int, list[int]](list)
    for node, needed in needs.items():
        for each in needed:
            users[each].append(node)
    missing = {node: len(needed) for node, needed in needs.items()}
    ready = sorted(turns[node] for node, count in missing.items() if not count)
    found: list[int] = []
    while ready:
        node = heapq.heappop(ready)[-1]
        found.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, turns[user])
    return found


def _without(node: Node, by_number: Mapping[int, Node]) -> Node:
    """Returns a node that waits for no message that stays on its task."""
    match node:
        case SegmentNode() | ReadNode() | WriteNode() | LookupNode():
            return replace(node, after=tuple(n for n in node.after if n in by_number))
        case _:
            return node


def _numbered(node: Node, value: _Number, variable: _Number, index: _Number) -> Node:
    """Returns a node whose values, variables and earlier nodes have other numbers."""
    numbers: dict[str, Any] = {}
    new: Any
    for field in fields(node):
        old = getattr(node, field.name)
        match field.name, old:
            case "after", _:
                new = tuple(map(index, old))
            case (("variables" | "updates" | "reads"), _):
                new = tuple(map(variable, old))
            case (("rows" | "row_updates" | "row_reads" | "row_means"), _):
                new = tuple(_row(each, value, variable) for each in old)
            case (("inputs" | "outs" | "values" | "local"), _):
                new = tuple(map(value, old))
            case (("out" | "ids" | "positions" | "slot" | "value"), int()):
                new = value(old)
            case _:
                continue
        numbers[field.name] = new
    return replace(node, **numbers)


def _row(row: Rows | RowMean, value: _Number, variable: _Number) -> Rows | RowMean:
    match row:
        case Rows():
            return Rows(variable(row.variable), value(row.ids))
        case RowMean():
            return RowMean(variable(row.ids), tuple(map(variable, row.rows)))
