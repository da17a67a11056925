"""A plan as text: stable, for people and for tests."""

from collections.abc import Iterable, Sequence

from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName, VariableSpec
from jgraph.plan.partition.assemble import Edge, SegmentInfo
from jgraph.plan.placement.spread import nbytes_of
from jgraph.plan.program.types import value_type
from jgraph.view.units import bytes_text, count_text, names_text


def table(
    title: str,
    variables: Iterable[tuple[VariableSpec, TaskName]],
    segments: Iterable[SegmentInfo],
    edges: Iterable[Edge],
) -> str:
    """Returns the three tables of a plan: variables, segments, messages."""
    return "\n".join(
        [
            title,
            "variables",
            *_variable_lines(list(variables)),
            "segments",
            *_aligned(
                [
                    (
                        s.task,
                        count_text(s.equations, "equation"),
                        s.label,
                        f"updates {names_text(s.updates)}" if s.updates else "",
                    )
                    for s in segments
                ]
            ),
            "messages per step",
            *_aligned(
                [
                    (
                        f"{e.src} -> {e.dst}",
                        count_text(len(e.values), "value"),
                        bytes_text(e.nbytes),
                    )
                    for e in edges
                ]
            ),
        ]
    )


def sharding_lines(graph: Graph) -> list[str]:
    """Returns the sharded variables, and what could not be done by shards."""
    if not graph.logical:
        return []
    rows = [
        (
            v.name,
            str(value_type(v.aval)),
            bytes_text(nbytes_of(v)),
            f"{len(v.shards)} shards along axis {v.sharding.axis}",
        )
        for v in graph.logical
        if v.sharding is not None
    ]
    notes = [
        (f"'{g.primitive}' at {g.line}", f"of '{g.variable}'", bytes_text(g.nbytes))
        for g in graph.gathered
    ]
    title = "gathered on one task, as it cannot be done by shards"
    return [
        "sharded variables",
        *_aligned(rows),
        *([title, *_aligned(notes)] if notes else []),
    ]


def _variable_lines(variables: list[tuple[VariableSpec, TaskName]]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for task in sorted({t for _, t in variables}):
        here = [v for v, t in variables if t == task]
        total = bytes_text(sum(nbytes_of(v) for v in here))
        rows.append((task, count_text(len(here), "variable"), total))
        rows += [
            (f"  {v.name}", str(value_type(v.aval)), bytes_text(nbytes_of(v)))
            for v in here
        ]
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["  none"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        ("  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True))).rstrip()
        for r in rows
    ]
