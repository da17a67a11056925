"""Accepting end of a link, over streams that break when gRPC pleases."""

import asyncio
from typing import Any, Final

import grpc

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame, hello
from jgraph.rpc.resumable.accepting import RETURN_S, AcceptingEnd
from jgraph.rpc.resumable.admission_control import RequestBudget
from jgraph.rpc.sockets.offer import Doors
from jgraph.rpc.wire.codec import encode
from jgraph.testing.transport_harness import PS
from tests.support.asks import intake
from tests.support.virtual.loop import run_virtual
from tests.support.virtual.network import Network

_EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # stubs lack it


class BreakingStream:
    """Ends while a reply leaves; its handler is cancelled when that reply gives up."""

    def __init__(self) -> None:
        self.handler: asyncio.Task[None] | None = None
        self.written = 0
        self._leaves = asyncio.Event()

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> object:
        await self._leaves.wait()
        return _EOF

    async def write(self, data: bytes) -> None:
        self.written += 1
        if self.written == 1:  # the Hello
            return
        self._leaves.set()
        try:
            await asyncio.Event().wait()
        finally:
            assert self.handler is not None
            self.handler.cancel()


def test_caller_of_a_stream_cancelled_while_it_ends_is_waited_for_and_given_up() -> (
    None
):
    async def main() -> None:
        gone = asyncio.Event()
        end = AcceptingEnd(hello(PS, 1), Doors(), lambda _: None, gone.set)
        end.outbox.put(encode(frame(empty=pb.Empty())))
        theirs = hello(None, 2)
        theirs.line = 1
        first = [frame(hello=theirs), frame(ack=pb.Ack())]
        stream = BreakingStream()
        serving = end.serve(stream, intake(RequestBudget(1 << 20)), first)
        stream.handler = asyncio.create_task(serving)
        await asyncio.wait([stream.handler])
        assert stream.handler.cancelled()
        assert not gone.is_set()
        ended_s = asyncio.get_running_loop().time()
        await gone.wait()
        assert asyncio.get_running_loop().time() - ended_s == RETURN_S

    run_virtual(Network(0), main(), 10 * RETURN_S)
