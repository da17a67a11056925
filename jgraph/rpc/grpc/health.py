"""Standard gRPC health service, on a port of its own.

A probe must get an answer while the task computes or moves gigabytes; on the task's
own port it would wait behind them, and a supervisor would kill a healthy, busy task.
"""

import asyncio
from typing import final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jgraph.rpc.dial import bind_error
from jgraph.rpc.grpc.listening import listen, server_options, stop_listening


@final
class HealthServer:
    """Serves ``grpc.health.v1.Health`` for one task.

    Attributes:
      port: where it listens; 0 before the start.

    Example:
      >>> async def main():
      ...     server = HealthServer()
      ...     print(await server.start("127.0.0.1:0") > 0)
      ...     await server.set_serving(serving=True)
      ...     await server.close()
      >>> asyncio.run(main())
      True
    """

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # stubs lag
        self._listening: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, bind: str) -> int:
        """Listens on ``host:port`` (port 0: any) and returns the port.

        Raises:
          AddressError: ``bind`` is not an address of this machine.
          PortInUseError: another process listens there.
        """
        server = grpc.aio.server(options=server_options(share=8))
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        try:
            self.port = server.add_insecure_port(bind)
        except RuntimeError as error:
            await server.stop(None)
            raise bind_error(bind) from error
        await self.set_serving(serving=False)
        self._listening = await listen(server, grace_s=None)
        return self.port

    async def set_serving(self, *, serving: bool) -> None:
        """Answers SERVING from now on, or NOT_SERVING."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._servicer.set("", status.SERVING if serving else status.NOT_SERVING)

    async def close(self) -> None:
        """Stops listening and frees the port."""
        if self._listening is not None:
            await stop_listening(self._listening)
            self._listening = None
