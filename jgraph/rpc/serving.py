"""Call handling of both transports: replies, and errors as a last status frame."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from jgraph.errors import InternalError, JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.status import from_status, to_status
from jgraph.rpc.transport import Frame, Handler

HELLO_METHOD = "Hello"
"""The call that every transport answers by itself."""
ROOM_METHOD = "Room"
"""Answered by gRPC's transport when the next call of its stream will be let in."""

_logger = logging.getLogger(__name__)


async def answer(
    handler: Handler, hello: pb.Hello, method: str, request: Frame
) -> AsyncGenerator[Frame, None]:
    """Yields the replies of ``handler``; an error is a last frame with a status.

    Args:
      handler: what the task does with calls.
      hello: who answers; the whole reply to the call ``"Hello"``.
      method: name of the call.
      request: its one request frame.
    """
    if method == HELLO_METHOD:
        yield frame(hello=hello)
        return
    status: pb.Status | None = None
    try:
        async with _closing(handler.handle_call(method, request)) as replies:
            async for reply in replies:
                yield reply
    except JGError as error:
        status = to_status(error)
    except Exception as error:
        # The text stays here: it may hold paths and values of this machine.
        _logger.exception("The call %s failed.", method)
        status = to_status(error)
    if status is not None:
        yield frame(status=status)


async def results(
    replies: AsyncGenerator[Frame, None],
) -> AsyncGenerator[Frame, None]:
    """Yields reply frames; raises the error of a frame with a status."""
    async with aclosing(replies):
        async for reply in replies:
            if kind_of(reply) == "status":
                raise from_status(body_of(reply))
            yield reply


async def only_reply(replies: AsyncIterator[Frame], method: str, where: str) -> Frame:
    """Returns the reply of a call that has one; the last if it has several.

    Raises:
      InternalError: it has none.
    """
    last: Frame | None = None
    async for reply in replies:
        last = reply
    if last is None:
        raise InternalError(f"{where} answered '{method}' with nothing")
    return last


@asynccontextmanager
async def _closing(
    replies: AsyncIterator[Frame],
) -> AsyncGenerator[AsyncIterator[Frame], None]:
    try:
        yield replies
    finally:
        if isinstance(replies, AsyncGenerator):
            await replies.aclose()
