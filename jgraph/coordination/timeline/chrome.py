"""Chrome's trace event format: a timeline as JSON that Perfetto opens as well.

A task is a process. Its tracks are what it computed (segments, reads, writes), what it
sent, what it waited for, and what had all that it takes and waited for its turn; where
two things of one kind overlap, there are more tracks of the kind. An arrow goes from
each send to the end of the wait for it.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from jgraph.coordination.timeline.spans import TRACKS, Span, rows_of
from jgraph.errors import ConfigError
from jgraph.graph.device import TaskName

Event: TypeAlias = dict[str, Any]
_TRACKS_EACH: Final = 1000


def chrome_trace(
    title: str, errors_s: Mapping[TaskName, float], spans: Sequence[Span]
) -> dict[str, Any]:
    """Returns spans in Chrome's JSON object format.

    Args:
      title: what they are of.
      errors_s: by task, in their order: by how much its times may be off.
      spans: in seconds; written as microseconds.
    """
    events: list[Event] = []
    for pid, (task, error) in enumerate(errors_s.items(), 1):
        events.append(_name("process_name", pid, 0, task_title(task, error)))
        mine = [span for span in spans if span.task == task]
        for number, track in enumerate(TRACKS):
            first = 1 + number * _TRACKS_EACH
            rows = rows_of(span for span in mine if span.track == track)
            for n, row in enumerate(rows):
                title_of = track if n == 0 else f"{track} {n + 1}"
                events.append(_name("thread_name", pid, first + n, title_of))
                events += [e for span in row for e in _events(span, pid, first + n)]
    both = {e["id"] for e in events if e["ph"] == "s"} & {
        e["id"] for e in events if e["ph"] == "f"
    }
    return {
        "traceEvents": [e for e in events if e["ph"] not in "sf" or e["id"] in both],
        "displayTimeUnit": "ms",
        "otherData": {"step": title},
    }


def task_title(task: TaskName, error_s: float) -> str:
    """Returns the name of a task with what its times may be off."""
    return f"{task} (clock ± {1e6 * error_s:.0f} us)" if error_s else str(task)


def write_json(path: str | pathlib.Path, trace: Mapping[str, Any]) -> None:
    """Writes a trace; the directory of the file is made if need be.

    Raises:
      ConfigError: a place that cannot be written.
    """
    write_bytes(path, json.dumps(trace).encode())


def write_bytes(path: str | pathlib.Path, trace: bytes) -> None:
    """Does the same with what is encoded.

    Raises:
      ConfigError: a place that cannot be written.
    """
    file = pathlib.Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(trace)
    except OSError as error:
        raise ConfigError(
            f"cannot write the timeline to {file} ({error.strerror}); choose another "
            "path"
        ) from error


def _events(span: Span, pid: int, tid: int) -> Iterator[Event]:
    node, start = span.node, round(1e6 * span.start_s, 3)
    duration = round(1e6 * max(0.0, span.end_s - span.start_s), 3)
    facts: dict[str, Any] = {"step": span.step} if span.step else {}
    if node is not None:
        facts |= {"node": node.node, "kind": node.kind, "bytes": node.nbytes}
        facts |= {"peer": node.peer, "message": node.key} if node.peer else {}
    at: Event = {"pid": pid, "tid": tid}
    what = {"ph": "X", "cat": span.track, "name": span.name, "args": facts}
    yield {**at, **what, "ts": start, "dur": duration}
    arrow = {**at, "cat": "message", "name": "message", "bp": "e"}
    if span.sends:
        yield {**arrow, "ph": "s", "ts": start, "id": span.sends}
    if span.receives:
        yield {**arrow, "ph": "f", "ts": start + duration, "id": span.receives}


def _name(kind: str, pid: int, tid: int, name: str | TaskName) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
