"""Conditionals on sharded values: both branches are computed, then one is selected.

A conditional runs whole on one task, and would gather what its branches take. As plain
operations they run shard by shard like the rest of an update (optax.MultiSteps and its
like accumulate or apply under a conditional).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jgraph import _compat
from jgraph._compat import Equation
from jgraph.graph.graph import Graph
from jgraph.graph.tracing.trace import retrace
from jgraph.plan.analysis.run_each import run_each
from jgraph.plan.sharding.wanted import is_placed

Shapes = set[tuple[int, ...]]


def without_branches(graph: Graph, shapes: Shapes) -> Graph:
    """Returns the graph without conditionals that make values of these shapes.

    Those that somebody placed, or that change state, stay.
    """
    while any(_is_open(graph, n, shapes) for n in range(len(graph.equations))):
        graph = _opened(graph, shapes)
    return graph


def _is_open(graph: Graph, number: int, shapes: Shapes) -> bool:
    equation = graph.equations[number]
    if equation.primitive.name != "cond" or is_placed(graph.stamps[number]):
        return False
    if equation.effects or any(_compat.is_ref(v.aval) for v in equation.invars):
        return False
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in equation.outvars):
        return False
    return any(tuple(v.aval.shape) in shapes for v in equation.outvars)


def _opened(graph: Graph, shapes: Shapes) -> Graph:
    equations = enumerate(graph.equations)
    opened = {id(e) for n, e in equations if _is_open(graph, n, shapes)}

    def rule(equation: Equation, operands: list[Any]) -> list[Any]:
        do = _both if id(equation) in opened else _compat.run_equation
        return do(equation, operands)

    def run(refs: list[Any], feeds: list[Any]) -> list[Any]:
        return run_each(graph.jaxpr, [*refs, *feeds], rule, graph.consts)

    return retrace(graph, graph.variables, run)


def _both(equation: Equation, operands: list[Any]) -> list[Any]:
    index, *arrays = operands
    with _compat.under(equation):
        outcomes = [
            jax.core.eval_jaxpr(
                _compat.open_jaxpr(b), getattr(b, "consts", ()), *arrays
            )
            for b in equation.params["branches"]
        ]
        return [lax.select_n(index, *cases) for cases in zip(*outcomes, strict=True)]
