"""``Graph.show``: a picture of a graph, its equations in the lane of their device."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from jgraph import _compat
from jgraph._compat import Atom, Equation, Var
from jgraph.graph.cost import flops_of, nbytes_of_value
from jgraph.graph.device import MARK
from jgraph.graph.ir import Dataflow, VariableSpec
from jgraph.graph.text import equation_text, value_names
from jgraph.view.scene import Item, Link, Scene
from jgraph.view.svg import Picture, draw
from jgraph.view.units import bytes_text, count_text, flops_text
from jgraph.view.views import views

Names: TypeAlias = Mapping[Var, str]

_VERBS = {"get": "read", "swap": "write", "addupdate": "add to"}
_TRANSFORM = re.compile(r"[a-z_]+\(|\)")


def graph_picture(graph: Dataflow) -> Picture:
    """Returns a drawing of the graph; of a large one by the user's scopes."""
    return draw(views(graph_scene(graph)))


def graph_scene(graph: Dataflow) -> Scene:
    """Returns what a picture of the graph shows."""
    inputs, names = graph.jaxpr.invars, value_names(graph)
    specs = dict(zip(inputs, graph.variables, strict=False))
    sources = {v: variable_item(spec, str(spec.device)) for v, spec in specs.items()}
    sources |= {v: input_item(v, names[v], "") for v in inputs[len(specs) :]}
    fetches = [
        (Item(f"fetch {n}", "", path or "result", _type(v), "fetched", "fetch"), v)
        for n, (path, v) in enumerate(
            zip(graph.fetches, graph.jaxpr.outvars, strict=True)
        )
    ]
    items = [
        equation_item(n, e, names, str(_home(e, specs) or stamp))
        for n, (e, stamp) in enumerate(zip(graph.equations, graph.stamps, strict=True))
    ]
    uses = list(zip(items, (e.invars for e in graph.equations), strict=True))
    makers = {
        v: i for i, e in zip(items, graph.equations, strict=True) for v in e.outvars
    }
    uses += [(item, [v]) for item, v in fetches]
    everything = [*sources.values(), *(item for item, _ in uses)]
    return Scene(
        f"graph {graph.name}",
        everything,
        links_of(uses, {**sources, **makers}, names),
        lanes=_lines(everything),
    )


def _home(equation: Equation, specs: Mapping[Var, VariableSpec]) -> object:
    return next(
        (specs[v].device for v in equation.invars if isinstance(v, Var) and v in specs),
        None,
    )


def body_scene(
    title: str,
    equations: Sequence[Equation],
    names: Names,
    specs: Mapping[Var, VariableSpec],
    lane: str,
) -> Scene:
    """Returns a scene of some equations of a graph, in one lane, with what they take.

    Args:
      title: of the scene.
      equations: in program order.
      names: of values.
      specs: of the graph's variables, by their Refs.
      lane: of everything.
    """
    outputs = {v for e in equations for v in e.outvars}
    outside = dict.fromkeys(
        v
        for e in equations
        for v in e.invars
        if isinstance(v, Var) and v not in outputs
    )
    sources = {
        v: variable_item(specs[v], lane)
        if v in specs
        else input_item(v, names.get(v, "constant"), lane)
        for v in outside
    }
    items = [equation_item(n, e, names, lane) for n, e in enumerate(equations)]
    by = {v: i for i, e in zip(items, equations, strict=True) for v in e.outvars}
    uses = list(zip(items, (e.invars for e in equations), strict=True))
    everything = [*sources.values(), *items]
    links = links_of(uses, {**sources, **by}, names)
    return Scene(title, everything, links, lanes=_lines(everything))


def links_of(
    uses: Iterable[tuple[Item, Sequence[Atom]]],
    makers: Mapping[Var, Item],
    names: Names,
) -> list[Link]:
    """Returns a link for each value that an item takes of another."""
    links = []
    for item, operands in uses:
        for v in dict.fromkeys(v for v in operands if isinstance(v, Var)):
            source = makers.get(v)
            if source is None:
                continue
            state = _compat.is_ref(v.aval)
            value = "" if state else f"{names.get(v, '')}: {_type(v)}"
            nbytes = 0 if state else nbytes_of_value(v)
            links.append(Link(source.key, item.key, value, nbytes))
    return links


def variable_item(spec: VariableSpec, lane: str) -> Item:
    """Returns the item of a variable, or of a shard of one."""
    array = f"{spec.dtype}[{','.join(map(str, spec.shape))}]"
    nbytes = getattr(spec.dtype, "itemsize", 0)
    for size in spec.shape:
        nbytes *= size
    key = f"variable {spec.container}:{spec.name}"
    detail = f"variable {spec.name}: {array}, {bytes_text(nbytes)}"
    line = f"{array} · {bytes_text(nbytes)}"
    return Item(
        key, lane, spec.name, line, detail, "variable", ("variables",), nbytes=nbytes
    )


def input_item(v: Var, name: str, lane: str) -> Item:
    """Returns the item of a value that comes from outside."""
    nbytes = nbytes_of_value(v)
    line = f"{_type(v)} · {bytes_text(nbytes)}"
    detail = f"{name}: {_type(v)}"
    return Item(
        f"in {name}", lane, name, line, detail, "feed", ("inputs",), nbytes=nbytes
    )


def equation_item(number: int, equation: Equation, names: Names, lane: str) -> Item:
    """Returns the item of an equation."""
    name: str = equation.primitive.name
    flops = flops_of(equation)
    title, kind, path = name, "operation", scopes_of(equation)
    if name in _VERBS:
        verb = _VERBS[name]
        title, kind = f"{verb} {names.get(equation.invars[0], '')}", "state"
        path = path or (f"{verb} variables",)
    results = [v for v in equation.outvars if not _compat.is_dropped(v)]
    line = " ".join(_type(v) for v in results[:1]) + (" …" if len(results) > 1 else "")
    line += f" · {flops_text(flops)}" if flops and line else ""
    line_of_code = "/".join(_compat.user_line(equation).split("/")[-3:])
    lines = [equation_text(equation, names), line_of_code]
    if flops:
        lines.append(flops_text(flops))
    return Item(
        f"e{number}",
        lane,
        title,
        line,
        "\n".join(lines),
        kind,
        path,
        flops,
    )


def scopes_of(equation: Equation) -> tuple[str, ...]:
    """Returns the user's own scopes of an equation; those of its gradient apart."""
    stack = _compat.name_stack_of(equation)
    parts = [_TRANSFORM.sub("", part) for part in stack.split("/")]
    mine = [p for p in parts if p and not p.startswith(MARK)]
    if mine and "transpose(" in stack:
        mine[0] += " (grad)"
    return tuple(mine)


def _lines(items: Iterable[Item]) -> dict[str, str]:
    """A line about each lane: its equations and variables."""
    lanes: dict[str, list[Item]] = {}
    for item in items:
        lanes.setdefault(item.lane, []).append(item)
    return {lane: _line(members) for lane, members in lanes.items()}


def _line(items: Sequence[Item]) -> str:
    equations = [i for i in items if i.kind in ("operation", "state")]
    nbytes = sum(i.nbytes for i in items if i.kind == "variable")
    flops = sum(i.flops for i in equations)
    parts = [count_text(len(equations), "equation")] if equations else []
    parts += [flops_text(flops)] if flops else []
    parts += [f"{bytes_text(nbytes)} of variables"] if nbytes else []
    return " · ".join(parts)


def _type(atom: Atom) -> str:
    array = _compat.array_type(atom)
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
