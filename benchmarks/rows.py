"""Rows of a table of figures, each made from the lines of other benchmarks.

A benchmark that has a table prints it with ``--rows``: one line of JSON per row, in the
order of the table. What the figures were made of goes to standard error.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from benchmarks import measure
from benchmarks.peer_process import ROOT

Line: TypeAlias = Mapping[str, Any]
Lines: TypeAlias = Sequence[Line]


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table.

    Attributes:
      commands: benchmarks with their options, as one types them.
      figures: takes all their lines, and returns the row's figures.
      unit: of the figures; a ratio has ``x``.
    """

    commands: Sequence[str]
    figures: Callable[[Lines], Sequence[Any]]
    unit: str = "x"


def each(key: str, **wanted: Any) -> Callable[[Lines], list[Any]]:
    """Returns what takes one figure of each line that says what is wanted.

    >>> each("ratio", way="post")([{"way": "tcp"}, {"way": "post", "ratio": 0.9}])
    [0.9]
    """

    def figures(lines: Lines) -> list[Any]:
        chosen = [w for w in lines if all(w.get(k) == v for k, v in wanted.items())]
        return [line[key] for line in chosen]

    return figures


def print_rows(table: Sequence[Row], only: Sequence[int] = ()) -> None:
    """Runs the benchmarks of a table, and prints a line for each row.

    A benchmark runs once, however many rows are of it. A row whose benchmark fails, or
    lacks its peer, has no value and says so.

    Args:
      table: the rows, in their order.
      only: numbers of the rows to print, from 1 on; none: all.
    """
    ran: dict[str, list[Line]] = {}
    broken: set[str] = set()
    for number, row in enumerate(table, 1):
        if only and number not in only:
            continue
        for command in row.commands:
            if command not in ran:
                ran[command] = []
                if not run(command, ran[command]):
                    broken.add(command)
        failed = [command for command in row.commands if command in broken]
        lines = [line for command in row.commands for line in ran[command]]
        found = list(row.figures(lines)) if not failed else []
        value = found[0] if len(found) == 1 else found or None
        why = {"failed": failed} if failed else {}
        measure.emit_row(number, value, row.unit, **why)


def run(command: str, lines: list[Line]) -> bool:
    """Runs a benchmark and adds its lines; returns whether it ended well."""
    print(f"python -m benchmarks {command}", file=sys.stderr, flush=True)
    words = [sys.executable, "-m", "benchmarks", *command.split()]
    done = subprocess.run(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, file=sys.stderr, flush=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
    lines += [json.loads(line) for line in told]
    return done.returncode == 0
