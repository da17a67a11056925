"""Cluster events: tasks that joined, were lost or died; runs that began or ended.

An event is noted where it is seen, as a line of that process's log, and kept for those
who ask from elsewhere. Imports no JAX: those who start processes note events too.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, final

from jgraph import __version__
from jgraph.clock import WallClock
from jgraph.cluster.log_tail import NewestLines
from jgraph.errors import JGError, RunOverError, VersionError
from jgraph.view import markup

LAUNCHER: Final = "launcher"
"""Who starts the processes of a cluster."""

CLIENT: Final = "client"
"""Who began a run."""

_LOG: Final = logging.getLogger("jgraph.events")
_SAME_S: Final = 5.0
_LINE: Final = re.compile(
    r"(\d+-\d+-\d+ \d+:\d+:\d+),(\d+) \w+ jgraph\.events: \[(\w+)\] (.*)"
)
_SUBJECT: Final = re.compile(r"/job:\w+/task:\d+|run '([^']+)'")


@final
@dataclass(frozen=True, slots=True)
class Event:
    """Something that became of a cluster.

    Attributes:
      time_s: when, in seconds since 1970, by the clock of who saw it.
      kind: "joined", "lost", "left", "replaced", "frozen", "died", "restarted",
        "abandoned", "refused" of tasks; "began", "ended", "failed", "scaled" of runs;
        "regrouped", "fell back" of children that sum by XLA's collectives.
      text: a sentence that names the task or the run.
      by: the task that saw it; "launcher": what started the processes; "client": who
        began a run.
      subject: the task or the run.
    """

    time_s: float
    kind: str
    text: str
    by: str
    subject: str

    def to_json(self) -> str:
        """Returns it as a line of JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.time_s, UTC).astimezone()
        who = "" if self.by == self.subject else f"  (seen by {self.by})"
        return f"{when:%Y-%m-%d %H:%M:%S}  {self.kind:9}  {self.text}{who}"

    def _repr_html_(self) -> str:
        return markup.data(self)


@final
class EventLog:
    """The events that a task, or a launcher, notes; from any thread.

    Args:
      by: who notes them.

    Attributes:
      lines: the newest, as lines of JSON.

    Example:
      >>> log = EventLog("/job:ps/task:0")
      >>> log.note("began", "run 'a' began: 10 steps")
      >>> [(event.kind, event.subject) for event in log.newest()]
      [('began', 'a')]
    """

    def __init__(self, by: str) -> None:
        self._by = by
        self._once = Once()
        self.lines = NewestLines()

    def note(self, kind: str, text: str, *, level: int = logging.INFO) -> None:
        """Keeps an event, and writes it to the log of this process; see ``Event``.

        A task that is lost over several connections is one loss.
        """
        text = " ".join(text.split())[:1000]
        event = _event(WallClock().now(), kind, text, self._by)
        if not self._once.is_new(event):
            return
        self.lines.add(event.to_json())
        _LOG.log(level, "[%s] %s", kind, text)

    def newest(self) -> list[Event]:
        """Returns the newest events, in order."""
        return [from_json(line) for line in self.lines.after(0, 1000)[1]]


def _event(time_s: float, kind: str, text: str, by: str) -> Event:
    found = _SUBJECT.search(text)
    subject = (found[1] or found[0]) if found is not None else by
    return Event(time_s, kind, text, by, subject)


def from_json(line: str) -> Event:
    """Returns the event that a task told.

    Raises:
      VersionError: it has other fields than those of this version.
    """
    try:
        return Event(**json.loads(line))
    except (TypeError, ValueError):
        raise VersionError(
            f"a task tells of an event that this jgraph, {__version__}, cannot read: "
            f"{line[:200]!r}; install the version of the servers where you look"
        ) from None


def from_log(line: str, by: str) -> Event | None:
    """Returns the event that a line of a log tells; None if it tells none.

    Example:
      >>> line = "2026-11-22 01:02:03,250 INFO jgraph.events: [ended] run 'a' is over"
      >>> event = from_log(line, "/job:ps/task:0")
      >>> event.kind, event.text, event.subject, event.time_s % 1
      ('ended', "run 'a' is over", 'a', 0.25)
    """
    if (found := _LINE.match(line)) is None:
        return None
    when, milliseconds, kind, text = found.groups()
    seconds = datetime.strptime(when, "%Y-%m-%d %H:%M:%S").astimezone().timestamp()
    return _event(seconds + int(milliseconds) / 1000, kind, text, by)


def in_order(events: Iterable[Event]) -> list[Event]:
    """Returns events by time; a loss that several saw, once.

    Example:
      >>> seen = [Event(t, "lost", "?", by, "w") for t, by in ((2, "b"), (1, "a"))]
      >>> [event.by for event in in_order(seen)]
      ['a']
    """
    once = Once()
    return [e for e in sorted(events, key=lambda e: e.time_s) if once.is_new(e)]


@final
class Once:
    """Tells a loss that is news from one that another task has told of already."""

    def __init__(self) -> None:
        self._lost_s: dict[str, float] = {}

    def is_new(self, event: Event) -> bool:
        """Whether it is no loss, or one of which nobody told within some seconds."""
        if event.kind != "lost":
            return True
        before = self._lost_s.get(event.subject)
        self._lost_s[event.subject] = event.time_s
        return before is None or abs(event.time_s - before) > _SAME_S


def end_of_run(run: str, error: JGError | None) -> tuple[str, str]:
    """Returns the kind and the text of the event that a run is over.

    Args:
      run: its name.
      error: what it failed with; None: it ended in order.

    Example:
      >>> from jgraph.errors import TaskLostError
      >>> end_of_run("a", TaskLostError("/job:ps/task:0 is gone"))
      ('failed', "run 'a' failed: JG-132 /job:ps/task:0 is gone")
    """
    if error is None:
        return "ended", f"run '{run}' ended"
    return "failed", f"run '{run}' failed: {error}"


@contextmanager
def lone_loop(events: EventLog, name: str, text: str) -> Iterator[None]:
    """Notes that a loop of no run begins, and how it ends.

    Args:
      events: of the master, which passes its reports on.
      name: of the loop.
      text: describes it.
    """
    events.note("began", f"run '{name}' began: {text}")
    failure: JGError | None = None
    try:
        yield
    except RunOverError:
        raise  # which is its end
    except JGError as error:
        failure = error
        raise
    finally:
        events.note(*end_of_run(name, failure))


@final
class LogFiles:
    """The events in the logs of a cluster whose processes were started here.

    Args:
      directory: has a log for each task, and that of the launcher.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new(self) -> list[Event]:
        """Returns what was noted since the last call, by time."""
        found = (
            from_log(line, _who(path))
            for path in sorted(self._directory.glob("*.log"))
            for line in self._lines(path)
        )
        return sorted(filter(None, found), key=lambda event: event.time_s)

    def _lines(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._read[path] = self._read.get(path, 0) + len(line)
                yield line.decode(errors="replace").rstrip("\n")


def _who(log: Path) -> str:
    job, _, index = log.stem.rpartition("-")
    return f"/job:{job}/task:{index}" if index.isdecimal() else LAUNCHER
