"""How long whoever dialled tries to go on with a connection that broke."""

import asyncio
from collections.abc import Callable
from typing import Final

from jgraph.rpc.dial import is_refused
from jgraph.rpc.transport import Address

RESUME_S: Final = 3.0
"""How long a task whose connection broke is tried to be reached again."""
RESUME_PAUSE_S: Final = 0.05
"""Between two tries: that an address answers again shows only by asking."""


async def is_worth_a_try(
    address: Address, until: float, now: Callable[[], float]
) -> bool:
    """Waits a little and says True; False if it is too late, or nobody listens."""
    if now() >= until or await is_refused(address):
        return False
    await asyncio.sleep(RESUME_PAUSE_S)
    return True
