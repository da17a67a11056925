"""The timeline of a step holds to the documented trace event format."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.step.run_metadata import RunMetadata, timeline
from jgraph.coordination.timeline.node_times import NodeTime
from jgraph.errors import ConfigError
from jgraph.graph.ir import TaskName
from tests.support.traces import check_trace

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")


def step() -> RunMetadata:
    nodes = (
        NodeTime(PS, 0, "read", "w", 0.0, 0.001, 0.002, 8),
        NodeTime(PS, 1, "send", f"to {WORKER}", 0.002, 0.002, 0.0021, 8, WORKER, "m0"),
        NodeTime(WORKER, 0, "recv", f"from {PS}", 0.0, 0.004, 0.004, 8, PS, "m0"),
        NodeTime(WORKER, 1, "segment", "dot x1", 0.004, 0.005, 0.009, 4),
        NodeTime(WORKER, 2, "segment", "sin x1", 0.004, 0.006, 0.008, 4),
    )
    return RunMetadata("step", nodes, {PS: 0.00025, WORKER: 0.0})


def spans(trace: dict[str, Any], category: str) -> list[tuple[str, float, float]]:
    return [
        (e["name"], e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X" and e["cat"] == category
    ]


def test_what_ran_was_sent_was_waited_for_and_queued_is_on_tracks_of_its_own() -> None:
    trace = timeline(step())
    check_trace(trace)
    assert ("dot x1", 5000, 4000) in spans(trace, "compute")
    assert spans(trace, "send") == [("send to /job:worker/task:0", 2000, 100)]
    assert spans(trace, "recv wait") == [("wait from /job:ps/task:0", 0, 4000)]
    waits = spans(trace, "queueing")
    assert ("dot x1 waits", 4000, 1000) in waits
    assert ("read w waits", 0, 1000) in waits


def test_an_arrow_goes_from_the_send_to_the_end_of_the_wait() -> None:
    events = timeline(step())["traceEvents"]
    ends = {e["ph"]: e["ts"] for e in events if e["ph"] in "sf"}
    assert ends == {"s": 2000, "f": 4000}


def test_segments_at_the_same_time_have_tracks_each() -> None:
    events = timeline(step())["traceEvents"]
    tracks = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
    assert tracks["dot x1"] != tracks["sin x1"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "compute 2"} <= names


def test_tasks_are_named_with_what_their_clocks_may_be_off() -> None:
    events = timeline(step())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["/job:ps/task:0 (clock ± 250 us)", "/job:worker/task:0"]


times = st.floats(-0.01, 1.0)


def _node(n: int, task: TaskName, kind: str, moments: list[float]) -> NodeTime:
    ready_s, start_s, end_s = moments
    peer = PS if kind in ("send", "recv") else None
    return NodeTime(task, n, kind, "x", ready_s, start_s, end_s, 4, peer, f"m{n}")


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([PS, WORKER]),
            st.sampled_from(["segment", "send", "recv", "read", "feed"]),
            st.lists(times, min_size=3, max_size=3).map(sorted),
        ),
        max_size=12,
    )
)
def test_every_step_makes_a_trace_of_the_format(rows: Any) -> None:
    nodes = tuple(
        _node(n, task, kind, moments) for n, (task, kind, moments) in enumerate(rows)
    )
    check_trace(timeline(RunMetadata("step", nodes, {PS: 0.0, WORKER: 0.0})))


def test_the_file_is_json_that_a_viewer_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "step.json"
    step().save_timeline(path)
    assert json.loads(path.read_text(encoding="utf-8")) == timeline(step())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the timeline to .*step\.json"):
        step().save_timeline(tmp_path / "file" / "step.json")
