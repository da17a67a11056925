"""How long to wait before trying again what a busy task refused."""

from typing import Final

FIRST_S: Final = 0.02
LONGEST_S: Final = 2.0


def pause_s(tries: int, luck: float) -> float:
    """Returns seconds: twice as many after each try, and other ones for everybody.

    Who was refused together would else come back together (Brooker, "Exponential
    Backoff and Jitter", AWS Architecture Blog, 2015).

    Args:
      tries: how often it was refused.
      luck: a random number from 0 to 1.

    Example:
      >>> [pause_s(tries, luck=1.0) for tries in (1, 2, 3, 100)]
      [0.02, 0.04, 0.08, 2.0]
      >>> pause_s(3, luck=0.0)
      0.04
    """
    longest = min(FIRST_S * 2.0 ** min(tries - 1, 30), LONGEST_S)
    return longest * (1 + luck) / 2
