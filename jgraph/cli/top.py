"""``jgraph top``: live alarms, and CPU, memory, and use of time of each task."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias, final

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jgraph.cli.options import until_interrupted
from jgraph.client.runs.runs import RunInfo
from jgraph.client.status import ClusterStatus, TaskStatus, megabytes
from jgraph.client.watching import runs_fact, status_fact
from jgraph.clock import Clock, WallClock
from jgraph.coordination.watch.alarms import Alarm, plain
from jgraph.coordination.watch.board import Board

KINDS: Final = ("compute", "update", "lookup", "rows", "copy", "read")
"""Kinds of work that tasks count the time of; see ``TaskStatus.busy_s``."""
STYLES: Final = {"critical": "bold red", "warning": "yellow", "notice": "dim"}

Look: TypeAlias = tuple[ClusterStatus, list[RunInfo]]


@final
@dataclass(frozen=True, slots=True)
class Sight:
    """What tasks did between two looks, and what is wrong.

    Attributes:
      status: the later look.
      seconds: between the two.
      shares: by task, the share of one core that each kind of work took, and the whole
        ``"process"``; of a task that was started meanwhile there is none.
      alarms: what is wrong, the worst first.
    """

    status: ClusterStatus
    seconds: float
    shares: dict[str, dict[str, float]]
    alarms: tuple[Alarm, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values: those of ``jgraph status``, and the others."""
        return {
            **self.status.to_dict(),
            "seconds": self.seconds,
            "shares": {name: share.copy() for name, share in self.shares.items()},
            "alarms": list(map(plain, self.alarms)),
        }

    def shown(self) -> Group:
        """Returns the alarms, and a row for each task; those missing come first."""
        ready = sum(task.state == "ready" for task in self.status.tasks)
        count = len(self.status.tasks) + len(self.status.missing)
        title = f"{ready} of {count} tasks ready (master {self.status.master})"
        columns = ("task", "state", "cpu", *KINDS, "memory", "variables", "programs")
        table = Table(*columns, title=title)
        for name in self.status.missing:
            table.add_row(name, "no answer", style="bold red")
        for task in self.status.tasks:
            table.add_row(*self._row(task))
        lines = (
            Text(f"{_time_of_day(alarm.since)} {alarm}", STYLES[alarm.level])
            for alarm in self.alarms
        )
        return Group(*lines, table)

    def _row(self, task: TaskStatus) -> Iterator[str]:
        share = self.shares.get(task.task)
        yield task.task
        yield task.state
        for kind in ("process", *KINDS):
            yield "-" if share is None else f"{share.get(kind, 0.0):.0%}"
        yield megabytes(task.rss_bytes)
        yield megabytes(task.variable_bytes)
        yield str(len(task.programs))


@final
class Watch:
    """A board of what is seen, look after look."""

    def __init__(self) -> None:
        self._board = Board()
        self._then: float | None = None

    def see(self, look: Look, now: float) -> Sight | None:
        """Takes a look; returns nothing after the first one."""
        status, runs = look
        self._board.take(status_fact(status, now))
        self._board.take(runs_fact(runs, now))
        then, self._then = self._then, now
        if then is None:
            return None
        seen = self._board.tasks.seen
        shares = {str(t.task): seen[t.task].cores for t in status.tasks}
        shares = {name: dict(share) for name, share in shares.items() if share}
        return Sight(status, now - then, shares, tuple(self._board.alarms()))


def watch(
    look: Callable[[], Look],
    *,
    every_s: float,
    once: bool,
    as_json: bool,
    clock: Clock | None = None,
) -> bool:
    """Shows sights until Ctrl-C, or one; returns whether a task was missing last.

    Args:
      look: asks a cluster how its tasks are, and its runs.
      every_s: between two looks.
      once: end after one sight.
      as_json: print lines of JSON, not a table.
      clock: tells when the looks were, in seconds since 1970.
    """
    missing = False
    with until_interrupted() as stop:
        sights = _sights(look, every_s, clock or WallClock(), stop)
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
                Console(width=140).print(sight.shown())
            yield sight
        return
    with Live(auto_refresh=False) as live:
        for sight in sights:
            live.update(sight.shown(), refresh=True)
            yield sight


def _sights(
    look: Callable[[], Look],
    every_s: float,
    clock: Clock,
    stop: threading.Event,
) -> Iterator[Sight]:
    seen = Watch()
    seen.see(look(), clock.now())
    while not stop.wait(every_s):
        if (sight := seen.see(look(), clock.now())) is not None:
            yield sight


def _time_of_day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%H:%M:%S}"
