"""Progress displays of a run: in a terminal, in a notebook, or as plain lines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self, final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from jgraph.client.cluster import Cluster
from jgraph.client.logs import LogTail
from jgraph.cluster.events import Once, from_log
from jgraph.cluster.wait_message import WaitMessage
from jgraph.train.run.report import Report
from jgraph.train.run.standings import bars

# Where nothing can be redrawn, a line every few seconds is enough.
_PLAIN_EVERY_S = 5.0


class Display(Protocol):
    """Shows reports as they come."""

    def __enter__(self) -> Self:
        """Begins to show."""

    def show(self, report: Report) -> None:
        """Shows a report."""

    def say(self, what: str) -> None:
        """Shows what the run does, until its next report."""

    def notice(self, what: str) -> None:
        """Shows something beside, until the end."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves the last report on the screen."""


def make_display(
    *,
    show: bool,
    console: Console | None = None,
    logs: Callable[[], Sequence[tuple[str, str]]] | None = None,
) -> Display:
    """Returns the display that fits where the output goes.

    Args:
      show: False shows nothing.
      console: where to; the standard output if unset.
      logs: new lines of tasks' logs, for a notebook.
    """
    console = console or Console()
    if not show:
        return LineDisplay(None)
    if console.is_jupyter:
        from jgraph.train.run.notebook import CellDisplay, in_cell

        return CellDisplay(in_cell(), logs)
    if console.is_terminal:
        return LiveDisplay(console)
    write = lambda text: console.print(text, highlight=False, soft_wrap=True)
    return LineDisplay(write)


def display_of(cluster: Cluster | None, *, show: bool) -> Display:
    """Returns the display of a run; in a notebook with the logs of its tasks."""
    if cluster is None or not show:
        return make_display(show=show)
    tail, once = LogTail(cluster.transport, cluster.spec), Once()

    def news() -> list[tuple[str, str]]:
        """Returns new lines; a loss that all others see is one line."""
        return [
            (task, line)
            for task, line in tail.new()
            if (event := from_log(line, task)) is None or once.is_new(event)
        ]

    return make_display(show=show, logs=news)


@final
class LiveDisplay:
    """A bar and a line of metrics that are redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[rates]}", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._line = self._bar.add_task("", total=None, rates="starting")
        # A line of its own: metrics would push the rates off a narrow terminal.
        self._metrics = Text()
        self._live = Live(
            Group(self._bar, self._metrics), console=console, refresh_per_second=4
        )
        self._evaluation: Mapping[str, float] | None = None
        self._notice = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def show(self, report: Report) -> None:
        """See ``Display``."""
        self._evaluation = report.evaluation or self._evaluation
        report = replace(report, evaluation=self._evaluation)
        lines = ["  ".join([*report.values(), bars(report.curve)])]
        lines += [str(worker) for worker in report.workers]
        self._metrics.plain = "\n".join([*lines, *filter(None, [self._notice])])
        self._bar.update(
            self._line,
            completed=report.step,
            total=report.steps,
            rates="  ".join(report.rates()),
        )

    def say(self, what: str) -> None:
        """See ``Display``."""
        self._bar.update(self._line, rates=what)

    def notice(self, what: str) -> None:
        """See ``Display``."""
        self._notice = what
        self._metrics.append(f"\n{what}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.refresh()
        self._live.stop()


@final
class LineDisplay:
    """A line of text now and then, and the last report always.

    While the run does not report, lines say what it does and since when.

    Args:
      write: where to; None: nothing is said.
    """

    def __init__(self, write: Callable[[str], None] | None) -> None:
        self._write = write or (lambda text: None)
        self._is_silent = write is None
        self._telling: WaitMessage | None = None
        self._last: Report | None = None
        self._written_report: Report | None = None

    def __enter__(self) -> Self:
        return self

    def show(self, report: Report) -> None:
        """See ``Display``."""
        self._hush()
        self._last = report
        since = report.seconds - (
            self._written_report.seconds if self._written_report else 0.0
        )
        if report.evaluation or since >= _PLAIN_EVERY_S:
            self._flush()

    def say(self, what: str) -> None:
        """See ``Display``."""
        self._hush()
        if not self._is_silent:
            self._telling = WaitMessage(what, self._write, lines=True)

    def notice(self, what: str) -> None:
        """See ``Display``."""
        self._write(what)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hush()
        self._flush()

    def _hush(self) -> None:
        if self._telling is not None:
            self._telling.end()
            self._telling = None

    def _flush(self) -> None:
        if self._last is not None and self._last is not self._written_report:
            self._write(str(self._last))
            self._written_report = self._last
