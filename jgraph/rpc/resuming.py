"""Reconnection: how often, and for how long, a broken connection is dialed again."""

import asyncio
from collections.abc import Callable
from typing import Final

from jgraph.rpc.dial import is_refused
from jgraph.rpc.transport import Address

RESUME_S: Final = 3.0
"""How long a task whose connection broke is tried to be reached again."""
RESUME_POLL_S: Final = 0.05
"""Between two tries: that an address answers again shows only by asking."""


async def may_redial(address: Address, until: float, now: Callable[[], float]) -> bool:
    """Waits a little and says True; False if it is too late, or nobody listens."""
    if now() >= until or await is_refused(address):
        return False
    await asyncio.sleep(RESUME_POLL_S)
    return True
