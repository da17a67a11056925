"""Secure sums: members mask their values, and who sums sees only the sum.

The decisions are those of two pure machines; here are secrets, masks and shares.
A member's values travel as ``values + own mask + masks of pairs``, all modulo 2^32. The
mask of a pair is added by one of both and taken away by the other, so it is gone in the
sum; the masks of those who did not contribute, and the own masks of those who did, are
made anew from secrets that enough neighbours have shares of.

Source: Bonawitz et al., 2017; Bell et al., 2020.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, Final, final

import numpy as np

from jgraph.coordination.secure.member_round import (
    Contribute,
    KeysCame,
    MemberRound,
    Reveal,
    RoundBegan,
    SharesAsked,
    SharesCame,
    ShareSecrets,
)
from jgraph.coordination.secure.shamir import (
    PRIME,
    SHARE_BYTES,
    recovered,
    shares,
)
from jgraph.errors import SecureSumError
from jgraph.rpc.security.masks import (
    KeyPair,
    add_words,
    derived,
    digest,
    seal,
    unseal,
)

_TRIES: Final = 64  # sets of shares, where some are false


@final
@dataclass(frozen=True, slots=True)
class MemberKeys:
    """What a member says in public.

    Attributes:
      sealing: key of X25519 for shares.
      masking: key of X25519 for masks of pairs.
      seed: digest of the seed of its own mask.
    """

    sealing: bytes
    masking: bytes
    seed: bytes


@final
@dataclass(frozen=True, slots=True)
class Told:
    """Shares that a member tells, by whose secrets they are of."""

    seeds: Mapping[str, bytes]
    keys: Mapping[str, bytes]


@final
class SumMember:
    """A member of secure sums: has its secrets, one round after the other.

    Args:
      name: of the member.
      threshold: shares that make a secret.
      entropy: draws random bytes; the operating system, but in tests.

    Raises:
      SecureSumError: each method: what it is asked is refused.
    """

    def __init__(
        self,
        name: str,
        *,
        threshold: int,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.name = name
        self._threshold = threshold
        self._entropy = entropy
        self._rules = MemberRound(name, threshold=threshold)
        self._round = 0
        self._seed = b""
        self._private = b""
        self._sealing: KeyPair | None = None
        self._masking: KeyPair | None = None
        self._keys: Mapping[str, MemberKeys] = {}
        self._shares: dict[str, tuple[bytes, bytes]] = {}

    def begin(self, number: int) -> MemberKeys:
        """Begins a round with new secrets; returns what is public of them."""
        self._rules.handle(RoundBegan(number))
        self._round = number
        self._seed, self._private = self._entropy(32), self._entropy(32)
        self._sealing = KeyPair(self._entropy(32))
        self._masking = KeyPair(self._private)
        self._keys, self._shares = {}, {}
        seed = digest(self._seed)
        return MemberKeys(self._sealing.public, self._masking.public, seed)

    def share(self, number: int, keys: Mapping[str, MemberKeys]) -> dict[str, bytes]:
        """Returns for each neighbour its sealed shares of both secrets.

        Args:
          number: of the round.
          keys: of the neighbours.
        """
        (answer,) = self._rules.handle(KeysCame(number, tuple(keys)))
        assert isinstance(answer, ShareSecrets)
        self._keys = keys
        count = len(answer.neighbours)
        parts = zip(
            self._parts(self._seed, count),
            self._parts(self._private, count),
            strict=True,
        )
        return {
            peer: seal(self._sealing_key(peer, self.name, peer), seed + key)
            for peer, (seed, key) in zip(answer.neighbours, parts, strict=True)
        }

    def mask(self, number: int, sealed: Mapping[str, bytes], values: Any) -> Any:
        """Returns values under masks, uint32.

        Args:
          number: of the round.
          sealed: shares that neighbours have sent.
          values: uint32 array.
        """
        (answer,) = self._rules.handle(SharesCame(number, tuple(sealed)))
        assert isinstance(answer, Contribute)
        for peer in answer.neighbours:
            plain = unseal(self._sealing_key(peer, peer, self.name), sealed[peer])
            if plain is None or len(plain) != 2 * SHARE_BYTES:
                raise self._bad(f"the shares of {peer} are not those that it has sent")
            self._shares[peer] = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
        masked = np.array(values, np.uint32).reshape(-1)
        add_words(masked, derived(self._seed, "own", number))
        assert self._masking is not None  # since the round began
        for peer in answer.neighbours:
            key = self._agreed(self._masking, peer, self._keys[peer].masking)
            add_pair(masked, key, number, self.name, peer, takes_away=False)
        return masked.reshape(np.shape(values))

    def reveal(
        self, number: int, inside: Iterable[str], outside: Iterable[str]
    ) -> Told:
        """Returns shares of neighbours: one kind for each.

        Args:
          number: of the round.
          inside: whose values are in the sum.
          outside: whose are not.
        """
        asked = SharesAsked(number, tuple(inside), tuple(outside))
        (answer,) = self._rules.handle(asked)
        assert isinstance(answer, Reveal)
        known, self._shares = self._shares, {}  # told once, and then forgotten
        self._seed = self._private = b""
        return Told(
            {peer: known[peer][0] for peer in answer.seeds_of},
            {peer: known[peer][1] for peer in answer.keys_of},
        )

    def _parts(self, secret: bytes, count: int) -> list[bytes]:
        coefficients = [
            int.from_bytes(self._entropy(48), "big") % PRIME
            for _ in range(self._threshold - 1)
        ]
        return shares(secret, coefficients, count)

    def _sealing_key(self, peer: str, sender: str, receiver: str) -> bytes:
        assert self._sealing is not None  # since the round began
        secret = self._agreed(self._sealing, peer, self._keys[peer].sealing)
        return derived(secret, "shares", self._round, sender, receiver)

    def _agreed(self, pair: KeyPair, peer: str, public: bytes) -> bytes:
        try:
            return pair.agreed(public)
        except ValueError as error:
            raise self._bad(f"the key of {peer} is none") from error

    def _bad(self, why: str) -> SecureSumError:
        return SecureSumError(
            f"{self.name} ends its part in a secure sum: {why}; who sums, or what lies "
            "between, has changed it",
            member=self.name,
        )


def add_pair(
    masked: Any, agreed: bytes, number: int, name: str, peer: str, *, takes_away: bool
) -> None:
    """Adds the mask of a pair to what one of both contributes, in place.

    Args:
      masked: uint32 array.
      agreed: secret of the pair.
      number: of the round.
      name: whose contribution it is.
      peer: the other.
      takes_away: undoes it.
    """
    first, second = sorted((name, peer))
    key = derived(agreed, "pair", number, first, second)
    add_words(masked, key, takes_away=(name == first) == takes_away)


@final
class MaskedSum:
    """What who sums has of a round: keys, a sum under masks, and shares.

    Args:
      number: of the round.
      threshold: shares that make a secret.
    """

    def __init__(self, number: int, *, threshold: int) -> None:
        self._number = number
        self._threshold = threshold
        self.keys: dict[str, MemberKeys] = {}
        """Of each member, as it has sent them."""
        self._total: Any = None
        self._seeds: dict[str, dict[str, bytes]] = {}
        self._privates: dict[str, dict[str, bytes]] = {}

    def add(self, masked: Any) -> None:
        """Adds what a member contributes.

        Raises:
          SecureSumError: it has another shape than that of others.
        """
        if self._total is None:
            self._total = np.array(masked, np.uint32)
            return
        if np.shape(masked) != self._total.shape:
            raise SecureSumError(
                f"a contribution to a secure sum has the shape {np.shape(masked)}, and "
                f"others have {self._total.shape}; its member has another model"
            )
        np.add(self._total, masked, out=self._total)

    def tell(self, member: str, answer: Told) -> None:
        """Takes the shares that a member tells."""
        for owner, part in answer.seeds.items():
            self._seeds.setdefault(owner, {})[member] = part
        for owner, part in answer.keys.items():
            self._privates.setdefault(owner, {})[member] = part

    def unmasked(
        self,
        inside: Iterable[str],
        outside: Iterable[str],
        neighbours: Callable[[str], tuple[str, ...]],
    ) -> Any:
        """Returns the sum of what those inside have contributed, uint32.

        Args:
          inside: whose contributions were added.
          outside: who have masks with them, and did not contribute.
          neighbours: of a member, in the order of its shares.

        Raises:
          SecureSumError: a secret cannot be put together: shares are false.
        """
        within = frozenset(inside)
        shape = self._total.shape
        total = self._total.reshape(-1).copy()
        for name in sorted(within):
            seed = self._secret(
                name, self._seeds.get(name, {}), neighbours(name), self._is_seed
            )
            own = derived(seed, "own", self._number)
            add_words(total, own, takes_away=True)
        for name in sorted(outside):
            key = self._secret(
                name, self._privates.get(name, {}), neighbours(name), self._is_key
            )
            pair = KeyPair(key)
            for peer in sorted(within & frozenset(neighbours(name))):
                agreed = pair.agreed(self.keys[peer].masking)
                add_pair(total, agreed, self._number, peer, name, takes_away=True)
        return total.reshape(shape)

    def _is_seed(self, name: str, secret: bytes) -> bool:
        return digest(secret) == self.keys[name].seed

    def _is_key(self, name: str, secret: bytes) -> bool:
        return KeyPair(secret).public == self.keys[name].masking

    def _secret(
        self,
        name: str,
        parts: Mapping[str, bytes],
        order: tuple[str, ...],
        is_that: Callable[[str, bytes], bool],
    ) -> bytes:
        """Returns the secret of a member, of which not every share needs to be true."""
        places = {n: parts[peer] for n, peer in enumerate(order, 1) if peer in parts}
        for some in islice(combinations(sorted(places), self._threshold), _TRIES):
            secret = recovered({place: places[place] for place in some})
            if secret is not None and is_that(name, secret):
                return secret
        raise SecureSumError(
            f"the shares of {name} do not make its secret: {len(places)} were told, "
            f"{self._threshold} true ones are needed; a member tells false ones, or "
            "what lies between has changed them",
            member=name,
        )
