"""Carriers: empty arrays whose shape tells a task the value of a symbolic size.

XLA code for any size finds the sizes in the shapes of its arguments. An operation that
mentions a name which none of its operands has, such as ``jnp.zeros(x.shape)``, takes an
array of no elements besides, cut from a feed, whose shape tells it. It costs no bytes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax import lax

from jgraph import _compat
from jgraph._compat import Equation, Var
from jgraph.errors import GraphError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.sizes import is_feed_symbol, names_needed, symbols_of


def with_carriers(graph: Graph) -> tuple[Graph, dict[str, Var]]:
    """Returns the graph with an equation in front for each name, and the carriers.

    The same graph if no feed has a name in its shape.

    Raises:
      GraphError: a feed whose shape is no name, nor a number times a name.
    """
    feeds = graph.jaxpr.invars[len(graph.variables) :]
    equations: list[Equation] = []
    carriers: dict[str, Var] = {}
    for var, feed in zip(feeds, graph.feeds, strict=True):
        for axis, text in enumerate(symbols_of(feed.aval.shape)):
            if text and not is_feed_symbol(text):
                raise GraphError(
                    f"feed '{feed.name}' of '{graph.name}' has the size {text}; a size "
                    "of a feed is a number, a name, or a number times a name"
                )
            for name in _compat.size_names(feed.aval.shape[axis]) if text else ():
                if name not in carriers:
                    equations.append(_carrier(var, axis))
                    carriers[name] = equations[-1].outvars[0]
    if not equations:
        return graph, {}
    return replace(
        graph,
        jaxpr=graph.jaxpr.replace(eqns=[*equations, *graph.equations]),
        stamps=((DeviceSpec(),) * len(equations) + graph.stamps),
    ), carriers


def carriers_of(equation: Equation, carriers: Mapping[str, Var]) -> tuple[Var, ...]:
    """Returns the carriers that an operation takes beside its operands."""
    if not carriers:
        return ()
    return tuple(
        carriers[name] for name in sorted(names_needed(equation)) if name in carriers
    )


def _carrier(feed: Var, axis: int) -> Equation:
    def cut(x: Any) -> Any:
        if x.ndim == 1:
            return lax.broadcast_in_dim(x, (*x.shape, 0), (0,))
        ends = [size if n == axis else 0 for n, size in enumerate(x.shape)]
        return lax.slice(x, [0] * x.ndim, ends)

    jaxpr, _, _ = _compat.make_jaxpr(cut, _compat.array_type(feed))
    (equation,) = jaxpr.eqns
    return _compat.rebuild_equation(equation, lambda _: feed, equation.outvars)
