"""Elementwise affinity: variables that an update combines element by element.

Adam's moments belong beside their parameter: apart, each step would send them. The
passes need no names; they follow each written value back through elementwise operations
of the written shape to the variables (or to their same rows) that are read there.
Stamped operations stop them: those are where the user wants them.
"""

import re

from jgraph._compat import Equation, Literal, Var
from jgraph.graph.device import DeviceSpec
from jgraph.plan.analysis.flow import Flow, Op

_ELEMENTWISE = re.compile(
    r"(add|add_any|sub|mul|div|neg|abs|sign|max|min|pow|integer_pow|square|sqrt|rsqrt"
    r"|select_n|clamp|convert_element_type|copy|stop_gradient|tanh|exp|log|logistic"
    r"|eq|ne|lt|le|gt|ge|and|or|not|is_finite|optimization_barrier)\Z"
)


def companions(flow: Flow) -> list[set[int]]:
    """Returns sets of variables of one shape of which one is computed from the others.

    Single numbers are left out: step counters tie everything together and cost
    nothing to send.
    """
    found = []
    for write in _writes(flow):
        if flow.graph.variables[write.writes[0]].shape:
            ops = _behind(flow, write)
            near = {op.reads[0][0] for op in ops if _is_read(op, write)}
            found.append(near | {write.writes[0]})
    return [near for near in found if len(near) > 1]


def behind_writes(flow: Flow) -> dict[int, int]:
    """Returns the variable that each op is on the way to, element by element."""
    found: dict[int, int] = {}
    for write in _writes(flow):
        for op in _behind(flow, write):
            if not op.reads:
                found.setdefault(op.index, write.writes[0])
    return found


def is_elementwise(equation: Equation) -> bool:
    """Whether each element of the result follows from the same one of the operands."""
    return bool(_ELEMENTWISE.match(equation.primitive.name))


def _writes(flow: Flow) -> list[Op]:
    """Returns the writes of whole variables and of whole rows."""
    return [
        op
        for op in flow.ops.values()
        if op.is_whole_write or (op.writes and op.rows is not None)
    ]


def _is_read(op: Op, write: Op) -> bool:
    """Whether ``op`` only reads a variable, in the same places as ``write``."""
    if write.rows is None:
        return op.is_whole_read
    return op.rows is write.rows and not op.writes


def _behind(flow: Flow, write: Op) -> list[Op]:
    """Returns the elementwise ops and the reads that a written value follows from."""
    value = write.equation.invars[1]
    shape = getattr(value.aval, "shape", None)
    todo: list[Var] = [] if isinstance(value, Literal) else [value]
    seen = set(todo)
    found: dict[int, Op] = {}
    while todo:
        producer = flow.producer.get(todo.pop())
        op = None if producer is None else flow.ops[producer]
        if op is None or not (_is_read(op, write) or _follows(flow, op)):
            continue
        found[op.index] = op
        near = [v for v in flow.inputs(op) if v not in seen]
        todo += [v for v in near if getattr(v.aval, "shape", None) == shape]
        seen.update(near)
    return list(found.values())


def _follows(flow: Flow, op: Op) -> bool:
    stamped = flow.graph.stamps[op.index] != DeviceSpec()
    return not stamped and is_elementwise(op.equation)
