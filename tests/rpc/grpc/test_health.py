"""The health service answers on its own port."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jgraph.errors import PortInUseError
from jgraph.rpc.grpc.health import HealthServer
from tests.support.run_async import run_async

Status = health_pb2.HealthCheckResponse.ServingStatus


def test_health_follows_what_is_set() -> None:
    async def main() -> list[int]:
        server = HealthServer()
        port = await server.start("127.0.0.1:0")
        answers = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for serving in (None, True, False):
                if serving is not None:
                    await server.set_serving(serving=serving)
                request = health_pb2.HealthCheckRequest()
                answers.append((await stub.Check(request, timeout=10)).status)
        await server.close()
        return answers

    assert run_async(main()) == [Status.NOT_SERVING, Status.SERVING, Status.NOT_SERVING]


def test_taken_port_is_named() -> None:
    async def main() -> None:
        first, second = HealthServer(), HealthServer()
        port = await first.start("127.0.0.1:0")
        with pytest.raises(PortInUseError, match=f"port {port} of 127.0.0.1 is taken"):
            await second.start(f"127.0.0.1:{port}")
        await second.close()
        await first.close()

    run_async(main())
