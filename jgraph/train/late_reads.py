"""Late read errors of a damaged checkpoint, silenced after the first error.

Orbax closes its event loop when one read fails, and TensorStore then tells that loop of
the others. Nobody waits for these, and the one that failed is the error; but Python
would print a traceback for each.
"""

import sys
from collections.abc import Callable
from typing import Any, Final

_CLOSED: Final = "Event loop is closed"
_TELLS: Final = "call_soon_threadsafe"


def expect_late_reads() -> None:
    """Lets what ends too late pass in silence from now on, in this process."""
    if not getattr(sys.unraisablehook, "is_of_late_reads", False):
        sys.unraisablehook = _hook(sys.unraisablehook)


def _hook(others: Callable[[Any], object]) -> Callable[[Any], None]:
    def hook(unraisable: Any) -> None:
        if not _is_late(unraisable):
            others(unraisable)

    hook.is_of_late_reads = True  # type: ignore[attr-defined]
    return hook


def _is_late(unraisable: Any) -> bool:
    """Whether native code told a closed event loop of something."""
    trace = unraisable.exc_traceback
    return (
        isinstance(unraisable.exc_value, RuntimeError)
        and str(unraisable.exc_value) == _CLOSED
        and unraisable.object is None
        and (trace is None or trace.tb_frame.f_code.co_name == _TELLS)
    )
