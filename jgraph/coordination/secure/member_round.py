"""Secure sum rules of a member: what it answers to who sums, and what it refuses.

Who sums could ask for both secrets of one member, and would know its values. So a
member answers once in a round, tells of each neighbour a share of one secret only, and
nothing at all where too few are in the sum. What it is asked is checked against what
it was told before; an error ends its part in the round.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from jgraph.errors import SecureSumError

Step: TypeAlias = Literal["keys", "exchange", "masked", "reveal", "over"]


@final
@dataclass(frozen=True, slots=True)
class RoundBegan:
    """A round begins that this member is invited to."""

    number: int


@final
@dataclass(frozen=True, slots=True)
class KeysCame:
    """The keys of neighbours are there."""

    number: int
    neighbours: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class SharesCame:
    """The shares that neighbours have sent are there."""

    number: int
    senders: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class SharesAsked:
    """Who sums asks for shares of neighbours in the sum, and of those that are not."""

    number: int
    inside: tuple[str, ...]
    outside: tuple[str, ...]


Event: TypeAlias = RoundBegan | KeysCame | SharesCame | SharesAsked


@final
@dataclass(frozen=True, slots=True)
class MakeKeys:
    """Draw the secrets of a round, and send its public keys."""


@final
@dataclass(frozen=True, slots=True)
class ShareSecrets:
    """Send each neighbour a share of both secrets."""

    neighbours: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Contribute:
    """Send the values under a mask of its own, and one for each of these."""

    neighbours: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Reveal:
    """Tell the shares of seeds of these, and of keys of those."""

    seeds_of: tuple[str, ...]
    keys_of: tuple[str, ...]


Instruction: TypeAlias = MakeKeys | ShareSecrets | Contribute | Reveal


@final
class MemberRound:
    """State machine of a member, over all its rounds.

    Args:
      name: of the member.
      threshold: shares that make a secret: so many neighbours are needed.

    Example:
      >>> member = MemberRound("a", threshold=2)
      >>> member.handle(RoundBegan(1)), member.handle(KeysCame(1, ("b", "c")))
      ([MakeKeys()], [ShareSecrets(neighbours=('b', 'c'))])
    """

    def __init__(self, name: str, *, threshold: int) -> None:
        self._name = name
        self._threshold = threshold
        self._number = 0
        self._neighbours: frozenset[str] = frozenset()
        self.step: Step = "over"
        """What this member does next."""

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do.

        Raises:
          SecureSumError: it is refused, and the part of this member in the round ends.
        """
        try:
            return [self._answer(event)]
        except SecureSumError:
            self.step = "over"
            raise

    def _answer(self, event: Event) -> Instruction:
        match event:
            case RoundBegan(number):
                return self._begin(number)
            case KeysCame(number, neighbours):
                self._check(number, "keys")
                self._take(neighbours, "keys came of", known=None)
                self._check_half(neighbours)
                self.step = "exchange"
                return ShareSecrets(tuple(sorted(neighbours)))
            case SharesCame(number, senders):
                self._check(number, "exchange")
                self._take(senders, "shares came of", known=self._neighbours)
                self.step = "masked"
                return Contribute(tuple(sorted(senders)))
            case SharesAsked(number, inside, outside):
                self._check(number, "masked")
                self._check_asked(inside, outside)
                self.step = "over"
                return Reveal(tuple(sorted(inside)), tuple(sorted(outside)))

    def _begin(self, number: int) -> MakeKeys:
        if number <= self._number:
            raise self._refused(
                f"round {number} has been: round {self._number} was the last one"
            )
        self._number, self.step = number, "keys"
        self._neighbours = frozenset()
        return MakeKeys()

    def _check(self, number: int, step: Step) -> None:
        if number != self._number:
            raise self._refused(f"round {number} is another one than {self._number}")
        if self.step != step:
            raise self._refused(
                f"it came in step '{self.step}' of the round, and not in '{step}'"
            )

    def _take(
        self, names: tuple[str, ...], what: str, known: frozenset[str] | None
    ) -> None:
        unique = frozenset(names)
        strange = unique - known if known is not None else unique & {self._name}
        if len(unique) != len(names) or strange:
            raise self._refused(f"{what} {', '.join(names)}, who are no neighbours")
        if len(unique) < self._threshold:
            raise self._refused(
                f"{what} {len(unique)} neighbours, and {self._threshold} are needed"
            )
        self._neighbours = unique

    def _check_half(self, neighbours: tuple[str, ...]) -> None:
        if 2 * self._threshold <= len(neighbours):
            raise self._refused(
                f"keys came of {len(neighbours)} neighbours: of a secret that "
                f"{self._threshold} shares make each half of them could tell one"
            )

    def _check_asked(self, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
        if both := frozenset(inside) & frozenset(outside):
            raise self._refused(
                f"shares of both secrets of {', '.join(sorted(both))} are asked for, "
                "by which its values would be known"
            )
        asked = [*inside, *outside]
        if len(set(asked)) != len(asked) or frozenset(asked) != self._neighbours:
            raise self._refused(
                f"shares of {', '.join(asked)} are asked for, and the neighbours are "
                f"{', '.join(sorted(self._neighbours))}"
            )
        if len(inside) < self._threshold:
            raise self._refused(
                f"{len(inside)} neighbours are in the sum, and {self._threshold} are "
                "needed"
            )

    def _refused(self, why: str) -> SecureSumError:
        return SecureSumError(
            f"{self._name} refuses its part in a secure sum: {why}; who sums is wrong, "
            "or not to be trusted",
            member=self._name,
        )
