"""Reports of replicas, by streams of their own, around a restore that each tells."""

from dataclasses import replace

from hypothesis import given, strategies as st

from jgraph.client.runs.loop_items import Loop
from jgraph.client.runs.seen_reports import RestoreBarrier
from jgraph.cluster.loop_messages import LoopReport, LoopRequest, ended_report
from jgraph.coordination.run.recovery import Recovery
from jgraph.graph.ir import TaskName

LOOPS = [
    Loop(LoopRequest(TaskName(f"w{n}"), "h", "data", 1, 1, replica=n), f"l{n}", 0.0, 0)
    for n in range(3)
]


def told(loop: Loop, life: int, *, restored: bool = False) -> LoopReport:
    """A report of the state after so many restores; or of the last of these."""
    report = replace(ended_report(loop.request), number=life)
    return replace(report, restored=Recovery((), 9, 1)) if restored else report


@given(st.data())
def test_reports_come_in_the_order_of_restores_whatever_stream_is_ahead(
    data: st.DataObject,
) -> None:
    streams = {
        loop: [
            told(loop, life, restored=restored)
            for life in range(3)
            for restored in (True, False)
            if life or not restored
        ]
        for loop in LOOPS
    }
    barrier, passed = RestoreBarrier(), list[LoopReport]()
    while left := [loop for loop in LOOPS if streams[loop]]:
        loop = data.draw(st.sampled_from(left))
        report = streams[loop].pop(0)
        passed += [one for _, one in barrier.take(loop, report, LOOPS)]
    assert [one.number for one in passed] == sorted(one.number for one in passed)
    assert len(passed) == 3 * len(LOOPS) + 2  # and each restore once
    for one in passed:
        first = next(other for other in passed if other.number == one.number)
        assert (first.restored is not None) == (one.number > 0)


def test_loop_that_has_ended_holds_up_nobody() -> None:
    barrier = RestoreBarrier()
    first, last = LOOPS[:2]
    loops = {first, last}
    restored = told(first, 1, restored=True)
    assert list(barrier.take(first, restored, loops)) == []
    loops.discard(last)
    assert list(barrier.go_on(loops)) == [(first, restored)]
