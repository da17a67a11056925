"""Transcripts: at which second what happened, and what is to be done."""

from jgraph.coordination.liveness.master_lease import (
    Answered,
    Ask,
    AskAgain,
    Event,
    GiveUp,
    GoOn,
    Instruction,
    LeaseTracker,
    Pause,
    TimePassed,
    Unanswered,
)
from jgraph.errors import DeadlineError

ERROR = DeadlineError("no answer")
TICK, LOST = TimePassed(), Unanswered(ERROR)


def transcript(*events: tuple[float, Event]) -> list[tuple[float, list[Instruction]]]:
    supervision = LeaseTracker(now=0.0, lease_s=10.0, end_s=60.0)
    return [(now, supervision.handle(event, now)) for now, event in events]


def test_loop_that_asks_for_data_asks_for_nothing_else() -> None:
    assert transcript(
        (2.0, Answered()), (2.5, TICK), (4.0, Answered()), (5.0, TICK)
    ) == [
        (2.0, []),
        (2.5, []),
        (4.0, []),
        (5.0, []),
    ]


def test_loop_of_long_steps_asks_whether_its_master_is_there() -> None:
    assert transcript((2.5, TICK), (2.6, Answered()), (5.0, TICK), (7.5, TICK)) == [
        (2.5, [Ask()]),
        (2.6, []),
        (5.0, []),
        (7.5, [Ask()]),
    ]


def test_row_22_loop_pauses_when_its_lease_ends_and_goes_on_when_the_link_heals() -> (
    None
):
    assert transcript(
        (7.5, TICK),
        (10.0, TICK),
        (12.5, TICK),
        (15.0, LOST),
        (15.5, LOST),
        (16.0, Answered()),
        (17.5, TICK),
    ) == [
        (7.5, [Ask()]),
        (10.0, [Pause(), Ask()]),
        (12.5, [Ask()]),
        (15.0, [AskAgain(0.5)]),
        (15.5, [AskAgain(0.5)]),
        (16.0, [GoOn()]),
        (17.5, []),
    ]


def test_question_that_is_refused_at_once_is_asked_again_before_the_pause() -> None:
    assert transcript((1.0, LOST), (9.9, LOST), (10.0, LOST)) == [
        (1.0, [AskAgain(0.5)]),
        (9.9, [AskAgain(0.5)]),
        (10.0, [Pause(), AskAgain(0.5)]),
    ]


def test_loop_ends_that_hears_nothing_for_a_minute() -> None:
    assert transcript((59.9, LOST), (60.0, LOST)) == [
        (59.9, [Pause(), AskAgain(0.5)]),
        (60.0, [GiveUp(ERROR)]),
    ]
