"""Privacy accounting: epsilon of a sequence of noised updates, by dp-accounting.

What is spent depends on the options and the number of updates alone, and never on the
data. So it is known before a run how many updates a target allows.

Source: Doroshenko et al., "Connect the Dots: Tighter Discrete Approximations of Privacy
Loss Distributions", 2022 (what the accountant does).
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, final

from jgraph.coordination.run.privacy_account import (
    POSITION_KEY,
    PrivacyAccount,
    Spent,
)
from jgraph.errors import ConfigError
from jgraph.train.privacy.options import Privacy
from jgraph.train.state.runner import Position

_LARGE: Final = 100.0
_LEAST_NOISE: Final = 0.1
_KINDS: Final = 8
"""Of updates, whose distributions are kept: a few MB each."""
_ORDERS: Final = (1.25, 1.5, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128, 256)


def epsilon_of(expenses: Sequence[Spent], delta: float) -> float:
    """Returns the epsilon of all these updates together, for one unit more or less.

    It is that of privacy loss distributions; above 100, where nothing is hidden, that
    of Renyi's divergence, which is larger.

    Args:
      expenses: of one unit.
      delta: probability with which it may not hold.

    Example:
      >>> epsilon_of([Spent("example", 1.0, 0.01, 1000)], 1e-5)
      1.83
      >>> epsilon_of([], 1e-5)
      0.0
    """
    if not any(one.updates for one in expenses):
        return 0.0
    bound = _bound(expenses, delta)
    if bound > _LARGE:  # and the distributions have no room
        return bound
    return _epsilon(expenses, delta)


def _bound(expenses: Sequence[Spent], delta: float) -> float:
    """Returns an epsilon that is not less, and known at once."""
    import dp_accounting
    from dp_accounting import rdp

    least = min(one.noise for one in expenses if one.updates)
    if least < _LEAST_NOISE:
        return math.inf
    accountant = rdp.RdpAccountant(_ORDERS)
    for one in expenses:
        event: Any = dp_accounting.GaussianDpEvent(one.noise)
        if one.rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(one.rate, event)
        if one.updates:
            accountant.compose(dp_accounting.SelfComposedDpEvent(event, one.updates))
    return float(accountant.get_epsilon(delta))


def _epsilon(expenses: Sequence[Spent], delta: float) -> float:
    """Returns what ``dp_accounting.pld.PLDAccountant`` does."""
    losses = None
    for one in expenses:
        if not one.updates:
            continue
        if one.rate < 1:
            own = _losses(one.noise, one.rate).self_compose(one.updates)
        else:  # the sum of noise is such noise
            own = _losses(one.noise / math.sqrt(one.updates), 1.0)
        losses = own if losses is None else losses.compose(own)
    return 0.0 if losses is None else float(losses.get_epsilon_for_delta(delta))


@lru_cache(_KINDS)
def _losses(noise: float, rate: float) -> Any:
    """Returns the distribution of the privacy loss of one update.

    It takes longer than those of many updates that are made of it.
    """
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise, sampling_prob=rate
    )


def affordable(
    expenses: Sequence[Spent], kind: Spent, delta: float, target_epsilon: float
) -> int:
    """Returns how many more updates there may be, ``kind.updates`` at most.

    Args:
      expenses: before.
      kind: what each of them is.
      delta: as for ``epsilon_of``.
      target_epsilon: what all together may not pass.

    Example:
      >>> affordable([], Spent("example", 1.0, 0.01, 1000), 1e-5, 1.5)
      657
    """

    def after(updates: int) -> float:
        return epsilon_of([*expenses, replace(kind, updates=updates)], delta)

    def bound(updates: int) -> float:
        return _bound([*expenses, replace(kind, updates=updates)], delta)

    most = kind.updates
    if after(0) > target_epsilon:
        return 0
    if after(most) <= target_epsilon:
        return most
    low, high, ratio, stride = 0, most, 1.0, 1
    while high - low > 1:
        # Epsilon is a share of its bound that hardly changes, and the bound costs next
        # to nothing; where the guess is one of before, a step from there, and a longer
        # one each time.
        guess = _last(bound, target_epsilon / ratio, low, high)
        if guess <= low:
            guess, stride = min(low + stride, (low + high + 1) // 2), 4 * stride
        elif guess >= high - 1 and high < most:
            guess, stride = max(high - stride, (low + high) // 2), 4 * stride
        guess = min(max(guess, low + 1), high - 1)
        epsilon = after(guess)
        if epsilon > 0 and 0 < (limit := bound(guess)) < math.inf:
            ratio = epsilon / limit
        if epsilon <= target_epsilon:
            low = guess
        else:
            high = guess
    return low


def _last(value: Callable[[int], float], most: float, low: int, high: int) -> int:
    """Returns the last number with no more than so large a value, which grows with it.

    Args:
      value: of a number.
      most: the largest that may be.
      low: the number if there is none.
      high: numbers are smaller than this one.
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= most else (low, middle)
    return low


@final
class Spending:
    """The account of a Trainer: all updates that its data had a part in.

    An update that was made again, as its run went back to a checkpoint, counts again:
    who saw both knows both. Thread safe.

    Args:
      privacy: the options.
    """

    def __init__(self, privacy: Privacy) -> None:
        self._privacy = privacy
        self._account = PrivacyAccount((), self._kind(1.0), 0)
        self._known: dict[tuple[Spent, ...], float] = {}
        self._lock = threading.Lock()

    def _kind(self, rate: float) -> Spent:
        return Spent(self._privacy.unit, self._privacy.noise_multiplier, rate)

    def begin(self, rate: float, first: int, steps: int) -> int:
        """Begins a run; returns how many updates it may have.

        Args:
          rate: see ``Spent``.
          first: updates applied before.
          steps: updates that it would like.

        Raises:
          ConfigError: the target does not allow a single one.
        """
        privacy, target = self._privacy, self._privacy.target_epsilon
        with self._lock:
            past, kind = self._account.spent(), self._kind(rate)
            count = steps
            if target is not None:
                wanted = replace(kind, updates=steps)
                count = affordable(past, wanted, privacy.failure, target)
            if target is not None and not count:
                before = epsilon_of(past, privacy.failure)
                raise ConfigError(
                    f"target_epsilon={target:g} allows no update: {before:.3g} was "
                    f"spent before, and one more of noise_multiplier="
                    f"{privacy.noise_multiplier:g} passes it; give a larger target, or "
                    "end the training here"
                )
            limit = None if target is None else count
            self._account = PrivacyAccount(tuple(past), kind, first, limit)
            return count

    def opening(self) -> dict[str, Any]:
        """Returns the account of a run that begins, for its master."""
        with self._lock:
            return self._account.opening()

    def reached(self, updates: int) -> None:
        """Takes note that the model has so many updates, of earlier runs too."""
        with self._lock:
            self._account = self._account.reached(updates)

    def went_back(self, step: int, back_to: int) -> None:
        """Takes note that updates are made again."""
        with self._lock:
            self._account = self._account.went_back(step, back_to)

    def may_do(self, updates: int) -> bool:
        """Whether so many more pass no target."""
        with self._lock:
            allowance = self._account.allowance
            return allowance is None or updates <= allowance

    @property
    def epsilon(self) -> float:
        """What all updates have spent."""
        with self._lock:
            expenses = tuple(self._account.spent())
        if expenses not in self._known:
            self._known = {expenses: epsilon_of(expenses, self._privacy.failure)}
        return self._known[expenses]

    # ------------------------------------------------------------ checkpoints

    def noted(self, position: Position, updates: int) -> Position:
        """Returns a position with the account, for a checkpoint.

        Args:
          position: where in the data the run is.
          updates: that the model has.
        """
        self.reached(updates)
        with self._lock:
            return {**(position or {}), POSITION_KEY: self._account.plain()}

    def restore(self, position: Position, where: str) -> None:
        """Takes the account of a checkpoint; what was spent here stays spent.

        Args:
          position: that of the checkpoint.
          where: it is.

        Raises:
          ConfigError: it has none, or one of another unit.
        """
        plain = (position or {}).get(POSITION_KEY)
        if plain is None:
            raise ConfigError(
                f"{where} has no account of the privacy that it has spent: it was "
                "saved without privacy=, or by a master that was not told of all "
                "updates before it went back. If the data had no part in it, take the "
                "model alone: jg.Trainer(model) of what a Trainer without privacy= "
                "restored, as trainer.model()"
            )
        theirs = [Spent(*one) for one in plain]
        for one in theirs:
            if one.unit != self._privacy.unit:
                raise ConfigError(
                    f"the checkpoint's updates hid the part of one {one.unit}, and "
                    f"jg.Privacy(unit={self._privacy.unit!r}) that of one "
                    f"{self._privacy.unit}: no epsilon covers both; write unit="
                    f"{one.unit!r}"
                )
        with self._lock:
            past = _most(self._account.spent(), theirs)
            # Until a run begins, no update is new.
            self._account = PrivacyAccount(tuple(past), self._kind(1.0), 1 << 62)


def _most(ours: Sequence[Spent], theirs: Sequence[Spent]) -> list[Spent]:
    """Returns the larger number of updates of each kind."""
    counts = {replace(one, updates=0): one.updates for one in ours}
    for one in theirs:
        kind = replace(one, updates=0)
        counts[kind] = max(counts.get(kind, 0), one.updates)
    return [replace(kind, updates=n) for kind, n in counts.items()]
