"""Share of a parameter server's time that the lookups of served models may take.

A leaky bucket of seconds: a lookup adds for how long it kept its server busy, and time
that passes takes away a part of it. Over any length of time lookups take their share of
it and a burst at most.

Source: the generic cell rate algorithm, ITU-T I.371.
"""

from typing import final

from jgraph.errors import ConfigError


@final
class LookupShare:
    """Seconds that lookups of one model took of a server, less what they may take.

    Args:
      most: of the time, above 0 and at most 1.
      burst_s: seconds of lookups that may come at once.

    Raises:
      ConfigError: that is no share.

    Example:
      >>> share = LookupShare(0.25, burst_s=0.1)
      >>> share.wait_s(now=0.0)
      0.0
      >>> share.took(0.2, now=0.0)
      >>> share.wait_s(now=0.0)  # 0.1 s beyond the burst, at a quarter of the time
      0.4
      >>> share.wait_s(now=0.4)
      0.0
    """

    def __init__(self, most: float, burst_s: float = 0.1) -> None:
        if not 0 < most <= 1:
            raise ConfigError(
                f"max_share={most!r} is the part of the parameter servers' time that "
                "lookups may take; give a number above 0, and 1 at most"
            )
        self._most = most
        self._burst_s = burst_s
        self._spent_s = 0.0
        self._at = 0.0

    def wait_s(self, now: float) -> float:
        """Returns how long the next lookup has to wait."""
        self._pass(now)
        return max(0.0, (self._spent_s - self._burst_s) / self._most)

    def took(self, seconds: float, now: float) -> None:
        """Takes note of a lookup that has ended."""
        self._pass(now)
        self._spent_s += seconds

    def _pass(self, now: float) -> None:
        passed = max(0.0, now - self._at)
        self._spent_s = max(0.0, self._spent_s - passed * self._most)
        self._at = max(self._at, now)
