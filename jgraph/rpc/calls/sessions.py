"""Call sessions of a server, kept for a few seconds after a connection breaks."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.admission_control import CallAdmission
from jgraph.rpc.calls.answering import Answers, given_up
from jgraph.rpc.exchange.receiver import RETURN_S
from jgraph.rpc.exchange.stream import check_protocol
from jgraph.rpc.frames import body_of, kind_of
from jgraph.rpc.security.tls import may_be_task
from jgraph.rpc.sockets.offer import Doors
from jgraph.rpc.transport import Frame

_Key: TypeAlias = tuple[frozenset[bytes], int, int]


@final
class CallSessions:
    """Serves streams of calls; one that resumes another goes on where that ended.

    Args:
      hello: who we are.
      make: gives what answers a new line.
    """

    def __init__(self, hello: pb.Hello, make: Callable[[], Answers]) -> None:
        self._hello = hello
        self._make = make
        # By the names in the caller's certificate, its incarnation, and its line.
        self._lines: dict[_Key, Answers] = {}

    def stop(self) -> None:
        """Waits for nobody to come back any more."""
        for answers in self._lines.values():
            answers.stop()
        self._lines.clear()

    async def serve(
        self,
        context: Any,
        intake: CallAdmission,
        first: list[Frame],
        check: Callable[[str], None],
        names: Iterable[bytes] | None,
        doors: Doors,
    ) -> None:
        """Answers one stream to its end; see ``Answers.serve``.

        Args:
          context: gRPC's, of the stream.
          intake: lets calls in.
          first: the first frames of it.
          check: refuses methods that the caller may not call.
          names: of the caller, in its certificate; None: nobody checks those.
          doors: where callers may connect beside their streams.

        Raises:
          MalformedMessageError: it is not a stream of calls.
          TaskLostError: what it resumes was given up.
          VersionError: the caller speaks another version of the protocol.
        """
        hello = self._introduce(first[0])
        intake.of_task = bool(hello.task) and may_be_task(names)
        key = frozenset(names or ()), hello.incarnation, hello.line
        answers = self._find(key, hello)
        turn = answers.turn + 1
        try:
            await answers.serve(context, intake, first, check, doors)
        finally:
            is_known = self._lines.get(key) is answers
            if is_known and answers.may_return:
                loop = asyncio.get_running_loop()
                loop.call_later(RETURN_S, self._give_up, key, answers, turn)
            else:
                if is_known:
                    del self._lines[key]
                await answers.end()

    def _introduce(self, first: Frame) -> pb.Hello:
        if kind_of(first) != "hello":
            raise MalformedMessageError(
                f"calls begin with a Hello frame; '{kind_of(first)}' was sent"
            )
        hello: pb.Hello = body_of(first)
        check_protocol(self._hello, hello, "the caller")
        return hello

    def _find(self, key: _Key, hello: pb.Hello) -> Answers:
        if hello.resumes:
            if key not in self._lines:
                raise given_up()
            return self._lines[key]
        answers = self._make()
        if hello.line:
            self._lines[key] = answers
        return answers

    def _give_up(self, key: _Key, answers: Answers, turn: int) -> None:
        """Ends a line unless its caller came back."""
        if self._lines.get(key) is answers and answers.turn == turn:
            del self._lines[key]
            answers.stop()
