from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.step.run_metadata import (
    PartTimes,
    aligned_clocks,
    run_metadata,
)
from jgraph.coordination.timeline.node_times import END, READY, START
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import (
    FeedNode,
    FetchNode,
    RecvNode,
    SegmentNode,
    SendNode,
    ValueType,
)
from jgraph.plan.program.program import Partition, Program, SegmentCode

DRIVER, OTHER = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")
X = ValueType((4,), "float32")


def _program() -> Program:
    """Feeds x to the other task, which computes and sends the result back."""
    there = (
        RecvNode(DRIVER, "m0", (0,)),
        SegmentNode("d", (), (), (0,), (1,)),
        SendNode(DRIVER, "m1", (1,)),
    )
    here = (
        FeedNode("x", 0),
        SendNode(OTHER, "m0", (0,)),
        RecvNode(OTHER, "m1", (1,)),
        FetchNode((1,)),
    )
    return Program(
        "step",
        DRIVER,
        (Partition(DRIVER, (X, X), (), here), Partition(OTHER, (X, X), (), there)),
        (SegmentCode("d", b"", ("cpu",), "sin x1"),),
        (("x", X),),
        (("", X),),
    )


def _parts(offset_s: float, there_s: float, back_s: float) -> list[PartTimes]:
    """A step whose messages take this long, on clocks that differ by ``offset_s``."""
    here: Any = np.zeros((4, 3))
    here[1] = [0.0, 0.001, 0.002]
    arrived = 0.001 + there_s
    there: Any = np.zeros((3, 3))
    there[0] = [arrived - 0.0001, arrived, arrived]
    there[1] = [arrived, arrived + 0.01, arrived + 0.03]
    there[2] = [arrived + 0.03, arrived + 0.03, arrived + 0.031]
    home = arrived + 0.03 + back_s
    here[2] = [0.0, home, home]
    here[3] = [home, home, home + 0.001]
    told = max(arrived + 0.031, home) + back_s
    return [
        PartTimes(DRIVER, here + 5, 5.0, 5 + home),
        PartTimes(OTHER, there + 5 + offset_s, 5.0, 5 + told),
    ]


def test_nodes_are_told_in_seconds_since_the_step_began_with_who_waited() -> None:
    told = run_metadata(_program(), _parts(1000.0, 0.002, 0.002))
    recv, segment, send = told.of(OTHER)
    assert (recv.kind, segment.kind, send.kind) == ("recv", "segment", "send")
    assert segment.label == "sin x1"
    assert segment.waited_s == pytest.approx(0.01)
    assert segment.seconds == pytest.approx(0.02)
    assert (send.peer, send.key, send.nbytes) == (DRIVER, "m1", 16)
    assert recv.start_s == pytest.approx(0.003, abs=1e-3)
    assert told.seconds == pytest.approx(0.036)
    assert "segment sin x1" in str(told)


@given(
    st.floats(-1e4, 1e4),
    st.floats(1e-5, 0.01),
    st.floats(1e-5, 0.01),
)
def test_no_value_arrives_before_it_was_sent_whatever_the_clocks_say(
    offset_s: float, there_s: float, back_s: float
) -> None:
    program, parts = _program(), _parts(offset_s, there_s, back_s)
    found, error = aligned_clocks(program, parts)[OTHER]
    assert abs(found - offset_s) <= error + 1e-6
    told = run_metadata(program, parts)
    for task, peer in ((DRIVER, OTHER), (OTHER, DRIVER)):
        send = next(n for n in told.of(task) if n.kind == "send")
        recv = next(n for n in told.of(peer) if n.kind == "recv")
        assert recv.start_s >= send.start_s - 1e-6


def test_node_that_did_not_run_is_left_out() -> None:
    parts = _parts(0.0, 0.001, 0.001)
    parts[1].times[1, [READY, START, END]] = np.nan
    told = run_metadata(_program(), parts)
    assert [n.kind for n in told.of(OTHER)] == ["recv", "send"]
