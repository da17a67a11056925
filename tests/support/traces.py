"""What a trace in the format of Chrome must have."""

import itertools
import math
from typing import Any

# What "Trace Event Format" asks of each phase that we write.
NEEDS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "s": {"name", "cat", "ts", "id", "pid", "tid"},
    "f": {"name", "cat", "ts", "id", "pid", "tid", "bp"},
}


def check_trace(trace: dict[str, Any]) -> None:
    """Asserts what the format asks for, and what viewers silently drop if it is not."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        assert NEEDS[event["ph"]] <= set(event), event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert math.isfinite(event.get("ts", 0.0))
        assert event.get("dur", 0.0) >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            track = spans.setdefault((e["pid"], e["tid"]), [])
            track.append((e["ts"], e["ts"] + e["dur"]))
    assert spans.keys() <= named
    for track in spans.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(track)):
            assert end <= start + 0.01
    # An arrow is bound to a span of its track, and has one end of each kind.
    for e in events:
        if e["ph"] in "sf":
            around = spans[e["pid"], e["tid"]]
            assert any(a - 0.01 <= e["ts"] <= b + 0.01 for a, b in around)
    begun, ended = ([e["id"] for e in events if e["ph"] == ph] for ph in "sf")
    assert sorted(begun) == sorted(ended)
    assert len(set(begun)) == len(begun)
