"""Exponential backoff with jitter, for retries of calls that a busy task refused."""

from typing import Final

FIRST_S: Final = 0.02
LONGEST_S: Final = 2.0


def backoff_s(tries: int, jitter: float) -> float:
    """Returns seconds: twice as many after each try, and other ones for everybody.

    Who was refused together would else come back together (Brooker, "Exponential
    Backoff and Jitter", AWS Architecture Blog, 2015).

    Args:
      tries: how often it was refused.
      jitter: a random number from 0 to 1.

    Example:
      >>> [backoff_s(tries, jitter=1.0) for tries in (1, 2, 3, 100)]
      [0.02, 0.04, 0.08, 2.0]
      >>> backoff_s(3, jitter=0.0)
      0.04
    """
    longest = min(FIRST_S * 2.0 ** min(tries - 1, 30), LONGEST_S)
    return longest * (1 + jitter) / 2
