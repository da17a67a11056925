"""One stream of calls: what its stream says while a frame arrives over its socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from jgraph.errors import NotTakingError, TaskLostError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.caller import CallConnection
from jgraph.rpc.frames import frame, hello
from jgraph.rpc.sockets.frame_socket import FrameSocket, Take
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.codec import encode, pack, prepare
from jgraph.rpc.wire.decoder import Decoder
from jgraph.testing.transport_harness import PS, WAIT_S, step
from tests.support.run_async import run_async


def sent(message: Frame, sequence: int = 0) -> bytes:
    return b"".join(pack(encode(message, sequence=sequence).pieces))


class Stream:
    """What a server says over a stream, as its caller reads it."""

    def __init__(self, *said: bytes) -> None:
        self.said: asyncio.Queue[bytes | None] = asyncio.Queue()
        for chunk in said:
            self.said.put_nowait(chunk)

    async def write(self, chunk: bytes) -> None: ...

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self.said.get()) is not None:
            yield chunk

    def cancel(self) -> None:
        self.said.put_nowait(None)


class Socket:
    """Connects to a data port, where nobody is but who has ``take``."""

    def __init__(self) -> None:
        self.take: asyncio.Future[Take] = asyncio.get_running_loop().create_future()

    async def connect(
        self, address: str, offer: pb.DataSocket, task: str, take: Take
    ) -> FrameSocket:
        self.take.set_result(take)
        return FrameSocket(take)


def line_over(stream: Stream, data: Socket | None = None) -> CallConnection:
    @asynccontextmanager
    async def over(patient: bool) -> AsyncIterator[Stream]:
        assert patient, "nothing breaks"
        yield stream

    parts = "127.0.0.1:1", hello(None, incarnation=5), over, Decoder
    return CallConnection(*parts, near=False, data=data)  # type: ignore[arg-type]


REQUEST = prepare(step(1))


def test_why_a_stream_ends_is_no_part_of_a_reply_that_its_socket_brings() -> None:
    reply = sent(step(1, np.zeros(100_000, np.uint8)), sequence=1)
    why = sent(frame(status=to_status(NotTakingError("it takes nothing"))))

    async def main() -> None:
        theirs = hello(PS, incarnation=7)
        theirs.data_socket.port = 1
        stream, socket = Stream(sent(frame(hello=theirs))), Socket()
        line = line_over(stream, socket)
        asking = asyncio.create_task(line.ask("Echo", REQUEST, WAIT_S))
        take = await socket.take
        take(memoryview(reply[: len(reply) // 2]))
        stream.said.put_nowait(why)
        with pytest.raises(NotTakingError, match="it takes nothing"):
            await asking
        await line.close()

    run_async(main())


def test_a_line_that_has_ended_says_so_to_who_asks_over_it() -> None:
    async def main() -> None:
        stream = Stream()
        line = line_over(stream)
        stream.cancel()
        with pytest.raises(TaskLostError):
            await line.ask("Echo", REQUEST, WAIT_S)
        assert line.is_broken
        with pytest.raises(TaskLostError, match="went away during 'Echo'"):
            await line.ask("Echo", REQUEST, WAIT_S)
        with pytest.raises(TaskLostError, match="went away during 'Count'"):
            async for _ in line.call("Count", REQUEST, WAIT_S):
                pass
        await line.close()

    run_async(main())
