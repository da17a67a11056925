"""Registry of the servers in this process: runs a one-task step without an RPC."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jgraph.rpc.transport import Address
from jgraph.runtime.at_once import SHORT_S


class ServedTask(Protocol):
    """What this module needs of a task's service."""

    @property
    def draining(self) -> bool:
        """Whether the task ends, and takes no new steps."""

    def run_at_once(
        self, handle: str, arrays: Sequence[np.ndarray[Any, Any]], limit_s: float
    ) -> list[np.ndarray[Any, Any]] | None:
        """Runs a step in this thread, or returns None where it cannot."""


_services: dict[Address, ServedTask] = {}


def add_service(address: Address, service: ServedTask) -> None:
    """Notes that a task of this process listens at an address."""
    _services[address] = service


def remove_service(address: Address) -> None:
    """Notes that it does no more."""
    _services.pop(address, None)


def run_in_process(
    address: Address, handle: str, arrays: Sequence[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]] | None:
    """Runs a step in this thread if the task at ``address`` is here and all it needs.

    Args:
      address: where the driver of the program listens.
      handle: the program.
      arrays: its feeds, in order.

    Returns:
      The fetches; None, and nothing was done, where the step must be called for.

    Raises:
      JGError: as the call would.
    """
    service = _services.get(address)
    if service is None or service.draining:
        return None
    return service.run_at_once(handle, arrays, SHORT_S)
