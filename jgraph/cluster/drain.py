"""Client side of a drain: an open call that holds a task until it is told to end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Final, final

from jgraph.errors import JGError, TaskLeavingError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame

HOLD_RETRY_S: Final = 1.0
"""Until a task is held again: that its link is back shows only by asking it."""


async def holding(
    call: Callable[[], AsyncIterator[Frame]],
) -> AsyncGenerator[str, None]:
    """Holds a task until it is told to end, also after a link that was broken for long.

    Yields what became of it: "held", "lost" before it is held again, "told" at last.

    Args:
      call: makes the call of ``DrainHold``.
    """
    while True:
        replies, said = call(), ""
        with suppress(JGError):  # it is lost, which others tell, or the link is
            async for _ in replies:
                said = "told" if said else "held"
                yield said
        if said == "told":
            return
        await asyncio.sleep(HOLD_RETRY_S)
        yield "lost"


def told_to_end(*tasks: TaskName) -> TaskLeavingError:
    """Returns the error of a run that cannot do without these tasks."""
    who = f"{', '.join(tasks)} {'was' if len(tasks) == 1 else 'were'}"
    return TaskLeavingError(f"{who} told to end", task=tasks[0], tasks=list(tasks))


SHARE: Final = 2 / 3
"""Of the grace; the rest is for what runs on the task."""


@final
class DrainHolders:
    """Of one task: who would be told of its end."""

    def __init__(self) -> None:
        self._said = asyncio.Event()
        self._count = 0
        self._free = asyncio.Event()
        self._free.set()

    async def hold(self, request: Frame) -> AsyncIterator[Frame]:
        """Answers at once, and when the task is told to end.

        Holds it until the caller hangs up.
        """
        self._count += 1
        self._free.clear()
        try:
            yield frame(empty=pb.Empty())
            await self._said.wait()
            yield frame(empty=pb.Empty())
            await asyncio.Event().wait()
        finally:
            self._count -= 1
            if not self._count:
                self._free.set()

    async def announce(self, limit_s: float) -> None:
        """Tells all of the end, and waits until they have let go, or ``limit_s``."""
        self._said.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._free.wait(), limit_s)
