"""Waits in tests for what another thread or process brings about."""

from collections.abc import Callable

from jgraph.cluster.polling import Polling


def wait_until(holds: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Waits until something holds; fails after ``timeout_s``."""
    polling = Polling(0.02, timeout_s)
    while not holds():
        assert polling.wait(), f"it did not come about within {timeout_s:g} s"
