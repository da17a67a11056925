"""A member tells of no neighbour both secrets, whatever it is asked and when."""

from collections.abc import Sequence

from hypothesis import given, settings, strategies as st

from jgraph.coordination.secure.member_round import (
    Contribute,
    KeysCame,
    MemberRound,
    Reveal,
    RoundBegan,
    SharesAsked,
    SharesCame,
)
from jgraph.coordination.secure.sum_round import neighbours_of
from jgraph.errors import SecureSumError

NAMES = ("a", "b", "c", "d", "e")
some = st.lists(st.sampled_from(NAMES), max_size=6).map(tuple)
number = st.integers(1, 2)
events = st.one_of(
    st.builds(RoundBegan, number),
    st.builds(KeysCame, number, some),
    st.builds(SharesCame, number, some),
    st.builds(SharesAsked, number, some, some),
    # What a round is made of, so that it comes to its end often.
    st.just(KeysCame(1, ("b", "c", "d"))),
    st.just(SharesCame(1, ("b", "c", "d"))),
    st.just(SharesAsked(1, ("b", "c"), ("d",))),
)


@settings(max_examples=8 * settings().max_examples)
@given(told=st.lists(events, max_size=12))
def test_no_order_of_requests_gets_both_secrets_of_one(told: Sequence[object]) -> None:
    member = MemberRound("a", threshold=2)
    member.handle(RoundBegan(1))
    reveals = dict[int, list[Reveal]]()
    current, masked = 1, dict[int, tuple[str, ...]]()
    for event in told:
        try:
            (answer,) = member.handle(event)  # type: ignore[arg-type]
        except SecureSumError:
            assert member.step == "over"
            continue
        if isinstance(event, RoundBegan):
            current = event.number
        if isinstance(answer, Contribute):
            assert current not in masked
            masked[current] = answer.neighbours
        if isinstance(answer, Reveal):
            reveals.setdefault(current, []).append(answer)
    for of, answers in reveals.items():
        (answer,) = answers
        assert not set(answer.seeds_of) & set(answer.keys_of)
        assert {*answer.seeds_of, *answer.keys_of} == set(masked[of])
        assert len(answer.seeds_of) >= 2


@given(count=st.integers(2, 40), near=st.sampled_from([2, 4, 8]), seed=st.integers(0))
def test_neighbours_are_mutual_and_as_many_for_each(
    count: int, near: int, seed: int
) -> None:
    graph = neighbours_of(map(str, range(count)), near, seed)
    assert len(graph) == count
    for name, others in graph.items():
        assert name not in others
        assert len(others) == min(near, count - 1)
        assert all(name in graph[other] for other in others)
