"""Timeline as the page draws it: the last steps in rows, and their critical path."""

from typing import Any, Final

from jgraph.coordination.timeline.cluster_trace import ClusterTrace
from jgraph.coordination.timeline.spans import TRACKS, Span, rows_of

_STEPS: Final = 3
_SHARES: Final = 8
_ROWS: Final = 4
_SPANS: Final = 400
_LETTERS: Final = 120


def timeline_view(trace: ClusterTrace, steps: int = _STEPS) -> dict[str, Any]:
    """Returns the last steps of a trace, as JSON; times are in milliseconds.

    Args:
      trace: of the last seconds.
      steps: how many of the last ones.
    """
    parts = trace.last(steps)
    first = min((part.asked_s for part in parts), default=0.0)
    spans = [span for part in parts for span in part.spans()]
    last = max((span.end_s for span in spans), default=first)
    path = trace.critical_path()
    tasks = []
    for task in trace.tasks:
        mine = [span for span in spans if span.task == task]
        rows = [
            [_bar(span, first) for span in row[:_SPANS]]
            for track in TRACKS
            if track not in {"steps", "queueing"}  # where others have their bars
            for row in rows_of(span for span in mine if span.track == track)[:_ROWS]
        ]
        error_us = 1e6 * trace.clock_error_s[task]
        tasks.append({"task": task, "error_us": error_us, "rows": rows})
    shares = [[what[:_LETTERS], share] for what, share in path.shares.items()]
    return {
        "steps": trace.steps,
        "seconds": trace.seconds,
        "ms": 1e3 * (last - first),
        "tasks": tasks,
        "missing": list(trace.missing),
        "path": {
            "steps": path.steps,
            "ms": 1e3 * path.seconds,
            "shares": shares[:_SHARES],
        },
    }


def _bar(span: Span, first_s: float) -> dict[str, Any]:
    return {
        "track": span.track,
        "name": span.name[:_LETTERS],
        "at_ms": round(1e3 * (span.start_s - first_s), 4),
        "ms": round(1e3 * max(0.0, span.end_s - span.start_s), 4),
        "sends": span.sends,
        "receives": span.receives,
    }
