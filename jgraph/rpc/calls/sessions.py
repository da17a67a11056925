"""Call sessions of a server, kept for a few seconds after a connection breaks."""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeAlias, final

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.answering import Answers
from jgraph.rpc.frames import body_of, check_protocol
from jgraph.rpc.resumable.accepting import given_up
from jgraph.rpc.resumable.admission_control import Admission
from jgraph.rpc.transport import Frame

Check: TypeAlias = Callable[[str], None]
_Key: TypeAlias = tuple[frozenset[bytes], int, int]


@final
class CallSessions:
    """Serves streams of calls; one that resumes another goes on where that ended.

    Args:
      hello: who we are.
      make: gives what answers a new line, of what checks its methods and what is called
        when the line is over.
    """

    def __init__(
        self, hello: pb.Hello, make: Callable[[Check, Callable[[], None]], Answers]
    ) -> None:
        self._hello = hello
        self._make = make
        # By the names in the caller's certificate, its incarnation, and its line.
        self._lines: dict[_Key, Answers] = {}

    def stop(self) -> None:
        """Waits for nobody to come back any more."""
        for answers in self._lines.values():
            answers.stop()
        self._lines.clear()

    def serve(
        self,
        context: Any,
        intake: Admission,
        first: list[Frame],
        check: Check,
        names: Iterable[bytes] | None,
    ) -> Coroutine[None, None, None]:
        """Returns what answers a stream to its end; see ``AcceptingEnd.serve``.

        Args:
          context: gRPC's, of the stream.
          intake: lets calls in.
          first: the first frames of it.
          check: refuses methods that the caller may not call.
          names: of the caller, in its certificate; None: nobody checks those.

        Raises:
          TaskLostError: what it resumes was given up.
          VersionError: the caller speaks another version of the protocol.
        """
        hello: pb.Hello = body_of(first[0])
        check_protocol(self._hello, hello, "the caller")
        key = frozenset(names or ()), hello.incarnation, hello.line
        if not hello.resumes:
            answers = self._begin(key, check)
        elif key in self._lines:
            answers = self._lines[key]
        else:
            raise given_up()
        return answers.end.serve(context, intake, first)

    def _begin(self, key: _Key, check: Check) -> Answers:
        def give_up() -> None:
            answers.stop()
            if self._lines.get(key) is answers:
                del self._lines[key]

        answers = self._make(check, give_up)
        if key[-1]:
            if key in self._lines:  # its caller did not learn that it was accepted
                self._lines[key].stop()
            self._lines[key] = answers
        return answers
