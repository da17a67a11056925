"""Counters of the calls that a task answers: by method, with errors and durations."""

from collections.abc import AsyncIterator
from typing import final

from jgraph.clock import Clock
from jgraph.coordination.watch.histogram import Histogram
from jgraph.errors import JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Frame


@final
class CallCounts:
    """Counts calls of methods that there are, once each is over.

    Args:
      clock: tells how long they took; one with many replies, to the last of them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: dict[str, Histogram] = {}
        self._errors: dict[str, int] = {}

    async def counted(
        self, method: str, replies: AsyncIterator[Frame]
    ) -> AsyncIterator[Frame]:
        """Passes the replies to a call on, and counts it."""
        began = self._clock.now()
        try:
            async for reply in replies:
                yield reply
        except JGError:
            self._errors[method] = self._errors.get(method, 0) + 1
            raise
        finally:
            close = getattr(replies, "aclose", None)
            if close is not None:  # whoever asked does not want the rest
                await close()
            times = self._times.setdefault(method, Histogram())
            times.add(self._clock.now() - began)

    def rows(self) -> list[pb.MethodCalls]:
        """Returns the sums of this moment."""
        return [
            pb.MethodCalls(
                method=method,
                errors=self._errors.get(method, 0),
                seconds=times.seconds,
                buckets=times.buckets,
            )
            for method, times in sorted(self._times.items())
        ]
