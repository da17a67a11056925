"""Master lease of the arbiter: pauses synchronous training if the master is silent."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias, final

from jgraph.clock import Clock
from jgraph.coordination.liveness.master_lease import (
    Answered,
    Ask,
    AskAgain,
    Event,
    GiveUp,
    GoOn,
    LeaseTracker,
    Pause,
    TimePassed,
    Unanswered,
)
from jgraph.coordination.sync.aggregation import MasterHeard, MasterSilent
from jgraph.errors import JGError

_LOG = logging.getLogger("jgraph.loops")

AskMaster: TypeAlias = Callable[[], Awaitable[object]]


@final
class MasterLease:
    """Asks a master, time and again, whether it is there.

    Workers of asynchronous training hear of it with their data; see ``DataFeed``.

    Args:
      ask: asks it.
      supervision: decides.
      clock: its time.
      tell: told when it falls silent, and when it is heard of again.
      give_up: called with the last error when it was silent for too long.

    Attributes:
      has_ended: it is silent now.
    """

    def __init__(
        self,
        ask: AskMaster,
        supervision: LeaseTracker,
        clock: Clock,
        tell: Callable[[MasterSilent | MasterHeard], None],
        give_up: Callable[[JGError], None],
    ) -> None:
        self._ask = ask
        self._supervision = supervision
        self._clock = clock
        self._tell = tell
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self.has_ended = False

    def begin(self) -> None:
        """Begins to ask."""
        self._look_later()

    def close(self) -> None:
        """Asks no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._supervision.look_every_s, self._look)

    def _look(self) -> None:
        self._look_later()
        self._obey(TimePassed())

    async def _hear(self) -> None:
        while True:
            try:
                await self._ask()
            except JGError as error:
                again_s = self._obey(Unanswered(error))
                if again_s is None:
                    self.close()
                    return
                await asyncio.sleep(again_s)
            else:
                self._asking = None
                self._obey(Answered())
                return

    def _obey(self, event: Event) -> float | None:
        """Does what is to be done; returns after how long to ask again, if at all."""
        again_s: float | None = None
        for instruction in self._supervision.handle(event, self._clock.now()):
            match instruction:
                case Pause():
                    _LOG.info("the master does not answer; the loop pauses")
                    self.has_ended = True
                    self._tell(MasterSilent())
                case GoOn():
                    _LOG.info("the master answers again; the loop goes on")
                    self.has_ended = False
                    self._tell(MasterHeard())
                case Ask() if self._asking is None:
                    self._asking = asyncio.ensure_future(self._hear())
                case AskAgain(after_s):
                    again_s = after_s
                case GiveUp(error):
                    self._give_up(error)
        return again_s
