"""A secure sum from begin to end, with members that go away at chosen steps."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jgraph.coordination.secure.sum_round import (
    AskShares,
    Came,
    Instruction,
    PassKeys,
    PassShares,
    Step,
    SumRound,
    TimeIsUp,
    Unmask,
    Void,
)
from jgraph.rpc.security.secure_sum import MaskedSum, SumMember, Told


@dataclass
class Outcome:
    """What became of a round.

    Attributes:
      total: the sum; None: there is none.
      inside: whose values are in it.
      reason: why there is none.
      told: shares that members have told, by member.
      seen: masked values, by member.
    """

    total: Any = None
    inside: tuple[str, ...] = ()
    reason: str = ""
    told: dict[str, Told] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)


def summed(
    members: Mapping[str, SumMember],
    values: Mapping[str, Any],
    gone: Mapping[Step, Collection[str]],
    *,
    neighbours: int,
    threshold: int,
    least: int = 2,
    number: int = 1,
    seed: int = 0,
    changed: Callable[[str, str, bytes], bytes] = lambda sender, to, sealed: sealed,
    lied: Callable[[str, Told], Told] = lambda member, told: told,
) -> Outcome:
    """Runs a round; who is gone in a step sends nothing in it, nor later.

    Args:
      members: by name.
      values: of each, uint32.
      gone: who goes, by step.
      neighbours: as for ``SumRound``.
      threshold: likewise.
      least: likewise.
      number: of the round.
      seed: as for ``SumRound``.
      changed: what becomes of sealed shares on their way.
      lied: what a member tells in place of its shares.
    """
    sums = SumRound(
        members, neighbours=neighbours, threshold=threshold, least=least, seed=seed
    )
    masked, outcome = MaskedSum(number, threshold=threshold), Outcome()
    boxes: dict[str, dict[str, bytes]] = {name: {} for name in members}
    lost: set[str] = set()

    def away(step: Step) -> set[str]:
        lost.update(gone.get(step, ()))
        return lost

    def settle(step: Step, names: Collection[str]) -> list[Instruction]:
        told: list[Instruction] = []
        for name in names:
            told += sums.handle(Came(step, name))
        return [*told, *sums.handle(TimeIsUp(step))]

    away("keys")
    for name in set(members) - lost:
        masked.keys[name] = members[name].begin(number)
    told = settle("keys", list(masked.keys))
    away("exchange")
    sharing = [i for i in told if isinstance(i, PassKeys) and i.member not in lost]
    for one in sharing:
        keys = {peer: masked.keys[peer] for peer in one.neighbours}
        for peer, sealed in members[one.member].share(number, keys).items():
            boxes[peer][one.member] = changed(one.member, peer, sealed)
    told = _ended(told, outcome) or settle("exchange", [i.member for i in sharing])
    away("masked")
    masking = [i for i in told if isinstance(i, PassShares) and i.member not in lost]
    for got in masking:
        box = {sender: boxes[got.member][sender] for sender in got.senders}
        value = members[got.member].mask(number, box, values[got.member])
        outcome.seen[got.member] = value
        masked.add(value)
    told = _ended(told, outcome) or settle("masked", [i.member for i in masking])
    away("reveal")
    asked = [i for i in told if isinstance(i, AskShares) and i.member not in lost]
    for ask in asked:
        answer = members[ask.member].reveal(number, ask.inside, ask.outside)
        outcome.told[ask.member] = lied(ask.member, answer)
        masked.tell(ask.member, outcome.told[ask.member])
    told = _ended(told, outcome) or settle("reveal", [i.member for i in asked])
    _take_sum(_ended(told, outcome) or told, sums, masked, outcome)
    return outcome


def _take_sum(
    told: list[Instruction], sums: SumRound, masked: MaskedSum, outcome: Outcome
) -> None:
    for one in told:
        if isinstance(one, Unmask):
            outcome.inside = one.inside
            outcome.total = masked.unmasked(one.inside, one.outside, sums.neighbours)


def _ended(told: list[Instruction], outcome: Outcome) -> list[Instruction]:
    """Returns what was told where the round is void, and notes why."""
    for one in told:
        if isinstance(one, Void):
            outcome.reason = one.reason
            return told
    return []
