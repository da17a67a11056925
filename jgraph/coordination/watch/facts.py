"""Facts about a cluster as JSON, and tolerant reading of what others wrote.

A fact is an object with ``time``, in seconds since 1970, and ``kind``:

* ``status``: ``master``, ``missing`` tasks, and ``tasks`` by name;
* ``silent``: nobody answered, ``text`` says why;
* ``runs``: those of the cluster, by name;
* ``report``: what a loop of a ``run`` told: ``steps`` done, ``times`` by part, least,
  mean and most of each of its ``metrics``, some seconds of single steps; ``rounds`` of
  clients, with who took part and who was dropped, or ``own_rounds`` of its client
  alone; with ``anew`` all reports so far come again;
* ``variables``: size and version of each shard, by task;
* ``events``: what became of tasks and runs;
* ``models``: versions that a model ``server`` serves, by name, with its sums since they
  were loaded; or ``silent``, why it does not answer;
* ``trouble``: of who watches: an ``id`` and a ``text``; an empty one: it is over.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeAlias

Fact: TypeAlias = Mapping[str, Any]
KINDS: Final = frozenset(
    {
        *("status", "silent", "runs", "report", "variables", "events", "models"),
        "trouble",
    }
)
_DEPTH: Final = 8
_ENTRIES: Final = 20_000
_LETTERS: Final = 2_000


def checked(value: Any) -> Fact | None:
    """Returns a fact without what no fact has; None: it is none.

    Example:
      >>> checked({"kind": "runs", "time": 5, "runs": {"a": {"step": float("nan")}}})
      {'kind': 'runs', 'time': 5, 'runs': {'a': {'step': None}}}
      >>> checked({"kind": "order", "time": 5}) is None
      True
    """
    if not isinstance(value, dict) or value.get("kind") not in KINDS:
        return None
    if not isinstance(value.get("time"), int | float):
        return None
    found: Fact = clean(value)
    return found if found["time"] is not None and found["time"] >= 0 else None


def clean(value: Any, depth: int = _DEPTH) -> Any:
    """Returns plain JSON of bounded size: finite numbers or None, texts that are cut.

    Dataclasses are objects of their fields.

    Example:
      >>> clean({"a": [1, float("inf"), "x" + chr(27)], 5: object()})
      {'a': [1, None, 'x�'], '5': None}
    """
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if abs(value) < 1e300 else None
    if depth and isinstance(value, Mapping):
        some = list(value.items())[:_ENTRIES]
        return {_text(str(key)): clean(inner, depth - 1) for key, inner in some}
    if depth and isinstance(value, list | tuple):
        return [clean(inner, depth - 1) for inner in value[:_ENTRIES]]
    if depth and is_dataclass(value):
        return clean(fields_of(value), depth)
    return None


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass as they are, by name.

    Example:
      >>> from jgraph.coordination.watch.alarms import Alarm
      >>> fields_of(Alarm("silent", "warning", 5.0, "no answer", "jgraph top"))["since"]
      5.0
    """
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _text(value: str) -> str:
    cut = value if len(value) <= _LETTERS else f"{value[:_LETTERS]} … (cut)"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in cut)


def number(fact: Fact, name: str, default: float = 0.0) -> float:
    """Returns a number that is at least 0, or the default."""
    value = fact.get(name)
    good = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return value if good and value is not None else default


def text(fact: Fact, name: str) -> str:
    """Returns a text; an empty one if there is none."""
    value = fact.get(name)
    return value if isinstance(value, str) else ""


def table(fact: Fact, name: str) -> Mapping[str, Any]:
    """Returns an object; an empty one if there is none."""
    value = fact.get(name)
    return value if isinstance(value, Mapping) else {}


def rows(fact: Fact, name: str) -> dict[str, Fact]:
    """Returns an object of objects, without what is none."""
    found = table(fact, name).items()
    return {key: row for key, row in found if isinstance(row, Mapping)}


def numbers(fact: Fact, name: str) -> dict[str, float]:
    """Returns an object of numbers, without what is none."""
    found = table(fact, name)
    return {key: number(found, key) for key in found}


def items(fact: Fact, name: str) -> list[Any]:
    """Returns a list; an empty one if there is none."""
    value = fact.get(name)
    return list(value) if isinstance(value, list | tuple) else []


def texts(fact: Fact, name: str) -> Iterable[str]:
    """Returns the texts of a list."""
    return [item for item in items(fact, name) if isinstance(item, str)]
