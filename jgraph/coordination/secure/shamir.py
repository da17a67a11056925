"""Shamir's secret sharing over a prime field, for secrets of 32 bytes.

A secret is the value at 0 of a polynomial of degree ``threshold - 1`` whose other
coefficients are random: so many shares are one polynomial, and fewer tell nothing.

Source: Shamir, "How to Share a Secret", 1979.
"""

from collections.abc import Mapping, Sequence
from typing import Final

PRIME: Final = (1 << 256) + 297
"""The least prime above all numbers of 32 bytes."""

SHARE_BYTES: Final = 33
SECRET_BYTES: Final = 32


def shares(secret: bytes, coefficients: Sequence[int], count: int) -> list[bytes]:
    """Returns the shares of a secret: the values of its polynomial at 1, 2, ….

    Args:
      secret: 32 bytes.
      coefficients: ``threshold - 1`` random numbers below ``PRIME``.
      count: how many shares.

    Example:
      >>> parts = shares(bytes(31) + b"!", [5, 7], 4)
      >>> recovered({2: parts[1], 3: parts[2], 4: parts[3]})[-1:]
      b'!'
    """
    polynomial = [int.from_bytes(secret, "big"), *coefficients]
    values = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * x + coefficient) % PRIME
        values.append(value.to_bytes(SHARE_BYTES, "big"))
    return values


def recovered(parts: Mapping[int, bytes]) -> bytes | None:
    """Returns the secret of shares, by where they are values; None: there is none.

    Args:
      parts: as many as the threshold. With another number the result means nothing, so
        a secret needs something else that tells it is right.
    """
    total = 0
    for x, part in parts.items():
        above = below = 1
        for other in parts:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        value = int.from_bytes(part, "big")
        total = (total + value * above * pow(below, -1, PRIME)) % PRIME
    # Of false shares it may be one of the few numbers that have no 32 bytes.
    return None if total >> 256 else total.to_bytes(SECRET_BYTES, "big")
