"""Selection of the part of a graph to run, and the structure of its results."""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax

from jgraph import _compat
from jgraph._compat import Equation, Literal, Var
from jgraph.errors import FetchError
from jgraph.graph.graph import Graph
from jgraph.graph.ir import VariableKey
from jgraph.graph.tracing.taps import tapped


def select_fetches(graph: Graph, fetches: Any) -> Graph:
    """Returns the graph with only these fetches, in this structure.

    Args:
      graph: a traced function.
      fetches: a pytree of names: a key of the returned dict (``"loss"``), an index of
        the returned tuple (``0``), a full path as in ``graph.fetches``
        (``"['metrics']['loss']"``), or the name of a tapped value.

    Raises:
      FetchError: the function returns and taps nothing of that name.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.tracing.trace import trace
      >>> graph, _ = trace(lambda x: {"a": x, "b": 2 * x}, jnp.ones(3))
      >>> select_fetches(graph, ["b"]).fetches
      ("['b']",)
    """
    names, tree = jax.tree_util.tree_flatten(fetches)
    chosen = [_chosen(graph, name) for name in names]
    return replace(
        graph,
        jaxpr=graph.jaxpr.replace(outvars=[value for _, value in chosen]),
        fetches=tuple(name for name, _ in chosen),
        out_tree=tree,
    )


def select_targets(graph: Graph, targets: Collection[str | VariableKey]) -> Graph:
    """Returns the graph with only the updates of these variables.

    Args:
      graph: a traced function with the fetches that are wanted.
      targets: names of variables, or (container, name).

    Raises:
      FetchError: the function does not write such a variable, or several of that name
        in different containers; or what is fetched or updated reads another variable
        after that was written.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.tracing.trace import trace
      >>> from jgraph.graph.variable import Variable
      >>> w = Variable("w", jnp.zeros(()))
      >>> def step(x):
      ...     loss = (w[...] - x) ** 2
      ...     w[...] = w[...] - 0.1 * (w[...] - x)
      ...     return loss
      >>> graph, _ = trace(step, 1.0)
      >>> [e.primitive.name for e in select_targets(graph, []).equations]
      ['get', 'convert_element_type', 'sub', 'integer_pow']
    """
    refs = dict(zip(graph.jaxpr.invars, graph.variables, strict=False))
    written = {refs[r].key for e in graph.equations for r in _written(e)}
    wanted = {_target(graph, target, written) for target in targets}
    needed = {v for v in graph.jaxpr.outvars if not isinstance(v, Literal)}
    later: set[Var] = set()  # variables that something kept uses further down
    indices: list[int] = []
    for index in reversed(range(len(graph.equations))):
        equation = graph.equations[index]
        writes = _written(equation)
        asked = any(refs[r].key in wanted for r in writes)
        if not asked and not any(v in needed for v in equation.outvars):
            missed = [r for r in writes if r in later]
            if missed:
                raise _read_later(graph, equation, refs[missed[0]].name)
            continue
        unasked = [r for r in writes if refs[r].key not in wanted]
        if unasked:
            raise _read_later(graph, equation, refs[unasked[0]].name)
        indices.append(index)
        taken = [v for v in equation.invars if not isinstance(v, Literal)]
        needed.update(taken)
        later.update(v for v in taken if v in refs)
    indices.reverse()
    return replace(
        graph,
        jaxpr=graph.jaxpr.replace(eqns=[graph.equations[i] for i in indices]),
        stamps=tuple(graph.stamps[i] for i in indices),
    )


def _target(
    graph: Graph, target: str | VariableKey, written: Collection[VariableKey]
) -> VariableKey:
    """Returns the key of a variable that the graph writes."""
    by_name = isinstance(target, str)
    found = [key for key in written if target == (key[1] if by_name else key)]
    if len(found) == 1:
        return found[0]
    name = target if isinstance(target, str) else target[1]
    if found:
        containers = ", ".join(sorted(f"'{container}'" for container, _ in found))
        raise FetchError(
            f"'{graph.name}' writes variables called {name!r} in the containers "
            f"{containers}; give the variable itself: targets=[variable]",
            fetch=name,
        )
    known = ", ".join(sorted({other for _, other in written})) or "none"
    where = "" if by_name or not target[0] else f" in the container '{target[0]}'"
    raise FetchError(
        f"'{graph.name}' does not write a variable called {name!r}{where}; it writes "
        f"{known}",
        fetch=name,
    )


def _written(equation: Equation) -> list[Var]:
    refs = [v for v in equation.invars if _compat.is_ref(v.aval)]
    return [ref for ref in refs if _compat.writes(equation, ref)]


def _read_later(graph: Graph, equation: Equation, name: str) -> FetchError:
    return FetchError(
        f"what is asked of '{graph.name}' needs variable '{name}' as it is after "
        f"{_compat.user_line(equation)}; add it to the targets, or leave targets out "
        "to run the whole step",
        fetch=name,
    )


def _chosen(graph: Graph, name: Any) -> tuple[str, Any]:
    """Returns the full name of a fetch, and its value."""
    wanted = name if isinstance(name, str) else f"[{name!r}]"
    for spelling in (wanted, f"['{wanted}']", f".{wanted}"):
        if spelling in graph.fetches:
            return spelling, graph.jaxpr.outvars[graph.fetches.index(spelling)]
    taps = tapped(graph)
    if wanted in taps:
        return wanted, taps[wanted]
    known: Sequence[str] = [fetch or "(the result itself)" for fetch in graph.fetches]
    plain = {fetch.strip("[]'."): fetch for fetch in (*graph.fetches, *taps)}
    close = difflib.get_close_matches(wanted.strip("[]'."), plain, n=1)
    hint = f" Did you mean {plain[close[0]]}?" if close else ""
    also = f"; it taps {', '.join(taps)}" if taps else ""
    raise FetchError(
        f"'{graph.name}' returns nothing called {name!r}.{hint} It returns: "
        f"{', '.join(known) or 'nothing'}{also}",
        fetch=str(name),
    )
