"""Deadlines of calls."""

CONTROL_S = 5.0
"""For calls that only look or set a flag."""

SILENCE_S = 20.0
"""Longer than a link is silent unnoticed: whoever waits so long hears of that."""

DRAIN_S = 30.0
"""What runs on a task has so long when that is told to end."""

CLIENT_S = 10.0
"""The client of a run may be gone for so long; then the run ends."""

COMPILE_S = 300.0
"""For registering a program: XLA may compile for minutes."""

REPLAY_S = 3600.0
"""For reading a change log: it may have as many updates as it has room for."""

_SLOWEST_BYTES_PER_S = 20e6
_MOST_S = 1e8  # gRPC cannot count 292 years, and then takes no time at all


def bulk_timeout_s(nbytes: int) -> float:
    """Returns the time limit of a call that moves ``nbytes``."""
    return 30.0 + nbytes / _SLOWEST_BYTES_PER_S


def bounded_s(limit_s: float) -> float:
    """Returns a time limit that everybody can count: of no bound or a NaN, the most."""
    return limit_s if 0.0 < limit_s < _MOST_S else _MOST_S


def loop_timeout_s(steps: int, step_timeout_s: float) -> float:
    """Returns the time limit of a call that runs so many steps."""
    return bounded_s(60.0 + steps * step_timeout_s)
