"""Secure sum round of who sums: who is in it, and when it is void.

Members send public keys, then shares of two secrets for each neighbour, then values
under masks, and at last the shares by which the masks of the sum go away: of one secret
for who contributed, of the other for who did not. Who is late is out from there on. If
a secret could not be put together any more, the round is void before anybody is asked
for a share: nothing is told of anybody's values.

    keys --> exchange --> masked --> reveal --> over     at any step: void

Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", 2017; Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead", 2020 (SecAgg+), who show that about twice the logarithm of the members are
neighbours enough.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np

Step: TypeAlias = Literal["keys", "exchange", "masked", "reveal", "over"]


@final
@dataclass(frozen=True, slots=True)
class Came:
    """What a member sends in a step is there."""

    step: Step
    member: str


@final
@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member went away, and sends nothing more."""

    member: str


@final
@dataclass(frozen=True, slots=True)
class TimeIsUp:
    """A step has been waited for too long."""

    step: Step


Event: TypeAlias = Came | MemberLost | TimeIsUp


@final
@dataclass(frozen=True, slots=True)
class PassKeys:
    """Give a member the keys of its neighbours."""

    member: str
    neighbours: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class PassShares:
    """Give a member the shares that its neighbours have sent it."""

    member: str
    senders: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class AskShares:
    """Ask a member for the shares of neighbours that are in the sum, and are not."""

    member: str
    inside: tuple[str, ...]
    outside: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Unmask:
    """Take the masks off, of those in the sum and of those who are not."""

    inside: tuple[str, ...]
    outside: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Void:
    """There is no sum; forget all that came."""

    reason: str


Instruction: TypeAlias = PassKeys | PassShares | AskShares | Unmask | Void


@final
class SumRound:
    """State machine of one round, at who sums.

    Args:
      members: who is invited.
      neighbours: of each, an even number.
      threshold: shares that make a secret; more than half of the neighbours.
      least: members that a sum is of, at least.
      seed: decides the neighbours.

    Example:
      >>> sums = SumRound(["a", "b", "c"], neighbours=2, threshold=2, least=2)
      >>> [sums.handle(Came("keys", name)) for name in "abc"][-1][0]
      PassKeys(member='a', neighbours=('b', 'c'))
    """

    def __init__(
        self,
        members: Iterable[str],
        *,
        neighbours: int,
        threshold: int,
        least: int,
        seed: int = 0,
    ) -> None:
        self._waiting = set(members)
        self._count = neighbours
        self._threshold = threshold
        self._least = least
        self._seed = seed
        self._came: set[str] = set()
        self._absent: set[str] = set()
        self._near: Mapping[str, frozenset[str]] = {}
        self._sharing: frozenset[str] = frozenset()
        self._inside: frozenset[str] = frozenset()
        self.step: Step = "keys"
        """What is waited for."""

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do. Of a step that is over nothing counts."""
        match event:
            case Came(step, member) if step == self.step and member in self._waiting:
                self._waiting.discard(member)
                self._came.add(member)
            case MemberLost(member) if member in self._waiting:
                self._waiting.discard(member)
                self._absent.add(member)
            case MemberLost(member):
                self._absent.add(member)
                return []
            case TimeIsUp(step) if step == self.step:
                self._waiting.clear()
            case _:
                return []
        return [] if self._waiting else self._go_on()

    def neighbours(self, member: str) -> tuple[str, ...]:
        """Returns the neighbours of a member, in the order of its shares."""
        return tuple(sorted(self._near.get(member, ())))

    def _go_on(self) -> list[Instruction]:
        came, self._came = frozenset(self._came), set()
        match self.step:
            case "keys":
                return self._pass_keys(came)
            case "exchange":
                return self._pass_shares(came)
            case "masked":
                return self._ask(came)
            case _:
                return self._unmask(came)

    def _wait_for(self, step: Step, members: Iterable[str]) -> None:
        self.step = step
        self._waiting = set(members) - self._absent

    def _pass_keys(self, came: frozenset[str]) -> list[Instruction]:
        if len(came) < max(self._least, self._threshold + 1):
            return self._void(f"{len(came)} members have sent keys")
        self._near = neighbours_of(came, self._count, self._seed)
        self._wait_for("exchange", came)
        instructions: list[Instruction] = [
            PassKeys(name, self.neighbours(name)) for name in sorted(came)
        ]
        return [*instructions, *self._if_nobody()]

    def _pass_shares(self, came: frozenset[str]) -> list[Instruction]:
        # Who has too few neighbours left could not be unmasked if it went away.
        while few := {n for n in came if len(self._near[n] & came) < self._threshold}:
            came -= few
        if len(came) < self._least:
            return self._void(f"{len(came)} members have shared with enough neighbours")
        self._sharing = came
        self._wait_for("masked", came)
        instructions: list[Instruction] = [
            PassShares(name, tuple(sorted(self._near[name] & came)))
            for name in sorted(came)
        ]
        return [*instructions, *self._if_nobody()]

    def _ask(self, came: frozenset[str]) -> list[Instruction]:
        if len(came) < self._least:
            return self._void(f"{len(came)} members have contributed")
        if missing := self._unknown(came):
            return self._void(f"too few neighbours of {missing} are left")
        self._inside = came
        self._wait_for("reveal", came)
        instructions: list[Instruction] = []
        for name in sorted(came):
            near = self._near[name] & self._sharing
            instructions.append(
                AskShares(name, tuple(sorted(near & came)), tuple(sorted(near - came)))
            )
        return [*instructions, *self._if_nobody()]

    def _unmask(self, came: frozenset[str]) -> list[Instruction]:
        if missing := self._unknown(came):
            return self._void(f"too few neighbours of {missing} have told shares")
        self.step = "over"
        outside = self._sharing - self._inside
        return [Unmask(tuple(sorted(self._inside)), tuple(sorted(outside)))]

    def _unknown(self, telling: frozenset[str]) -> str:
        """Returns whose secret so many cannot put together; empty: nobody's."""
        for name in sorted(self._sharing):
            if len(self._near[name] & telling) < self._threshold:
                return name
        return ""

    def _if_nobody(self) -> list[Instruction]:
        """Goes on at once where all who are waited for are gone."""
        return [] if self._waiting else self._go_on()

    def _void(self, what: str) -> list[Instruction]:
        step, self.step = self.step, "over"
        self._waiting.clear()
        return [
            Void(
                f"the round is void: {what}; a sum is of {self._least} members, each "
                f"with {self._threshold} neighbours (step '{step}')"
            )
        ]


def neighbours_of(
    members: Iterable[str], count: int, seed: int
) -> Mapping[str, frozenset[str]]:
    """Returns the neighbours of each member.

    Args:
      members: by name.
      count: neighbours of each, an even number; all others if there are not more.
      seed: decides the order; nobody shall know it before the members are known.

    Example:
      >>> sorted(neighbours_of("abc", 10, 0)["a"])
      ['b', 'c']
      >>> [len(near) for near in neighbours_of("abcdefgh", 4, 0).values()]
      [4, 4, 4, 4, 4, 4, 4, 4]
    """
    names = sorted(members)
    if len(names) - 1 <= count:
        return {name: frozenset(names) - {name} for name in names}
    generator = np.random.Generator(np.random.PCG64(seed))
    order = [names[i] for i in generator.permutation(len(names))]
    sides = [*range(-(count // 2), 0), *range(1, count // 2 + 1)]
    return {
        name: frozenset(order[(place + side) % len(order)] for side in sides)
        for place, name in enumerate(order)
    }
