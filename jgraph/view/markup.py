"""HTML that notebooks show, every text in it escaped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = ""
) -> str:
    """Returns rows under a head, and a title over them.

    Example:
      >>> table(["task"], [["<b>"]])
      '<table><thead><tr><th>task</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{_text(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    above = f"<b>{_text(title)}</b>" if title else ""
    return f"{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts(title: str, values: Mapping[str, object]) -> str:
    """Returns what is to be known of one object: a row for each fact.

    Example:
      >>> facts("Run", {"state": "done"})
      '<b>Run</b><table><tbody><tr><th>state</th><td>done</td></tr></tbody></table>'
    """
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<b>{_text(title)}</b><table><tbody>{rows}</tbody></table>"


def data(value: Any) -> str:
    """Returns a dataclass: a row for each field that its ``repr`` shows.

    Example:
      >>> from jgraph.graph.rows.hash_spec import Admission
      >>> "<th>sightings</th><td>2</td>" in data(Admission(sightings=2))
      True
    """
    assert is_dataclass(value)
    shown = {f.name: repr(getattr(value, f.name)) for f in fields(value) if f.repr}
    return facts(type(value).__name__, shown)


def lines(text: str) -> str:
    """Returns text as it is, in letters of one width."""
    return f"<pre>{_text(text)}</pre>"


def _text(value: object) -> str:
    return escape(str(value))
