"""``jgraph top``: live CPU, memory, and use of time of each task."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from jgraph.cli.options import until_interrupted
from jgraph.client.status import ClusterStatus, TaskStatus, megabytes
from jgraph.clock import Clock, SystemClock

KINDS: Final = ("compute", "update", "lookup", "rows", "copy")
"""Kinds of work that tasks count the time of; see ``TaskStatus.busy_s``."""


@final
@dataclass(frozen=True, slots=True)
class Sight:
    """What tasks did between two looks.

    Attributes:
      status: the later look.
      seconds: between the two.
      shares: by task, the share of one core that each kind of work took, and the whole
        ``"process"``; of a task that was started meanwhile there is none.
    """

    status: ClusterStatus
    seconds: float
    shares: dict[str, dict[str, float]]

    @classmethod
    def between(
        cls, before: ClusterStatus, after: ClusterStatus, seconds: float
    ) -> "Sight":
        """Compares two looks at a cluster, ``seconds`` apart."""
        earlier = {(task.task, task.incarnation): task for task in before.tasks}
        shares = {
            str(task.task): _shares(earlier[task.task, task.incarnation], task, seconds)
            for task in after.tasks
            if (task.task, task.incarnation) in earlier
        }
        return cls(after, seconds, shares)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values: those of ``jgraph status``, and ``shares``."""
        plain = {name: share.copy() for name, share in self.shares.items()}
        return {**self.status.to_dict(), "seconds": self.seconds, "shares": plain}

    def table(self) -> Table:
        """Returns a row for each task; those that are missing come first."""
        ready = sum(task.state == "ready" for task in self.status.tasks)
        count = len(self.status.tasks) + len(self.status.missing)
        title = f"{ready} of {count} tasks ready (master {self.status.master})"
        columns = ("task", "state", "cpu", *KINDS, "memory", "variables", "programs")
        table = Table(*columns, title=title)
        for name in self.status.missing:
            table.add_row(name, "no answer", style="bold red")
        for task in self.status.tasks:
            table.add_row(*self._row(task))
        return table

    def _row(self, task: TaskStatus) -> Iterator[str]:
        share = self.shares.get(task.task)
        yield task.task
        yield task.state
        for kind in ("process", *KINDS):
            yield "-" if share is None else f"{share.get(kind, 0.0):.0%}"
        yield megabytes(task.rss_bytes)
        yield megabytes(task.variable_bytes)
        yield str(len(task.programs))


def _shares(before: TaskStatus, after: TaskStatus, seconds: float) -> dict[str, float]:
    return {
        kind: round((busy - before.busy_s.get(kind, 0.0)) / seconds, 3)
        for kind, busy in after.busy_s.items()
    }


def watch(
    look: Callable[[], ClusterStatus],
    *,
    every_s: float,
    once: bool,
    as_json: bool,
    clock: Clock | None = None,
) -> bool:
    """Shows sights until Ctrl-C, or one; returns whether a task was missing last.

    Args:
      look: asks a cluster.
      every_s: between two looks.
      once: end after one sight.
      as_json: print lines of JSON, not a table.
      clock: tells how long it was between two looks.
    """
    missing = False
    with until_interrupted() as stop:
        sights = _sights(look, every_s, clock or SystemClock(), stop)
        for sight in _shown(sights, once=once, as_json=as_json):
            missing = bool(sight.status.missing)
            if once:
                break
    return missing


def _shown(sights: Iterator[Sight], *, once: bool, as_json: bool) -> Iterator[Sight]:
    if once or as_json:
        for sight in sights:
            if as_json:
                typer.echo(json.dumps(sight.to_dict()))
            else:
                Console(width=140).print(sight.table())
            yield sight
        return
    with Live(auto_refresh=False) as live:
        for sight in sights:
            live.update(sight.table(), refresh=True)
            yield sight


def _sights(
    look: Callable[[], ClusterStatus],
    every_s: float,
    clock: Clock,
    stop: threading.Event,
) -> Iterator[Sight]:
    before, then = look(), clock.now()
    while not stop.wait(every_s):
        after, now = look(), clock.now()
        yield Sight.between(before, after, now - then)
        before, then = after, now
