"""Privacy account of a run: how many updates its data had a part in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self, final

POSITION_KEY: Final = "privacy"
"""Of the account in the position of a checkpoint."""


@final
@dataclass(frozen=True, slots=True)
class Spent:
    """Updates of one kind.

    Attributes:
      unit: whose part in the data they hide, ``"example"`` or ``"client"``.
      noise: standard deviation of the noise, in units of the clipping norm.
      rate: probability of each unit to be part of an update; 1: each is, of all.
      updates: how many.
    """

    unit: str
    noise: float
    rate: float
    updates: int = 0

    def plain(self) -> list[Any]:
        """Returns it as plain data."""
        return [self.unit, self.noise, self.rate, self.updates]


def together(expenses: Iterable[Spent]) -> list[Spent]:
    """Returns what was spent, alike updates as one.

    Example:
      >>> together([Spent("client", 1.0, 1.0, 2), Spent("client", 1.0, 1.0, 3)])
      [Spent(unit='client', noise=1.0, rate=1.0, updates=5)]
    """
    counts: dict[Spent, int] = {}
    for one in expenses:
        kind = replace(one, updates=0)
        counts[kind] = counts.get(kind, 0) + one.updates
    return [replace(kind, updates=n) for kind, n in counts.items() if n]


@final
@dataclass(frozen=True, slots=True)
class PrivacyAccount:
    """What a run has spent; its client and its master each keep one.

    Attributes:
      past: what was spent before the run.
      kind: what an update of the run is.
      first: updates of the model when it began.
      limit: how many the run may make, those that are made again included; None: as
        many as it likes.
      again: updates that were made again.
      newest: updates that the model is known to have had, since it went back last.
      is_whole: False: the run went back from nobody knows how many updates.

    Example:
      >>> account = PrivacyAccount((), Spent("example", 1.0, 0.1), first=100)
      >>> account = account.reached(160).went_back(step=150, back_to=140)
      >>> account.count, account.reached(161).count, account.reached(161).plain()
      (60, 81, [['example', 1.0, 0.1, 81]])
    """

    past: tuple[Spent, ...]
    kind: Spent
    first: int
    limit: int | None = None
    again: int = 0
    newest: int = 0
    is_whole: bool = True

    @property
    def count(self) -> int:
        """Updates of the run."""
        return max(0, self.newest - self.first) + self.again

    @property
    def allowance(self) -> int | None:
        """How many more it may make; None: as many as it likes."""
        return None if self.limit is None else max(0, self.limit - self.count)

    def reached(self, updates: int) -> Self:
        """Returns the account when the model has so many updates."""
        return replace(self, newest=max(self.newest, updates))

    def went_back(self, step: int, back_to: int, *, is_known: bool = True) -> Self:
        """Returns the account when updates are made again: who saw both knows both.

        Args:
          step: updates that were told of.
          back_to: updates that the model has now.
          is_known: whether nobody was told of more.
        """
        again = self.again + max(0, max(self.newest, step) - back_to)
        is_whole = self.is_whole and is_known
        return replace(self, again=again, newest=back_to, is_whole=is_whole)

    def spent(self) -> list[Spent]:
        """Returns what all updates have spent, alike ones as one."""
        return together([*self.past, replace(self.kind, updates=self.count)])

    def plain(self) -> list[list[Any]]:
        """Returns what was spent as plain data, for a checkpoint."""
        return [one.plain() for one in self.spent()]

    def opening(self) -> dict[str, Any]:
        """Returns the account of a run that begins, as plain data for its master."""
        return {
            "past": [one.plain() for one in self.past],
            "kind": self.kind.plain(),
            "first": self.first,
            "limit": self.limit,
        }

    @classmethod
    def opened(cls, plain: Mapping[str, Any]) -> Self:
        """Returns the account of ``opening``.

        Example:
          >>> account = PrivacyAccount((), Spent("client", 2.0, 1.0), 7, limit=5)
          >>> PrivacyAccount.opened(account.opening()) == account
          True
        """
        limit = plain["limit"]
        return cls(
            tuple(Spent(*one) for one in plain["past"]),
            Spent(*plain["kind"]),
            int(plain["first"]),
            None if limit is None else int(limit),
        )
