"""Callbacks that stop a run by what it has done, however fast the machine is.

One with a number of steps may be over before what a test does to it is known.
"""

from collections.abc import Callable
from typing import Any

from jgraph.clock import SystemClock

_WITHIN_S = 90.0
"""Then a run is not waited for; less than what a test may take."""


def once(is_so: Callable[[Any], object], steps: int = 100) -> Any:
    """Returns a callback that stops a run so many steps after it sees something.

    One that does not come ends the run with an error.

    Args:
      is_so: given the run, whether it is there; asked at each report.
      steps: that the run does after that.
    """
    seen_at: list[int] = []
    clock = SystemClock()
    began = clock.now()

    def callback(run: Any, report: Any) -> None:
        if not is_so(run):
            assert clock.now() - began < _WITHIN_S, f"{is_so} does not come"
            return
        seen_at.append(report.step)
        # The first may still be of before the run went back.
        if report.step >= min(seen_at) + steps:
            run.stop()

    return callback


def both_took_part(run: Any, steps: int) -> bool:
    """Whether two workers have done so many steps, each of them some.

    One may do them all while the other still compiles.
    """
    return run.steps >= steps and set(run.metrics("loss")["replica"]) == {0, 1}


def once_both_took_part(steps: int) -> Any:
    """Returns a callback that stops a run of two workers once both took part."""
    return once(lambda run: both_took_part(run, steps), steps=0)
