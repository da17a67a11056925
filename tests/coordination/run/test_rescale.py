"""Whatever happens in whichever order, a run has one arrangement or the other."""

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.run.rescale import (
    LEAST_BYTES,
    MOST_AGAIN_S,
    MOST_ROUNDS,
    Drop,
    GoOn,
    Move,
    Moved,
    NotMoved,
    NotPrepared,
    Prepare,
    Prepared,
    Rescale,
    Rested,
    Retire,
    Retired,
    StateLost,
    Switch,
    Switched,
    TimePassed,
    Wanted,
    goes_on,
    wanted_ps,
)
from jgraph.errors import TaskLostError

LOST = TaskLostError("gone")
EVENTS = st.one_of(
    st.builds(Wanted, st.integers(1, 4)),
    st.sampled_from(
        [
            Prepared(),
            NotPrepared(LOST),
            Rested(),
            Moved(),
            NotMoved(LOST),
            Switched(),
            Retired(),
            StateLost(),
            TimePassed(),
        ]
    ),
)


@given(st.lists(EVENTS, max_size=60))
def test_the_number_changes_at_a_switch_and_only_to_what_was_copied(
    events: list[object],
) -> None:
    rescale, copied, dropped = Rescale(2), 0, True
    for number, event in enumerate(events):
        before = rescale.ps
        said = rescale.handle(event, float(number))  # type: ignore[arg-type]
        switched = [one.ps for one in said if isinstance(one, Switch)]
        assert rescale.ps == (switched[0] if switched else before)
        assert switched in ([], [copied])
        for one in said:
            match one:
                case Prepare():
                    assert dropped, "what was begun before is left over"
                    dropped = False
                case Move(ps):
                    copied = ps
                case Drop():
                    assert not switched
                    dropped = True
                case Switch():
                    dropped = True


@given(st.lists(EVENTS, max_size=60))
def test_loops_that_were_to_end_begin_again(events: list[object]) -> None:
    """However it goes on: with each way out of a rest, they do once."""
    rescale, resting = Rescale(2), False
    for number, event in enumerate(events):
        said = rescale.handle(event, float(number))  # type: ignore[arg-type]
        if any(isinstance(one, Move) for one in said):
            resting = True
        if any(isinstance(one, GoOn) for one in said):
            assert resting or isinstance(event, Rested)
            resting = False
    if not resting:
        return
    for ending in (Moved(), Switched()):
        if any(isinstance(one, GoOn) for one in rescale.handle(ending, 1e6)):
            return
    raise AssertionError("no loop begins again")


@given(st.lists(EVENTS, max_size=60))
def test_nothing_moves_again_before_what_it_left_behind_is_dropped(
    events: list[object],
) -> None:
    rescale, is_left = Rescale(2), False
    for number, event in enumerate(events):
        is_left = is_left and not isinstance(event, Retired)
        said = rescale.handle(event, float(number))  # type: ignore[arg-type]
        assert not (is_left and any(isinstance(one, Prepare) for one in said))
        is_left = is_left or any(isinstance(one, Retire) for one in said)


@pytest.mark.row(57)
@given(st.lists(EVENTS, max_size=60))
def test_what_is_wanted_comes_about_once_nothing_stands_in_its_way(
    events: list[object],
) -> None:
    rescale, now = Rescale(2), 0.0
    for event in events:
        rescale.handle(event, now)  # type: ignore[arg-type]
        now += 1.0
    for _ in range(8):
        now += 2 * MOST_AGAIN_S
        for event in (
            Switched(),
            Retired(),
            TimePassed(),
            Prepared(),
            Rested(),
            Moved(),
            Switched(),
            Retired(),
        ):
            rescale.handle(event, now)
    wanted = [2, *(event.ps for event in events if isinstance(event, Wanted))]
    assert rescale.ps == wanted[-1]
    # Nothing is under way.
    assert rescale.handle(Wanted(rescale.ps + 1), now) == [Prepare(rescale.ps + 1)]


@given(st.integers(1, 4), st.dictionaries(st.integers(0, 5), st.booleans(), max_size=6))
def test_no_ps_is_wanted_that_leaves_or_is_not_there(
    now: int, stays: dict[int, bool]
) -> None:
    ps, agrees = wanted_ps(now, 1, 4, stays)
    assert 1 <= ps <= 4
    if agrees and ps != now:
        assert all(stays.get(index) for index in range(ps))
    if any(index not in stays for index in range(now)):
        assert ps == now


@pytest.mark.row(58)
@given(st.lists(st.integers(0, 1 << 40), min_size=10, max_size=10))
def test_copying_ahead_ends_when_it_makes_the_rest_no_smaller(left: list[int]) -> None:
    """Writes are as fast as the link, or faster: the fence comes anyway."""
    rounds = 1
    while goes_on(left[:rounds]):
        rounds += 1
    assert rounds <= MOST_ROUNDS
    is_little = left[rounds - 1] <= LEAST_BYTES
    assert (
        is_little or rounds == MOST_ROUNDS or 2 * left[rounds - 1] >= left[rounds - 2]
    )
