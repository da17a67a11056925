"""The flight recorder keeps the last steps of a task, in bounded memory."""

import numpy as np
import pytest

from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import FeedNode, FetchNode, ValueType
from jgraph.plan.program.program import Partition, Program
from jgraph.runtime.flight import FlightRecorder, Stamps, blank_stamps

TASK = TaskName("/job:worker/task:0")
X = ValueType((4,), "float32")


def program() -> Program:
    nodes = (FeedNode("x", 0), FetchNode((0,)))
    partition = Partition(TASK, (X,), (), nodes)
    return Program("step", TASK, (partition,), (), (("x", X),), (("", X),))


def stamps(over_s: float) -> Stamps:
    noted = blank_stamps(2)
    noted[6:9] = type(noted)("d", [over_s - 0.2, over_s - 0.1, over_s])
    return noted


def recorder(steps: int, rows: int = 30) -> FlightRecorder:
    flight = FlightRecorder(TASK, rows)
    flight.registered("h", program())
    for step in range(1, steps + 1):
        flight.step_over(("h", step), stamps(float(step)))
    return flight


def test_the_last_steps_are_kept_with_what_their_nodes_are() -> None:
    found = recorder(15).after(0)
    assert [step for _, step in found.steps] == list(range(6, 16))
    assert found.since_s == 5.0
    assert found.times.shape == (30, 3)
    # The feed is there as the step begins, and what it feeds is fetched at once.
    assert found.times[:2] == pytest.approx(np.full((2, 3), 5.9))
    assert found.times[-1].tolist() == pytest.approx([14.8, 14.9, 15.0])
    assert [node.kind for node in found.programs["h"].nodes] == ["feed", "fetch"]


def test_who_knows_some_gets_the_others_and_may_ask_for_a_time() -> None:
    flight = recorder(9)
    assert [step for _, step in flight.after(7).steps] == [8, 9]
    assert [step for _, step in flight.after(0, since_s=7.5).steps] == [8, 9]
    assert not flight.after(9).steps
    flight.note("register", "other", 9.0, 9.5)
    assert [note.label for note in flight.after(9).notes] == ["other"]
    assert not flight.after(0, since_s=9.9).notes


def test_a_program_is_known_as_long_as_a_step_of_it_is() -> None:
    flight = recorder(3)
    flight.unregistered("h")
    assert flight.after(0).programs["h"].name == "step"
    flight.registered("other", program())
    flight.unregistered("none")
    for step in range(20):
        flight.step_over(("other", step), stamps(100.0 + step))
    assert list(flight.after(0).programs) == ["other"]
    flight.unregistered("h")  # of which there are no steps any more
    flight.step_over(("h", 4), stamps(200.0))  # nobody knows what its nodes were
    assert list(flight.after(0).programs) == ["other"]


def test_a_recorder_that_is_off_keeps_nothing() -> None:
    assert not FlightRecorder(TASK, 0).is_on
    assert not recorder(5, rows=0).after(0).steps
