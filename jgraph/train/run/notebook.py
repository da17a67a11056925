"""A live view of a run in a notebook: HTML, updated in place, without widgets."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from types import TracebackType
from typing import Any, Final, Self, final

from jgraph.clock import Clock, SystemClock
from jgraph.train.run.report import Report
from jgraph.train.run.standings import WorkerStanding, bars

Logs = Callable[[], Sequence[tuple[str, str]]]
"""Returns new lines of the logs of tasks: (task, line)."""

_EVERY_S: Final = 1.0
_LINES: Final = 10
_WIDTH, _HEIGHT = 160, 32
_COLORS: Final[Mapping[str, str]] = {
    "wait": "#cbd5e1",
    "input": "#fbbf24",
    "pull": "#60a5fa",
    "compute": "#34d399",
    "push": "#a78bfa",
    "other": "#f1f5f9",
}


@final
@dataclass(frozen=True, slots=True)
class CellView:
    """A run as a notebook shows it.

    Attributes:
      report: the newest; None before the first one.
      said: what the run does when it does not train, and since when.
      logs: of tasks, the newest lines.
    """

    report: Report | None
    said: str = ""
    logs: Sequence[tuple[str, str]] = ()

    def __repr__(self) -> str:
        report = self.report
        lines = [] if report is None else [str(report), *map(str, report.workers)]
        if report is not None and report.curve:
            lines.insert(1, f"loss {bars(report.curve)}")
        log_lines = [f"{task}: {line}" for task, line in self.logs]
        return "\n".join([*lines, *filter(None, [self.said]), *log_lines])

    def _repr_html_(self) -> str:
        parts = [] if self.report is None else [_head(self.report)]
        if self.report is not None and self.report.workers:
            parts.append(_workers(self.report.workers))
        if self.said:
            parts.append(f"<div><i>{escape(self.said)}</i></div>")
        if self.logs:
            log_text = "\n".join(f"{task}: {line}" for task, line in self.logs)
            look = "max-height:12em;overflow:auto;font-size:85%"
            parts.append(f'<pre style="{look}">{escape(log_text)}</pre>')
        return "".join(parts) or "<i>starting</i>"


@final
class CellDisplay:
    """Shows a run in a cell; see ``Display``.

    What is shown changes every second also when the run does not report: it then says
    what it does, and since when.

    Args:
      show: shows a view in place of the one before.
      logs: what tasks wrote to their logs since the last call; None: not shown.
      clock: tells since when.
    """

    def __init__(
        self,
        show: Callable[[CellView], None],
        logs: Logs | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._show = show
        self._logs = logs
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._view = CellView(None)
        self._evaluation: Mapping[str, float] | None = None
        self._wait_text = self._notice = ""
        self._since = self._clock.now()
        self._lines: deque[tuple[str, str]] = deque(maxlen=_LINES)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        works = [self._tick] if self._logs is None else [self._tick, self._read]
        self._threads = [
            threading.Thread(target=work, name="jgraph-cell", daemon=True)
            for work in works
        ]
        for thread in self._threads:
            thread.start()
        return self

    def show(self, report: Report) -> None:
        """See ``Display``."""
        with self._lock:
            self._evaluation = report.evaluation or self._evaluation
            self._view = CellView(replace(report, evaluation=self._evaluation))
            self._wait_text = ""
            self._draw()

    def say(self, what: str) -> None:
        """See ``Display``."""
        with self._lock:
            self._wait_text, self._since = what, self._clock.now()
            self._draw()

    def notice(self, what: str) -> None:
        """See ``Display``."""
        with self._lock:
            self._notice = what
            self._draw()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * _EVERY_S)
        with self._lock:
            self._wait_text = self._notice = ""
            self._draw()

    def _tick(self) -> None:
        while not self._end.wait(_EVERY_S):
            with self._lock:
                if self._wait_text or self._lines:
                    self._draw()

    def _read(self) -> None:
        assert self._logs is not None  # __enter__ asks
        while not self._end.wait(_EVERY_S):
            lines = self._logs()
            with self._lock:
                self._lines.extend(lines)

    def _draw(self) -> None:
        text = self._notice
        if self._wait_text:
            seconds = self._clock.now() - self._since
            text = "; ".join(
                filter(None, [f"{self._wait_text} … {seconds:.0f} s", text])
            )
        self._show(CellView(self._view.report, text, tuple(self._lines)))


def _head(report: Report) -> str:
    facts = escape("  ".join(report.facts()))
    return (
        f'<progress value="{report.step}" max="{report.steps}"></progress> '
        f"<code>{report.step}/{report.steps}  {facts}</code> {_spark(report.curve)}"
    )


def _spark(values: Sequence[float]) -> str:
    """Returns a line through values, as a small drawing."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    across, up = _WIDTH / (len(values) - 1), (_HEIGHT - 4) / (high - low or 1.0)
    points = " ".join(
        f"{n * across:.1f},{_HEIGHT - 2 - (value - low) * up:.1f}"
        for n, value in enumerate(values)
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" style="vertical-align:middle">'
        f"<title>loss, {low:.4g} to {high:.4g}</title>"
        f'<polyline points="{points}" fill="none" stroke="#0d9488"></polyline></svg>'
    )


def _workers(rows: Sequence[WorkerStanding]) -> str:
    names = ("worker", "step", "steps/s", "staleness", "late")
    head = "".join(f"<th>{name}</th>" for name in names)
    legend = " ".join(
        f'<span style="background:{_COLORS[part]}">&nbsp;{part}&nbsp;</span>'
        for part in _COLORS
        if any(part in row.shares for row in rows)
    )
    body = "".join(_row(row) for row in rows)
    return (
        f"<table><thead><tr>{head}<th>time {legend}</th></tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _row(row: WorkerStanding) -> str:
    rate, late = f"{row.steps_per_s:.1f}", f"{row.late:,}" if row.late else ""
    cells = (row.name, f"{row.steps:,}", rate, row.staleness_text(), late)
    columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    bar = "".join(
        f'<span title="{part} {share:.0%}" style="display:inline-block;height:1em;'
        f'width:{100 * share:.1f}%;background:{_COLORS.get(part, "#f1f5f9")}"></span>'
        for part, share in row.shares.items()
    )
    look = "width:220px;white-space:nowrap;font-size:12px;line-height:1em"
    return f'<tr>{columns}<td><div style="{look}">{bar}</div></td></tr>'


def in_cell() -> Callable[[CellView], None]:
    """Returns what shows a view in the running cell, in place of the one before."""
    from IPython.display import DisplayHandle

    handle: Any = DisplayHandle()  # type: ignore[no-untyped-call]
    views: list[CellView] = []

    def show(view: CellView) -> None:
        (handle.update if views else handle.display)(view)
        views[:] = [view]

    return show
