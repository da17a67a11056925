from jgraph.coordination.liveness.self_fencing import (
    DOUBT_S,
    PATIENCE_S,
    Ask,
    AskAgain,
    Awake,
    FoundNobody,
    FoundOther,
    FoundSelf,
    GoOn,
    Instruction,
    Leave,
    SelfFence,
)


def woken(now: float = 60.0) -> SelfFence:
    tenure = SelfFence(now=0.0)
    assert tenure.handle(Awake(), now) == [Ask()]
    return tenure


def awake_until(tenure: SelfFence, begin: int, end: int) -> list[Instruction]:
    return [what for now in range(begin, end) for what in tenure.handle(Awake(), now)]


def test_process_that_is_awake_is_sure() -> None:
    tenure = SelfFence(now=0.0)
    assert awake_until(tenure, 1, 1000) == []
    assert tenure.is_sure(999 + DOUBT_S - 0.1)


def test_short_pause_is_no_reason_to_ask() -> None:
    tenure = SelfFence(now=0.0)
    assert tenure.handle(Awake(), DOUBT_S - 0.1) == []


def test_row_17_process_that_was_away_is_not_sure_before_it_has_asked() -> None:
    tenure = SelfFence(now=0.0)
    assert not tenure.is_sure(60.0)  # whatever comes first after it woke
    assert tenure.handle(Awake(), 60.0) == [Ask()]
    assert not tenure.is_sure(60.0)
    assert tenure.handle(Awake(), 61.0) == []  # it has been asked
    assert tenure.handle(FoundSelf(), 61.1) == [GoOn()]
    assert tenure.is_sure(61.2)


def test_row_17_process_that_was_replaced_is_never_sure_again() -> None:
    tenure = woken()
    assert tenure.handle(FoundOther(), 60.1) == [Leave(60.0)]
    assert tenure.handle(FoundSelf(), 60.2) == []
    assert awake_until(tenure, 61, 200) == []
    assert not tenure.is_sure(200.0)


def test_answer_of_before_another_pause_is_not_taken() -> None:
    tenure = woken(60.0)
    assert tenure.handle(FoundSelf(), 120.0) == [Ask()]
    assert not tenure.is_sure(120.0)
    assert tenure.handle(FoundOther(), 120.1) == [Leave(60.0)]


def test_process_that_finds_nobody_asks_again_and_goes_on_at_last() -> None:
    tenure = woken(60.0)
    assert tenure.handle(FoundNobody(), 61.0) == [AskAgain(0.2)]
    assert not tenure.is_sure(61.0)
    assert tenure.handle(FoundNobody(), 60.0 + PATIENCE_S) == [GoOn()]
