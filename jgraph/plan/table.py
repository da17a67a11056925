"""A plan as text: stable, for people and for tests."""

from collections.abc import Iterable, Sequence

from jgraph.graph.ir import Graph, TaskName, VariableSpec
from jgraph.plan.assemble import Edge, SegmentInfo
from jgraph.plan.spread import nbytes_of
from jgraph.plan.types import value_type

_MAX_NAMES = 4


def bytes_text(count: int) -> str:
    """Returns a byte count for people.

    Example:
      >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**20)
      ('512 B', '1.5 KiB', '3.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f} {units[0]}"


def count_text(count: int, noun: str) -> str:
    """Returns a number and its noun.

    Example:
      >>> count_text(1, "segment"), count_text(1200, "segment")
      ('1 segment', '1,200 segments')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def names_text(names: Sequence[str]) -> str:
    """Returns the first names and how many more there are."""
    shown = ", ".join(names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


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
