"""SecureSum: options of federated rounds of which the ps see sums alone."""

import math
from dataclasses import dataclass
from typing import final

from jgraph.coordination.sync.secure_rounds import SumRule, sum_rule
from jgraph.counts import as_ints, is_count, is_duration
from jgraph.errors import ConfigError
from jgraph.view import markup

_LEAST_BITS, _MOST_BITS = 8, 22  # of a float32's 24


@final
@dataclass(frozen=True, slots=True)
class SecureSum:
    """Sum what clients contribute so that the parameter servers see the sum alone.

    Before a round its clients agree on masks by messages that the ps pass on and cannot
    read. What a client contributes, how far it came, its loss and its metrics, travels
    under its masks, as whole numbers; in the sum of all the masks are gone. The masks
    of who goes away in the round are taken out with the help of the others. With too
    few left there is no sum: the round is void, nothing of it is known, and it begins
    again (``run.rounds()`` names it).

    A value is off by ``clip / 2**bits`` at most. One that is not finite makes its
    client's contribution count for nothing.

    Args:
      threshold: neighbours of a client that have to be left at the end of a round for
        its masks to be taken out; a round is of one more client at least. More than
        half of the neighbours. If unset, two thirds.
      neighbours: clients with which one has masks, an even number: twice the logarithm
        of the clients of a round is enough. All others where there are no more.
      clip: what any parameter moves in a round is cut to this size.
      bits: of a value.
      max_weight: with ``weight="examples"`` a client counts by its examples, and so
        many at most.

    Raises:
      ConfigError: an option outside what is possible.

    Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving
    Machine Learning", 2017; Bell et al., "Secure Single-Server Aggregation with
    (Poly)Logarithmic Overhead", 2020.

    Example:
      >>> SecureSum(threshold=7).neighbours
      10
    """

    threshold: int | None = None
    neighbours: int = 10
    clip: float = 8.0
    bits: int = 20
    max_weight: int = 256

    def __post_init__(self) -> None:
        for name, least, what in [
            ("neighbours", 2, "clients with which one has masks, an even number"),
            ("bits", _LEAST_BITS, f"bits of a value, {_LEAST_BITS} to {_MOST_BITS}"),
            ("max_weight", 1, "most that a client counts"),
            ("threshold", 1, "neighbours that a client needs at the end of a round"),
        ]:
            value = getattr(self, name)
            if value is not None and not is_count(value, least):
                raise ConfigError(f"{name} is {value!r:.60}; give the {what}")
        as_ints(self, "neighbours", "bits", "max_weight")
        if self.threshold is not None:
            as_ints(self, "threshold")
        if self.neighbours % 2:
            raise ConfigError(
                f"neighbours is {self.neighbours}; each client has as many on both "
                "sides: give an even number"
            )
        if self.bits > _MOST_BITS:
            raise ConfigError(
                f"bits is {self.bits}; a float32 has no more than {_MOST_BITS} to give"
            )
        if not is_duration(self.clip):
            raise ConfigError(
                f"clip is {self.clip!r:.60}; give the most that a parameter moves in a "
                "round, more than 0"
            )

    def rule(self, members: int, *, weighs: bool) -> SumRule:
        """Returns how rounds are summed.

        Args:
          members: of a round, at most.
          weighs: clients count by their examples.

        Raises:
          ConfigError: that is not secure, or has no room.
        """
        check_room(self.bits, members, self.max_weight if weighs else 1)
        return sum_rule(self.threshold, self.neighbours, members)

    def _repr_html_(self) -> str:
        return markup.data(self)


def check_room(bits: int, members: int, most_weight: int) -> None:
    """Refuses sums that could pass 2^32.

    Args:
      bits: of a value.
      members: how many may contribute.
      most_weight: of one.

    Raises:
      ConfigError: says what there is room for.

    Example:
      >>> check_room(20, 100, 32)
    """
    needs = bits + math.ceil(math.log2(members * most_weight))
    if needs > 32:
        raise ConfigError(
            f"a secure sum of {bits} bits by {members} members of a weight up to "
            f"{most_weight} needs {needs} bits, and there are 32; write bits="
            f"{max(1, bits - (needs - 32))}, or a smaller weight"
        )
