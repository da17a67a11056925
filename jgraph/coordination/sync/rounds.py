"""Federated rounds: who is invited to each, and what became of those who were.

A round is an update of synchronous training to which a part of the replicas is invited.
Their data is their own: what is dealt to one that is invited is leave to take part. It
asks when it holds nothing, and the question stays open until it is invited. A round is
over when all who were invited have contributed, but those that are lost; when its time
is up, as soon as the least are there, and the others are late. A replica that is still
busy with an earlier round is invited to none.

    invited --(contributed)--> a member of the round
            --(lost, or late, or not finite)--> dropped; another is invited if too few
                                                are left
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar, final

from jgraph.coordination.data.slots import Lease, epoch_order
from jgraph.coordination.data.sync_data import SyncData

Dealt: TypeAlias = tuple[str, Sequence[Lease]]

NOT_FINITE: Final = "not finite"
"""Why a replica is dropped whose contribution has NaN or infinity."""

_Slot = TypeVar("_Slot")


def not_to_count(slot: _Slot) -> _Slot:
    """Returns the number by which a contribution to a round is known that is no good.

    It is less than 0, and turned round it is the slot again.

    Args:
      slot: of the contribution; an array, too.

    Example:
      >>> not_to_count(0), not_to_count(not_to_count(7))
      (-1, 7)
    """
    number: Any = slot
    turned: _Slot = -1 - number
    return turned


@final
@dataclass(frozen=True, slots=True)
class RoundRule:
    """How many replicas a round has.

    Attributes:
      fraction: of those there are, rounded up.
      least: and never fewer than these.
      seed: decides who.
    """

    fraction: float
    least: int
    seed: int = 0

    def drawn(self, replicas: int) -> int:
        """Returns how many of so many replicas are invited.

        Example:
          >>> RoundRule(0.1, least=2).drawn(45)
          5
        """
        return max(self.least, math.ceil(self.fraction * replicas))


@final
@dataclass(frozen=True, slots=True)
class RoundRecord:
    """Who took part in a round.

    Attributes:
      number: updates applied before.
      members: whose contributions count.
      dropped: who else was invited, and why nothing of it counts: "lost", "late",
        "not finite", or "gave up": it ended its part in a secure sum.
      void: why the round was given up, and begun again; empty: it was not.
    """

    number: int
    members: tuple[str, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)
    void: str = ""


@final
class Rounds:
    """Invites replicas, and deals to them; part of the ``Arbiter``.

    Args:
      rule: how many.
      replicas: all of them, in an order that does not depend on the run.
      data: the ledger of what is dealt.
      number: of the first round.

    Example:
      >>> from jgraph.coordination.data.slots import Part, SlotPlan
      >>> data = SyncData(SlotPlan([Part("rounds", 9)], 1, seed=0), ["a", "b"])
      >>> rounds = Rounds(RoundRule(0.5, least=1), ["a", "b"], data, number=0)
      >>> rounds.ask("a"), rounds.ask("b"), [who for who, _ in rounds.deals()]
      (None, None, ['a'])
      >>> rounds.over(["a"])
      RoundRecord(number=0, members=('a',), dropped={}, void='')
    """

    def __init__(
        self, rule: RoundRule, replicas: Iterable[str], data: SyncData, number: int
    ) -> None:
        self._rule = rule
        self._alive = dict.fromkeys(replicas)
        self._all = len(self._alive)
        self._data = data
        self._number = number
        self._candidates: list[str] = []
        self._invited: dict[str, None] = {}
        self._holders: set[str] = set()
        self._drops: dict[str, str] = {}
        self._done: dict[str, int] = {}  # of each, batches, as it asked last
        self._contributed: set[str] = set()
        self._hurries = False
        self.asking: dict[str, None] = {}
        """Whose questions are open."""
        self.begin(number)

    @property
    def needed(self) -> int:
        """How many contributions the round takes."""
        least = self._rule.least
        return least if self._hurries else max(least, len(self._invited))

    @property
    def invited(self) -> Collection[str]:
        """Who is invited, and neither lost nor late."""
        return self._invited.keys()

    def begin(self, number: int) -> None:
        """The round of this number begins."""
        self._number = number
        self._hurries = False
        self._invited, self._drops, self._holders = {}, {}, set()
        self._contributed = set()
        names = list(self._alive)
        order = epoch_order(len(names), self._rule.seed, number)
        self._candidates = [names[place] for place in order.tolist()]
        self._invite(self._rule.drawn(len(names)))

    def ask(self, replica: str, done: int = 0) -> None:
        """A replica that holds nothing would take part.

        Args:
          replica: who.
          done: batches that it has done so far.
        """
        if replica not in self._invited:
            self._data.release(replica)  # whatever is known here of an earlier round
        elif replica in self._holders and done > self._done.get(replica, done):
            self._contributed.add(replica)  # of which the ps tell in a moment
        self._done[replica] = done
        self.asking[replica] = None

    def has_contributed(self, replica: str) -> bool:
        """Whether a replica has asked since it contributed to this round."""
        return replica in self._contributed

    def forget(self, replica: str) -> None:
        """A replica asks no more."""
        self.asking.pop(replica, None)

    def gather(self, least: int) -> bool:
        """Invites who may be; returns whether so many are, at least."""
        count = self._rule.drawn(len(self._alive)) - len(self._drops)
        self._invite(max(count, least))
        return len(self._invited) >= least

    def deals(self, there: Collection[str] = (), *, grows: bool = True) -> list[Dealt]:
        """Returns whose questions are answered now, and how.

        Args:
          there: whose contributions are.
          grows: others are invited for those that are lost.
        """
        if grows:
            self._invite(self._rule.least)
        busy = self._contributed.union(there)
        ready = [n for n in self._invited if n in self.asking and n not in busy]
        found = []
        for name in ready:
            del self.asking[name]
            # An answer may have been lost: then it is the same again.
            leases = self._data.held(name) if name in self._holders else ()
            self._holders.add(name)
            found.append((name, leases or self._data.deal(name, 1, together=False)))
        return found

    def lose(self, replica: str) -> None:
        """A replica is gone."""
        self._alive.pop(replica, None)
        self.forget(replica)
        self._drop(replica, "lost")

    def leave_out(self, replica: str) -> Sequence[str]:
        """What a replica contributed is not finite.

        Returns:
          All of whom that is so, if too few are left, those that are lost among them.
        """
        self._drop(replica, NOT_FINITE)
        bad = [name for name, why in self._drops.items() if why == NOT_FINITE]
        return bad if self._all - len(bad) < self._rule.least else ()

    def give_up(self, replica: str) -> None:
        """A replica ends its part in the round."""
        self._drop(replica, "gave up")

    def void(self, reason: str) -> RoundRecord:
        """The round is given up, and begins again; returns what became of it."""
        record = RoundRecord(self._number, (), dict(self._drops), reason)
        self._hurries = False
        self._invited, self._drops, self._holders = {}, {}, set()
        self._contributed = set()
        return record

    def hurry(self) -> None:
        """The time of the round is up: the least are enough from now on."""
        self._hurries = True

    def over(self, members: Iterable[str]) -> RoundRecord:
        """The contributions of these count; returns who took part."""
        counted = tuple(members)
        for name in [n for n in self._invited if n not in counted]:
            self._drop(name, "late")
        return RoundRecord(self._number, counted, dict(self._drops))

    def _drop(self, replica: str, why: str) -> None:
        if replica in self._invited:
            del self._invited[replica]
            self._drops[replica] = why

    def _invite(self, wanted: int) -> None:
        for name in self._candidates:
            if len(self._invited) >= wanted:
                return
            is_new = name not in self._invited and name not in self._drops
            if is_new and name in self._alive and self._data.is_idle(name):
                self._invited[name] = None
