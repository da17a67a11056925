"""Taps: names for values inside a graph, to fetch them and to feed others instead."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from jgraph import _compat
from jgraph._compat import Atom, Equation, Var
from jgraph.errors import FeedError, GraphError
from jgraph.graph.device import did_you_mean
from jgraph.graph.graph import Graph
from jgraph.graph.ir import Feed

T = TypeVar("T")

_PREFIX: Final = "jgtap<"
_PRIMITIVE: Final = "name"


def tap(name: str, value: T) -> T:
    """Returns ``value``, under a name by which a session can fetch or feed it.

    ``session.run(step, x, fetches=["hidden"])`` gives the value itself, and
    ``session.run(step, x, feeds={"hidden": h})`` computes with ``h`` in its place; what
    only the value was computed from is then not run. The names of a pytree's leaves
    are those of their paths, as of arguments: ``"layers['dense']"``. A derivative with
    respect to the value is that of the function; outside of a session nothing happens.

    Args:
      name: any text; one per function.
      value: arrays of any shape and dtype, in a pytree.

    Raises:
      GraphError: the name is empty.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.tracing.function import function
      >>> @function
      ... def step(x):
      ...     hidden = tap("hidden", jnp.sin(x))
      ...     return hidden * 2
      >>> sorted(tapped(step.graph(1.0)))
      ['hidden']
    """
    if not name:
        raise GraphError("a tap needs a name; write for example jg.tap('hidden', x)")

    def named(path: Any, leaf: Any) -> Any:
        return checkpoint_name(leaf, f"{_PREFIX}{name}{jax.tree_util.keystr(path)}>")

    tapped_value: T = jax.tree_util.tree_map_with_path(named, value)
    return tapped_value


def is_name(equation: Equation) -> bool:
    """Whether an equation only names a value, as taps and checkpoint names do."""
    return bool(equation.primitive.name == _PRIMITIVE)


def tapped(graph: Graph) -> dict[str, Var]:
    """Returns the values of a graph that have names, outside of loops and branches.

    Raises:
      GraphError: values of two types have one name.
    """
    found: dict[str, Var] = {}
    for name, var in _all_tapped(graph):
        first = found.setdefault(name, var)
        if _compat.array_type(first) != _compat.array_type(var):
            raise GraphError(
                f"'{graph.name}' taps two values as '{name}', {first.aval} and "
                f"{var.aval}; give each a name of its own"
            )
    return found


def feed_taps(graph: Graph, names: Collection[str]) -> Graph:
    """Returns the graph with feeds in place of these tapped values.

    A value that is computed again for its gradient has its name twice, and one feed
    is for both.

    Raises:
      FeedError: no value has such a name.
    """
    if not names:
        return graph
    known = tapped(graph)
    for name in names:
        if name not in known:
            raise _unknown(graph, name, list(known))
    feeds = {name: _compat.fresh_var(known[name]) for name in names}
    feed_of = {v: feeds[n] for n, v in _all_tapped(graph) if n in feeds}

    def rename(atom: Atom) -> Atom:
        return feed_of.get(atom, atom) if isinstance(atom, Var) else atom

    equations = [
        (equation, stamp)
        for equation, stamp in zip(graph.equations, graph.stamps, strict=True)
        if not (is_name(equation) and equation.outvars[0] in feed_of)
    ]
    jaxpr = graph.jaxpr.replace(
        invars=[*graph.jaxpr.invars, *feeds.values()],
        outvars=[rename(v) for v in graph.jaxpr.outvars],
        eqns=[_compat.rebuild_equation(e, rename, e.outvars) for e, _ in equations],
    )
    new = tuple(Feed(n, _compat.array_type(v)) for n, v in feeds.items())
    return replace(
        graph,
        jaxpr=jaxpr,
        feeds=(*graph.feeds, *new),
        stamps=tuple(stamp for _, stamp in equations),
    )


def _all_tapped(graph: Graph) -> list[tuple[str, Var]]:
    return [
        (e.params["name"].removeprefix(_PREFIX)[:-1], e.outvars[0])
        for e in graph.equations
        if is_name(e) and e.params["name"].startswith(_PREFIX)
    ]


def _unknown(graph: Graph, name: str, known: list[str]) -> FeedError:
    names = [feed.name for feed in graph.feeds] + known
    values = f" and the tapped values {', '.join(known)}" if known else ""
    inside = _inside(graph.equations, name)
    if inside is not None:
        return FeedError(
            f"'{name}' of '{graph.name}' is tapped inside a '{inside}', which runs as "
            "one operation; tap what goes in or comes out",
            feed=name,
        )
    return FeedError(
        f"'{graph.name}' has no argument and no tapped value called {name}; "
        f"{did_you_mean(name, names)}its feeds are: "
        f"{', '.join(f.name for f in graph.feeds) or 'none'}{values}",
        feed=name,
    )


def _inside(equations: Any, name: str) -> str | None:
    """Returns the loop or conditional that taps ``name`` in its body."""
    for equation in equations:
        for _, body in _compat.inner_jaxprs(equation):
            inner = _compat.open_jaxpr(body).eqns
            wanted = f"{_PREFIX}{name}>"
            here = any(is_name(e) and e.params["name"] == wanted for e in inner)
            if here or _inside(inner, name) is not None:
                return str(equation.primitive)
    return None
