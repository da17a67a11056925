"""Stable text of a graph: one line per equation, the same for two equal traces."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jgraph import _compat
from jgraph._compat import Atom, Equation, Literal, Var
from jgraph.graph.ir import Dataflow

Names = Mapping[Var, str]

_SHOWN = (bool, int, float, str, np.dtype, type)
_HIDDEN = {"donated_invars", "preferred_element_type", "weak_type"}
_MAX_PARAMETER = 60
_MAX_BODY = 12


def graph_text(graph: Dataflow) -> str:
    """Returns the graph as text.

    Values are numbered in program order; nothing depends on object identities, so two
    traces of one function give one text.
    """
    names = value_names(graph)
    lines = [f"graph {graph.name}"]
    lines += _section("variables", map(_variable_line, graph.variables))
    lines += _section("feeds", (f"{f.name}: {_type(f.aval)}" for f in graph.feeds))
    lines += _section(
        "constants",
        (f"{names[v]}: {_type(_compat.array_type(v))}" for v in graph.jaxpr.constvars),
    )
    lines += _section("equations", equation_lines(graph, names))
    lines += _section(
        "fetches",
        (
            f"{path or 'result'}: {atom_text(v, names)}"
            for path, v in zip(graph.fetches, graph.jaxpr.outvars, strict=True)
        ),
    )
    lines += _section("notes", graph.notes)
    return "\n".join(lines)


def value_names(graph: Dataflow) -> dict[Var, str]:
    """Returns a name per value: of the variable, the feed, or its number, ``%3``."""
    names: dict[Var, str] = {}
    inputs = [v.name for v in graph.variables] + [f.name for f in graph.feeds]
    names.update(zip(graph.jaxpr.invars, inputs, strict=False))
    names.update((v, f"const{i}") for i, v in enumerate(graph.jaxpr.constvars))
    number = 0
    for equation in graph.equations:
        for v in equation.outvars:
            if _compat.is_dropped(v):
                names[v] = "_"
            elif v not in names:
                names[v] = f"%{number}"
                number += 1
    return names


def equation_lines(graph: Dataflow, names: Names) -> Iterator[str]:
    """Yields the line of each equation, with its device where it has one."""
    for equation, stamp in zip(graph.equations, graph.stamps, strict=True):
        place = f"  @{stamp}" if stamp else ""
        yield equation_text(equation, names) + place


def equation_text(equation: Equation, names: Names) -> str:
    """Returns one line: results, primitive, parameters, operands."""
    outs = " ".join(
        f"{names.get(v, '?')}:{_type(_compat.array_type(v))}" for v in equation.outvars
    )
    operands = " ".join(atom_text(v, names) for v in equation.invars)
    call = f"{equation.primitive.name}{_parameters(equation)} {operands}".rstrip()
    return f"{outs} = {call}" if outs else call


def atom_text(atom: Atom, names: Names) -> str:
    """Returns the name of a value, or the number that stands there."""
    if not isinstance(atom, Literal):
        return names.get(atom, "?")
    value = np.asarray(atom.val)
    return str(value) if value.ndim == 0 else f"array{list(value.shape)}"


def _section(title: str, lines: Any) -> list[str]:
    rows = [f"    {line}" for line in lines]
    return [f"  {title}", *rows] if rows else []


def _variable_line(spec: Any) -> str:
    place = f"  @{spec.device}" if spec.device else ""
    container = f"{spec.container}:" if spec.container else ""
    return f"{container}{spec.name}: {_type(spec)}{place}"


def _type(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _parameters(equation: Equation) -> str:
    parameters = []
    bodies = {name for name, _ in _compat.inner_jaxprs(equation)}
    for name, value in sorted(equation.params.items()):
        if name in bodies or name in _HIDDEN or value is False:
            continue
        text = _plain(value)
        if text is not None and text != "()" and len(text) <= _MAX_PARAMETER:
            parameters.append(f"{name}={text}")
    parameters += [f"{name}={_body(b)}" for name, b in _compat.inner_jaxprs(equation)]
    return f"[{' '.join(parameters)}]" if parameters else ""


def _plain(value: Any) -> str | None:
    """The text of a parameter that is plain data and says something, else None."""
    if isinstance(value, tuple):
        parts = [_plain(v) for v in value]
        return None if None in parts else f"({','.join(map(str, parts))})"
    if not isinstance(value, _SHOWN):
        return None
    return value.__name__ if isinstance(value, type) else str(value)


def _body(body: Any) -> str:
    primitives = [e.primitive.name for e in _compat.open_jaxpr(body).eqns]
    more = ["..."] if len(primitives) > _MAX_BODY else []
    return f"{{{' '.join(primitives[:_MAX_BODY] + more)}}}"
