"""What tasks noted becomes one timeline, a critical path in words, and files."""

import json
from pathlib import Path

import pytest

from jgraph.coordination.timeline.clocks import RoundTrip
from jgraph.coordination.timeline.cluster_trace import (
    ClusterTrace,
    assemble,
)
from jgraph.coordination.timeline.critical_path import critical_path
from jgraph.errors import ConfigError
from tests.support.flights import PS, STEPS, WORKER, flights
from tests.support.trace_processor import needs_trace_processor, query
from tests.support.traces import check_trace


def test_the_parts_of_a_step_are_on_one_clock_within_the_error() -> None:
    trace = assemble(flights(ahead_s=500.0), "two")
    assert trace.steps == STEPS
    assert trace.clock_error_s[WORKER] == 0
    assert 0 < trace.clock_error_s[PS] < 2e-4
    first = {part.task: part for part in trace.parts if part.step == 1}
    came = first[WORKER].nodes[0].start_s - first[PS].nodes[1].start_s
    assert came == pytest.approx(0.5e-3, abs=trace.clock_error_s[PS])


def test_tasks_with_one_clock_need_no_estimate() -> None:
    both = flights()
    both[PS].clock = "two"
    trace = assemble(both, "two")
    assert set(trace.clock_error_s.values()) == {0.0}


def test_copies_of_a_machine_that_claim_one_clock_are_not_believed() -> None:
    both = flights(ahead_s=5.0)
    both[PS].clock = "two"
    trace = assemble(both, "two")
    assert trace.clock_error_s[PS] > 0
    first = {part.task: part for part in trace.parts if part.step == 1}
    assert first[PS].asked_s == pytest.approx(first[WORKER].asked_s + 4e-4, abs=2e-4)


def test_messages_make_the_bound_tighter_than_questions_alone() -> None:
    with_messages = assemble(flights(500.0), "two").clock_error_s[PS]
    alone = flights(500.0)
    alone[PS].trips = [RoundTrip(1000.0, 1500.01, 1500.01, 1000.02)]
    with_slow = assemble(alone, "two").clock_error_s[PS]
    assert with_messages < 2e-4
    assert with_slow == pytest.approx(5e-4, rel=0.1)  # the messages', and not 10 ms


def test_what_was_over_before_is_left_out() -> None:
    trace = assemble(flights(), "two", since_s=1000.1)
    assert trace.steps == 10
    assert not trace.notes
    assert trace.parts[0].asked_s < 0.001


def test_the_critical_path_says_what_the_step_waited_for() -> None:
    both = flights()
    both[PS].clock = "two"
    path = assemble(both, "two").critical_path()
    assert path.steps == STEPS
    assert path.seconds == pytest.approx(9e-3)
    shares = {what: round(share * 9, 2) for what, share in path.shares.items()}
    assert shares == {
        "worker:0 computes 'gradient'": 4.5,
        "ps:0 computes 'sgd'": 2.0,
        "worker:0 waits for what ps:0 sends: it is on its way": 0.5,
        "ps:0 waits for what worker:0 sends: it is on its way": 0.5,
        "ps:0 has no core, or lock, for 'sgd' yet": 0.5,
        "ps:0: read w": 0.5,
        "ps:0 begins when it is told to": 0.3,
        "worker:0 waits for its turn, or its gate": 0.2,
    }
    assert "50 %  worker:0 computes 'gradient'" in str(path)


def test_a_step_that_is_not_there_as_a_whole_has_no_path() -> None:
    both = flights()
    del both[PS]
    path = assemble(both, "two").critical_path()
    assert path.steps == 0
    assert "no step was driven" in str(path)
    assert critical_path(()).shares == {}


def test_chrome_takes_the_trace(tmp_path: Path) -> None:
    assemble(flights(500.0), "two").save(tmp_path / "new" / "cluster.json")
    trace = json.loads((tmp_path / "new" / "cluster.json").read_text("utf-8"))
    check_trace(trace)
    assert sum(event["ph"] == "f" for event in trace["traceEvents"]) == 2 * STEPS


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.pftrace"):
        assemble(flights(), "two").save(tmp_path / "cluster.txt")


def test_a_trace_of_nothing_is_one() -> None:
    empty = assemble({}, "two")
    assert (empty.steps, empty.seconds) == (0, 0.0)
    assert "no task ran" in str(ClusterTrace((), (), {PS: 0.0}))


def test_the_last_steps_are_drawn_from_their_beginning() -> None:
    picture = assemble(flights(), "two").show(2)
    assert picture.title.startswith("the last 2 steps: 19.")


@pytest.mark.slow
@needs_trace_processor
def test_trace_processor_of_perfetto_finds_every_span_and_arrow(
    tmp_path: Path,
) -> None:
    trace = assemble(flights(500.0), "two", wall=lambda _: 1.8e9)
    trace.save(tmp_path / "cluster.pftrace")
    spans, flows, processes, tracks, wrong, when, longest = query(
        (tmp_path / "cluster.pftrace").read_bytes(),
        "select count(*) from slice where name != 'message'",
        "select count(*) from flow",
        "select name from process where name is not null order by name",
        "select distinct track.name from slice join track on track_id = track.id",
        "select name, value from stats where value > 0 and severity != 'info'",
        "select to_realtime(min(ts)) from slice",
        "select dur from slice where name = 'gradient' limit 1",
    )
    assert spans == [(len(trace.spans()),)]
    assert flows == [(2 * STEPS,)]
    error = round(1e6 * trace.clock_error_s[PS])
    assert processes == [(f"{PS} (clock ± {error} us)",), (str(WORKER),)]
    kinds = {"steps", "compute", "send", "recv wait", "queueing", "turn", "register"}
    assert {name for (name,) in tracks} == kinds
    assert wrong == []
    assert when[0][0] == pytest.approx(1_800_000_000 * 10**9, abs=10**6)
    assert longest[0][0] == pytest.approx(4_500_000, abs=1000)
