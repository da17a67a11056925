"""The flight recorder keeps the last steps of a task, in bounded memory."""

from itertools import pairwise

import numpy as np
import pytest

from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import FeedNode, FetchNode, ValueType
from jgraph.plan.program.program import Partition, Program
from jgraph.runtime.flight import (
    ROWS_A_SECOND,
    FlightRecorder,
    Stamps,
    blank_stamps,
)

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


def noted(flight: FlightRecorder, every_s: float, began_s: float) -> list[int]:
    """Runs steps for two seconds; returns which were noted in the last tenth of one."""
    numbers, late = [], int(1.9 / every_s)
    for step in range(int(2.0 / every_s)):
        if not step & flight.skips:
            flight.step_over(("h", step), stamps(began_s + step * every_s))
            if step >= late:
                numbers.append(step)
    return numbers


def test_of_short_steps_so_many_are_noted_as_a_second_may_have_rows() -> None:
    flight = recorder(0, rows=100_000)
    numbers = noted(flight, 50e-6, 1.0)  # of three rows each
    assert {later - earlier for earlier, later in pairwise(numbers)} == {32}
    assert all(number % 32 == 0 for number in numbers)  # those that other tasks note
    assert 3 * 10 * len(numbers) <= ROWS_A_SECOND


def test_steps_that_grow_longer_are_all_noted_again() -> None:
    flight = recorder(0, rows=100_000)
    noted(flight, 50e-6, 1.0)
    assert len(noted(flight, 5e-3, 3.0)) < 20  # rows are counted before it looks
    found = [noted(flight, 5e-3, began_s) for began_s in np.arange(5.0, 60.0, 2.0)]
    assert len(found[-1]) == 20


def test_every_step_is_noted_for_who_asks_for_a_trace() -> None:
    flight = recorder(0, rows=100_000)
    noted(flight, 50e-6, 1.0)
    flight.note_all(until_s=5.0)
    assert len(noted(flight, 50e-6, 3.0)) == 2000
    assert len(noted(flight, 50e-6, 5.0)) == 62
