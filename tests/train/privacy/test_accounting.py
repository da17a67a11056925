"""The account of privacy, against the accountant asked by hand."""

from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld

from jgraph.coordination.run.privacy_account import Spent
from jgraph.errors import ConfigError
from jgraph.train.privacy import accounting
from jgraph.train.privacy.accounting import Spending, affordable, epsilon_of
from jgraph.train.privacy.options import Privacy

DELTA = 1e-5


def privacy(**options: object) -> Privacy:
    return Privacy(**{"noise_multiplier": 1.5, "clip": 1.0, "delta": DELTA, **options})  # type: ignore[arg-type]


def by_hand(*events: tuple[float, float, int]) -> float:
    accountant = pld.PLDAccountant()
    for noise, rate, updates in events:
        event = dp_accounting.PoissonSampledDpEvent(
            rate, dp_accounting.GaussianDpEvent(noise)
        )
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, updates))
    return float(accountant.get_epsilon(DELTA))


def test_epsilon_is_that_of_the_accountant() -> None:
    spent = [Spent("example", 1.5, 0.02, 300), Spent("example", 1.2, 0.05, 40)]
    due = by_hand((1.5, 0.02, 300), (1.2, 0.05, 40))
    assert abs(epsilon_of(spent, DELTA) - due) < 1e-9


def test_a_unit_that_is_part_of_each_update_is_hidden_by_noise_alone() -> None:
    accountant = pld.PLDAccountant()
    accountant.compose(
        dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(4.0), 10)
    )
    found = epsilon_of([Spent("client", 4.0, 1.0, 10)], DELTA)
    assert abs(found - accountant.get_epsilon(DELTA)) < 1e-9


def test_a_target_allows_the_most_updates_that_do_not_pass_it() -> None:
    before = [Spent("example", 1.5, 0.02, 100)]
    kind = Spent("example", 1.5, 0.02, 30)
    target = by_hand((1.5, 0.02, 117)) + 1e-6
    assert affordable(before, kind, DELTA, target) == 17
    assert affordable(before, kind, DELTA, target / 2) == 0
    assert affordable(before, kind, DELTA, target * 2) == 30


@pytest.mark.nightly
def test_the_most_of_a_million_updates_are_found_by_few_distributions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes a second or more, and halving would ask for twenty."""
    asked: list[object] = []
    known = accounting._epsilon

    def counted(*of: Any) -> float:
        asked.append(of)
        return known(*of)

    monkeypatch.setattr(accounting, "_epsilon", counted)
    kind = Spent("example", 1.0, 0.001, 10**6)
    assert affordable([], kind, DELTA, 2.0) == 143696
    assert len(asked) <= 12
    monkeypatch.undo()
    assert by_hand((1.0, 0.001, 143696)) <= 2.0 < by_hand((1.0, 0.001, 143697))


def test_runs_of_a_trainer_are_one_account() -> None:
    spending = Spending(privacy())
    assert spending.epsilon == 0.0
    assert spending.begin(0.02, first=0, steps=200) == 200
    spending.reached(200)
    spending.begin(0.05, first=200, steps=40)
    spending.reached(240)
    due = by_hand((1.5, 0.02, 200), (1.5, 0.05, 40))
    assert abs(spending.epsilon - due) < 1e-9


def test_updates_that_are_made_again_count_again() -> None:
    spending = Spending(privacy(target_epsilon=5.0))
    assert spending.begin(0.02, first=0, steps=130) == 130
    spending.reached(60)
    spending.went_back(step=70, back_to=50)
    spending.reached(100)
    assert abs(spending.epsilon - by_hand((1.5, 0.02, 120))) < 1e-9
    assert spending.may_do(10)
    assert not spending.may_do(11)


def test_a_checkpoint_has_the_account() -> None:
    first, second = Spending(privacy()), Spending(privacy())
    first.begin(0.02, first=0, steps=200)
    position = first.noted({"plan": {}}, 150)
    second.restore(position, "there")
    second.begin(0.02, first=150, steps=50)
    second.reached(200)
    assert abs(second.epsilon - by_hand((1.5, 0.02, 200))) < 1e-9
    # What was seen since is not forgotten by going back.
    second.restore(position, "there")
    assert abs(second.epsilon - by_hand((1.5, 0.02, 200))) < 1e-9


def test_a_checkpoint_without_an_account_is_refused() -> None:
    positions: list[Any] = [None, {"plan": {}}]
    for position in positions:
        with pytest.raises(ConfigError, match="has no account of the privacy"):
            Spending(privacy()).restore(position, "there")


def test_no_epsilon_covers_two_units() -> None:
    clients = Spending(privacy(unit="client"))
    clients.begin(1.0, first=0, steps=3)
    with pytest.raises(ConfigError, match="no epsilon covers both"):
        Spending(privacy()).restore(clients.noted(None, 3), "there")


def test_a_target_that_is_reached_allows_no_other_run() -> None:
    spending = Spending(privacy(target_epsilon=0.3))
    count = spending.begin(0.02, first=0, steps=30)
    assert 1 < count < 30
    spending.reached(count)
    with pytest.raises(ConfigError, match=r"target_epsilon=0\.3 allows no update"):
        spending.begin(0.02, first=count, steps=1)


def test_noise_that_hides_nothing_has_an_epsilon_that_says_so() -> None:
    """The accountant's distributions would take all memory there."""
    assert epsilon_of([Spent("example", 1e-6, 1.0, 1)], DELTA) == float("inf")
    assert epsilon_of([Spent("example", 0.2, 0.5, 100)], DELTA) > 100
    private = privacy(noise_multiplier=1e-6, target_epsilon=8.0)
    with pytest.raises(ConfigError, match="allows no update"):
        Spending(private).begin(0.5, first=0, steps=10)
