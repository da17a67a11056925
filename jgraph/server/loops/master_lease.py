"""Master lease of a loop: one question to the master at a time, until it answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar, final

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
T = TypeVar("T")


@final
class MasterLease:
    """Asks a master, and learns from its answers whether it is there.

    Args:
      ask: asks it something, if only to hear whether it is there.
      supervision: decides when.
      clock: its time.
      fail: called with an error that it answers, and with the last one when it was
        silent for too long.
      tell: told when it falls silent, and when it is heard of again.
      is_silence: whether an error means that no answer came.

    Attributes:
      asks: a question is under way.
      has_ended: it is silent now.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        supervision: LeaseTracker,
        clock: Clock,
        fail: Callable[[Exception], None],
        tell: Callable[[MasterSilent | MasterHeard], None] = lambda event: None,
        is_silence: Callable[[JGError], bool] = lambda error: True,
    ) -> None:
        self._ask = ask
        self._supervision = supervision
        self._clock = clock
        self._fail = fail
        self._tell = tell
        self._is_silence = is_silence
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self.asks = self.has_ended = False

    def begin(self) -> None:
        """Sees to it that the master is asked now and then."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._supervision.look_every_s, self._look)

    def close(self) -> None:
        """Asks no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def ask(
        self, question: Callable[[], Awaitable[T]], then: Callable[[T], None]
    ) -> None:
        """Asks until there is an answer; no other question is under way."""
        self.asks = True
        self._asking = asyncio.ensure_future(self._ask_on(question, then))

    async def _ask_on(
        self, question: Callable[[], Awaitable[T]], then: Callable[[T], None]
    ) -> None:
        while True:
            try:
                answer = await question()
            except Exception as error:  # noqa: BLE001  # becomes the loop's outcome
                again_s: float | None = None
                if isinstance(error, JGError) and self._is_silence(error):
                    again_s = self._obey(Unanswered(error))
                if again_s is None:
                    self.asks = False
                    self._fail(error)
                    return
                await asyncio.sleep(again_s)
            else:
                self.asks = False
                self._obey(Answered())
                then(answer)
                return

    def _look(self) -> None:
        self.begin()
        self._obey(TimePassed())

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
                case Ask() if not self.asks:
                    self._ask()
                case AskAgain(after_s):
                    again_s = after_s
                case GiveUp():
                    self.close()
        return again_s
