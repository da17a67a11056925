"""Which frames a task accepts, told by incarnation and sequence number."""

import pytest

from jgraph.errors import FencedError, MalformedMessageError, TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.rpc.exchange.inbound import Inbound, StreamReplaced

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS = TaskName("/job:ps/task:0")
WORKER = TaskName("/job:worker/task:0")


def test_repeated_frame_is_dropped_and_counted() -> None:
    inbound = Inbound()
    stream, replaced = inbound.connect(PS, 1)
    assert not replaced
    assert [inbound.accept(stream, n) for n in (1, 2, 2, 1, 3)] == [
        *(True, True, False, False, True)
    ]
    assert inbound.repeats == 2


def test_gap_is_an_error_naming_both_frames() -> None:
    inbound = Inbound()
    stream, _ = inbound.connect(PS, 1)
    assert inbound.accept(stream, 1)
    with pytest.raises(MalformedMessageError, match=f"frame 3 of {PS} came after"):
        inbound.accept(stream, 3)


def test_next_stream_of_a_sender_may_jump_but_not_repeat() -> None:
    """Frames lost with a broken stream were reported when it ended."""
    inbound = Inbound()
    first, _ = inbound.connect(PS, 1)
    assert inbound.accept(first, 1)
    assert inbound.disconnect(first)
    second, replaced = inbound.connect(PS, 1)
    assert not replaced
    assert not inbound.accept(second, 1)
    assert inbound.accept(second, 5)
    with pytest.raises(MalformedMessageError):
        inbound.accept(second, 7)


@pytest.mark.row(3)
def test_new_incarnation_starts_anew_and_retires_the_old() -> None:
    inbound = Inbound()
    old, _ = inbound.connect(PS, 1)
    assert inbound.accept(old, 1)
    new, replaced = inbound.connect(PS, 2)
    assert replaced
    assert inbound.accept(new, 1)
    with pytest.raises(FencedError, match="started again"):
        inbound.accept(old, 2)
    with pytest.raises(FencedError, match="started again"):
        inbound.connect(PS, 1)
    assert not inbound.disconnect(old)
    assert inbound.disconnect(new)


def test_senders_are_counted_apart() -> None:
    inbound = Inbound()
    ps, _ = inbound.connect(PS, 1)
    worker, _ = inbound.connect(WORKER, 1)
    assert inbound.accept(ps, 1)
    assert inbound.accept(worker, 1)


def test_memory_of_restarts_is_bounded() -> None:
    inbound = Inbound()
    for incarnation in range(1, 1000):
        inbound.connect(PS, incarnation)
    with pytest.raises(FencedError):
        inbound.connect(PS, 998)
    assert len(inbound._senders[PS].retired) <= 64


def test_broken_stream_goes_on_where_it_was() -> None:
    inbound = Inbound()
    first, _ = inbound.connect(PS, 1)
    assert [inbound.accept(first, n) for n in (1, 2)] == [True, True]
    assert inbound.is_current(first)
    again = inbound.resume(PS, 1)
    assert not inbound.is_current(first)
    assert inbound.is_current(again)
    assert again.received.last == 2
    assert [inbound.accept(again, n) for n in (2, 3)] == [False, True]
    assert not inbound.disconnect(first)


def test_resumed_stream_may_not_jump() -> None:
    inbound = Inbound()
    stream, _ = inbound.connect(PS, 1)
    assert inbound.accept(stream, 1)
    with pytest.raises(MalformedMessageError, match="frames are missing"):
        inbound.accept(inbound.resume(PS, 1), 3)


def test_a_stream_that_broke_before_its_first_frame_may_still_jump() -> None:
    """Its sender numbered frames for those who were there before."""
    inbound = Inbound()
    inbound.connect(PS, 1)
    again = inbound.resume(PS, 1)
    assert inbound.accept(again, 263)
    with pytest.raises(MalformedMessageError):
        inbound.accept(inbound.resume(PS, 1), 265)


def test_stream_is_resumed_before_its_receiver_noticed_that_it_broke() -> None:
    inbound = Inbound()
    first, _ = inbound.connect(PS, 1)
    again = inbound.resume(PS, 1)
    with pytest.raises(StreamReplaced):
        inbound.accept(first, 1)
    assert inbound.accept(again, 1)


@pytest.mark.parametrize("how", ["never here", "given up", "another incarnation"])
def test_only_who_was_not_given_up_may_resume(how: str) -> None:
    inbound = Inbound()
    if how != "never here":
        stream, _ = inbound.connect(PS, 2 if how == "another incarnation" else 1)
        if how == "given up":
            assert inbound.disconnect(stream)
    with pytest.raises(TaskLostError, match="cannot be resumed"):
        inbound.resume(PS, 1)


def test_new_stream_of_a_sender_that_broke_reports_it() -> None:
    inbound = Inbound()
    stream, _ = inbound.connect(PS, 1)
    _, replaced = inbound.connect(PS, 1)
    assert replaced
    assert not inbound.is_current(stream)
