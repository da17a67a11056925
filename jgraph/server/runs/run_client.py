"""Client of a run, as the master knows it: a lease, and questions that it answers.

A run may end with the client that began it, which follows its reports, and finds
questions among them: for what only the client has. A run whose client is gone for
longer than its lease ends without, and its master asks nothing any more.
"""

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from jgraph.errors import JGError, TaskLostError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.status import from_status
from jgraph.server.runs.journal import Journal

_TERM_SHIFT = 32
"""Questions of each master have numbers of their own."""

Act: TypeAlias = Callable[[], Awaitable[bool]]


@final
@dataclass(slots=True)
class _Asked:
    answer: asyncio.Future[pb.RunAnswer]
    act: Act | None


@final
@dataclass(slots=True)
class RunClient:
    """The client that a run ends with.

    Args:
      order: what it said of the run.
      record: has the questions.
      ends: called when the client is gone for longer than its lease.
    """

    order: pb.OpenRun
    record: Journal
    ends: Callable[[], None]
    _watching: int = field(init=False, default=0)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)
    _asked: dict[int, _Asked] = field(init=False, default_factory=dict)
    _number: int = field(init=False, default=0)
    _is_gone: bool = field(init=False, default=False)

    @property
    def is_gone(self) -> bool:
        """Whether it has nothing to do with the run any more."""
        return self._is_gone

    @property
    def directory(self) -> str:
        """Where it saves checkpoints; empty: nowhere."""
        return self.order.client.directory

    def begin(self, lease_s: float | None = None) -> None:
        """Waits for the client from now on, for so long; None: for its lease."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._watching:
            limit_s = self.order.client.lease_s if lease_s is None else lease_s
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(limit_s, self._leave)

    def close(self) -> None:
        """Waits no more; nothing is asked."""
        self._is_gone = True
        if self._timer is not None:
            self._timer.cancel()
        for number in list(self._asked):
            self._asked.pop(number).answer.cancel()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the client follows the run."""
        self._watching += 1
        if self._timer is not None:
            self._timer.cancel()
        try:
            yield
        finally:
            self._watching -= 1
            if not self._is_gone:
                self.begin()

    @property
    def is_asked(self) -> bool:
        """Whether a question has no answer yet."""
        return bool(self._asked)

    def waits(self, number: int) -> bool:
        """Whether a question has no answer yet."""
        return number in self._asked

    def ask(
        self,
        kind: str,
        *,
        tasks: Iterable[str] = (),
        position: str = "",
        what: str = "",
        ps: int = 0,
        homes: pb.RunHomes | None = None,
        act: Act | None = None,
    ) -> Coroutine[Any, Any, pb.RunAnswer]:
        """Asks, at once; returns what waits for the answer.

        Args:
          kind: of the question.
          tasks: that it is about.
          position: where in the data the run is, as JSON.
          what: is waited for.
          ps: on how many the variables lie.
          homes: of parts of the variables.
          act: done when the answer comes, which returns what that says.

        Raises:
          TaskLostError: the client is gone.
          JGError: that is the answer.
        """
        if self._is_gone:
            return self._never()
        self._number += 1
        number = (self.record.term << _TERM_SHIFT) + self._number
        answer = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(answer, act)
        self.record.ask(
            pb.RunQuestion(
                number=number,
                kind=kind,
                position=position,
                tasks=tasks,
                what=what,
                ps=ps,
                homes=homes,
            )
        )
        return self._answered(number, answer)

    async def _never(self) -> pb.RunAnswer:
        raise _gone(self.order)

    async def _answered(
        self, number: int, answer: asyncio.Future[pb.RunAnswer]
    ) -> pb.RunAnswer:
        try:
            reply = await answer
        finally:
            self._asked.pop(number, None)
        if reply.HasField("error"):
            raise from_status(reply.error)
        return reply

    async def answer(self, body: pb.RunAnswer) -> pb.RunAnswer:
        """Takes an answer of the client; returns what there is to say to it."""
        asked = self._asked.pop(body.number, None)
        if asked is None:
            return pb.RunAnswer(run=body.run, number=body.number)
        stood = False
        try:
            if asked.act is not None:
                stood = await asked.act()
        finally:
            if not asked.answer.done():
                asked.answer.set_result(body)
        return pb.RunAnswer(run=body.run, number=body.number, stood=stood)

    def _leave(self) -> None:
        if self._watching or self._is_gone:
            return
        self._is_gone = True
        asked, self._asked = self._asked, {}
        for one in asked.values():
            if not one.answer.done():
                one.answer.set_exception(_gone(self.order))
        self.ends()


@final
class Restarters:
    """Asks the client of a run whether somebody starts lost tasks again.

    Only that knows it: who started the cluster, and sees the processes, may be there.

    Args:
      client: of the run; None: nobody knows.
    """

    def __init__(self, client: RunClient | None) -> None:
        self._client = client
        self._asked: asyncio.Task[JGError | None] | None = None
        self._is_asked = False

    @property
    def is_asked(self) -> bool:
        """Whether the question was asked, or there is nobody to ask and it was told."""
        return self._is_asked

    def learned(self, tasks: Collection[str], what: str = "") -> JGError | None:
        """Returns why nobody comes, if that is known; asks once, and does not wait."""
        self._is_asked = True
        if self._client is not None and self._asked is None:
            self._asked = asyncio.ensure_future(self._ask(self._client, tasks, what))
        done = self._asked is not None and self._asked.done()
        return self._asked.result() if self._asked is not None and done else None

    def close(self) -> None:
        """Waits for no answer: somebody came."""
        self._is_asked = False
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None

    async def _ask(
        self, client: RunClient, tasks: Collection[str], what: str
    ) -> JGError | None:
        try:
            await client.ask("waits", tasks=tasks, what=what)
        except JGError as error:
            return None if client.is_gone else error
        return None


def _gone(order: pb.OpenRun) -> JGError:
    return TaskLostError(f"the client of run '{order.run}' is gone", run=order.run)
