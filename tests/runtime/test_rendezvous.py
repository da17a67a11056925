import numpy as np
import pytest

from jgraph.errors import MalformedMessageError
from jgraph.runtime.rendezvous import Rendezvous, StepKey, Values

STEP: StepKey = ("train", 7)


def test_consumer_may_ask_before_or_after_the_value_came() -> None:
    table, got = Rendezvous(), list[Values]()
    table.recv(STEP, "early", got.append)
    table.send(STEP, "early", [1])
    table.send(STEP, "late", [2])
    table.recv(STEP, "late", got.append)
    assert got == [[1], [2]]


def test_steps_and_programs_do_not_mix() -> None:
    table, got = Rendezvous(), list[Values]()
    table.recv(STEP, "w", got.append)
    table.send(("train", 8), "w", [8])
    table.send(("other", 7), "w", [9])
    assert got == []
    assert table.waiting_for(STEP) == ["w"]


def test_value_sent_twice_is_refused() -> None:
    table = Rendezvous()
    table.send(STEP, "w", [1])
    with pytest.raises(MalformedMessageError, match="'w' of step 7 of 'train'"):
        table.send(STEP, "w", [1])


def test_values_of_a_finished_step_are_dropped() -> None:
    table, got = Rendezvous(), list[Values]()
    table.recv(STEP, "w", got.append)
    table.finish(STEP)
    table.send(STEP, "w", [1])
    table.send(STEP, "w", [1])
    assert got == []
    assert table.waiting_for(STEP) == []


def test_finished_program_forgets_values_that_came_early() -> None:
    table, got = Rendezvous(), list[Values]()
    table.send(STEP, "w", [1])
    table.finish_program("train")
    table.recv(STEP, "w", got.append)
    assert got == []


def test_bytes_are_counted_while_nobody_asked_for_them() -> None:
    table, values = Rendezvous(), [np.zeros(100, np.uint8)]
    table.recv(STEP, "w", lambda _: None)
    table.send(STEP, "w", values)
    assert table.nbytes == 0
    table.send(STEP, "a", values)
    table.send(("train", 8), "a", values)
    assert (table.nbytes, table.oldest()) == (200, STEP)
    table.recv(STEP, "a", lambda _: None)
    assert (table.nbytes, table.oldest()) == (100, ("train", 8))
    table.finish(("train", 8))
    assert table.nbytes == 0
    assert table.is_finished(("train", 8))
    assert not table.is_finished(("train", 9))
