"""Privacy account of a run: what counts, and what is left."""

import json

from hypothesis import given, strategies as st

from jgraph.coordination.run.privacy_account import PrivacyAccount, Spent

KIND = Spent("example", 1.0, 0.1)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8),
    st.integers(0, 50),
)
def test_each_update_counts_as_often_as_it_is_made(
    turns: list[tuple[int, int]], first: int
) -> None:
    """Each turn makes some updates, and then goes back over some of them."""
    account, now, made = PrivacyAccount((), KIND, first), first, 0
    for further, back in turns:
        now, made = now + further, made + further
        account = account.reached(now)
        assert account.count == made
        back_to = max(first, now - back)
        account, now = account.went_back(now, back_to), back_to
        assert account.count == made


def test_who_was_told_of_more_updates_counts_more() -> None:
    """The next master may know fewer than the client does."""
    account = PrivacyAccount((), KIND, 0).reached(100).went_back(95, 90)
    assert account.reached(100).count == 110


def test_a_limit_is_of_the_updates_that_are_made_again_too() -> None:
    account = PrivacyAccount((), KIND, 10, limit=50).reached(40)
    assert account.allowance == 20
    assert account.went_back(40, 20).allowance == 20
    assert account.went_back(40, 20).reached(60).allowance == 0


def test_an_account_knows_whether_it_went_back_from_what_nobody_knows() -> None:
    account = PrivacyAccount((), KIND, 0).went_back(5, 0, is_known=False)
    assert not account.went_back(5, 0).is_whole


def test_an_account_is_opened_elsewhere_with_what_was_spent_before() -> None:
    past = (Spent("example", 2.0, 0.5, 7),)
    plain = json.loads(json.dumps(PrivacyAccount(past, KIND, 3, limit=9).opening()))
    account = PrivacyAccount.opened(plain).reached(5)
    assert account.plain() == [["example", 2.0, 0.5, 7], ["example", 1.0, 0.1, 2]]
    assert account.allowance == 7
