"""A process knocks until the cluster answers it."""

from collections.abc import AsyncGenerator

import pytest

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.token import find_token
from jgraph.rpc.transport import Frame
from jgraph.server.members import joining
from jgraph.testing.transport_harness import PS, Recorder
from tests.support.run_async import run_async


class HangsFirst(Recorder):
    """A registrar that answers no first knock."""

    def __init__(self) -> None:
        super().__init__()
        self.knocks = 0

    async def handle_call(
        self, method: str, request: Frame
    ) -> AsyncGenerator[Frame, None]:
        self.knocks += 1
        if self.knocks == 1:
            await self._hang()
        yield frame(join_reply=pb.JoinReply(task="/job:worker/task:3"))


def test_one_whose_first_knock_is_not_answered_in_time_knocks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "_ASK_S", 0.5)

    async def main() -> None:
        server = GrpcTransport(PS)
        address = await server.start(HangsFirst())
        reply = await joining._knock(
            *(address, "worker", 7, [], find_token(None, None), None, None, 50.0)
        )
        assert reply.task == "/job:worker/task:3"
        await server.close()

    run_async(main())
