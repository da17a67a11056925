"""Time limits of calls."""

CONTROL_S = 5.0
"""For calls that only look or set a flag."""

COMPILE_S = 300.0
"""For registering a program: XLA may compile for minutes."""

_SLOWEST_BYTES_PER_S = 20e6


def bulk_timeout_s(nbytes: int) -> float:
    """Returns the time limit of a call that moves ``nbytes``."""
    return 30.0 + nbytes / _SLOWEST_BYTES_PER_S
