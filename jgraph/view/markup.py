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
    values = {f.name: repr(getattr(value, f.name)) for f in fields(value) if f.repr}
    return facts(type(value).__name__, values)


def link(url: str, what: str) -> str:
    """Returns a link to a page.

    Example:
      >>> link("http://localhost:8472/#token=x", "the <page>")
      '<a href="http://localhost:8472/#token=x" target="_blank">the &lt;page&gt;</a>'
    """
    return f'<a href="{_text(url)}" target="_blank">{_text(what)}</a>'


def frame(url: str, height: int) -> str:
    """Returns a page in a frame.

    Example:
      >>> frame("http://localhost:8472/", 500)
      '<iframe src="http://localhost:8472/" width="100%" height="500"></iframe>'
    """
    return f'<iframe src="{_text(url)}" width="100%" height="{height:d}"></iframe>'


def lines(text: str) -> str:
    """Returns text as it is, in letters of one width."""
    return f"<pre>{_text(text)}</pre>"


def _text(value: object) -> str:
    return escape(str(value))
