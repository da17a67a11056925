"""Self-fencing of a server: holds frames until no newer process of its task exists.

The shell of ``coordination.liveness.self_fencing``, before the service of a task.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Final, Protocol, final

from jgraph.clock import Clock
from jgraph.coordination.liveness.self_fencing import (
    LOOK_EVERY_S,
    Ask,
    AskAgain,
    Awake,
    Event,
    FoundNobody,
    FoundOther,
    FoundSelf,
    GoOn,
    Leave,
    SelfFence,
)
from jgraph.errors import DeadlineError, FencedError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import CONNECT_TIMEOUT_S
from jgraph.rpc.transport import Address, Frame
from jgraph.server.task_context import TaskContext

_LOG = logging.getLogger("jgraph.server")
_SETTLED_S: Final = 60.0


class Asker(Protocol):
    """Finds out who is at an address; see ``GrpcTransport``."""

    incarnation: int

    async def who_is_at(self, dst: Address, timeout_s: float) -> pb.Hello:
        """Returns who answers there now."""


class Replaceable(Protocol):
    """What is done with what arrives; see ``TaskService``."""

    replaced: FencedError | None

    def frame_received(self, src: TaskName, received: Frame) -> None:
        """Takes a frame."""

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Learns that a task is lost; of a ``FencedError``, that this process is."""

    def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        """Answers a call."""


@final
class FencedHandler:
    """Passes on what arrives, once this process is sure to have its task's place.

    Args:
      context: of the task.
      service: takes what arrives.
      clock: goes on while the process is stopped.
      asker: of this process.
    """

    def __init__(
        self,
        context: TaskContext,
        service: Replaceable,
        clock: Clock,
        asker: Asker,
    ) -> None:
        self._context = context
        self._task = context.task
        self._service = service
        self._clock = clock
        self._asker = asker
        self._fence = SelfFence(clock.now())
        # Of the event loop: what came before it was known, and who waits for that.
        self._waiting: deque[tuple[TaskName, Callable[[], None]]] = deque()
        self._settled = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        # Of threads that are about to write.
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Begins to look at the clock, time and again."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self.begin)
        self._take(Awake())

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    # ------------------------------------------------------------ what arrives

    def frame_received(self, src: TaskName, received: Frame) -> None:
        """Takes a frame of the path of a step."""
        if self._may():
            self._service.frame_received(src, received)
        else:
            self._hold(src, partial(self._service.frame_received, src, received))

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Learns that a task is lost, or that this process was replaced."""
        if isinstance(error, FencedError):
            self._end(peer, error)
        elif self._may():
            self._service.peer_lost(peer, error)
        else:
            self._hold(peer, partial(self._service.peer_lost, peer, error))

    async def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        """Answers a call.

        Raises:
          FencedError: another process has the place of this one.
        """
        if not self._may():
            await self._until_sure()
        replies = self._service.handle_call(method, request)
        try:
            async for reply in replies:
                if not self._may():  # it was stopped over the answer
                    await self._until_sure()
                yield reply
        finally:
            if isinstance(replies, AsyncGenerator):
                await replies.aclose()

    def check(self) -> None:
        """Returns when this process may write; called by threads that are about to.

        Raises:
          DeadlineError: that is not known for a minute.
          FencedError: another process has the place of this one.
        """
        with self._changed:
            settled = self._changed.wait_for(
                lambda: self._service.replaced or self._is_sure(), _SETTLED_S
            )
        if self._service.replaced is not None:
            raise self._service.replaced
        if not settled:
            raise DeadlineError(
                f"{self._task} was away, and does not know after {_SETTLED_S:g} s "
                "whether another process has its place",
                task=self._task,
            )

    # ------------------------------------------------------------ whether it may

    def _is_sure(self) -> bool:
        return self._fence.is_sure(self._clock.now())

    def _may(self) -> bool:
        """Whether this process may do what was asked of it, as far as is known."""
        if self._fence.is_sure(self._clock.now()):
            return self._service.replaced is None
        self._take(Awake())  # what arrived is the first to notice that it was away
        return self._is_sure() and self._service.replaced is None

    def _hold(self, src: TaskName, act: Callable[[], None]) -> None:
        if self._service.replaced is None:
            self._waiting.append((src, act))

    def _do_what_came(self) -> None:
        while self._waiting and self._may():
            src, act = self._waiting.popleft()
            try:
                act()
            except (
                JGError
            ) as error:  # which would have ended the stream that it came on
                self._service.peer_lost(src, error)

    async def _until_sure(self) -> None:
        while not self._may():
            if self._service.replaced is not None:
                raise self._service.replaced
            await self._settled.wait()

    def _take(self, event: Event) -> None:
        with self._changed:
            instructions = self._fence.handle(event, self._clock.now())
            self._changed.notify_all()
        for instruction in instructions:
            match instruction:
                case Ask():
                    self._settled.clear()
                    if self._asking is not None:
                        self._asking.cancel()
                    self._asking = asyncio.ensure_future(self._ask())
                case AskAgain(after_s):
                    self._asking = asyncio.ensure_future(self._ask(after_s))
                case GoOn():
                    _LOG.info(
                        "%s was stopped, and no other process has its place", self._task
                    )
                    self._settled.set()
                    self._do_what_came()
                case Leave(away_s):
                    why = (
                        f"{self._task} was started again while this process of it was "
                        f"stopped for {away_s:.0f} s; it does nothing more, and ends"
                    )
                    self._end(self._task, FencedError(why, task=self._task))

    def _end(self, who: TaskName, error: FencedError) -> None:
        self._waiting.clear()
        self._service.peer_lost(who, error)
        self._settled.set()
        with self._changed:
            self._changed.notify_all()

    async def _ask(self, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        found = await self._who_is_there()
        self._asking = None
        self._take(found)

    async def _who_is_there(self) -> FoundSelf | FoundOther | FoundNobody:
        if not (address := self._context.address):
            return FoundNobody()
        try:
            theirs = await self._asker.who_is_at(address, CONNECT_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  # or all would wait for ever
            _LOG.info("cannot find out which process is at %s: %s", address, error)
            return FoundNobody()
        if theirs.task != self._task:
            return FoundNobody()
        is_self = theirs.incarnation == self._asker.incarnation
        return FoundSelf() if is_self else FoundOther()
