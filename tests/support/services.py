"""The service of one task, with its transport."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from jgraph.clock import SystemClock
from jgraph.cluster.methods import ROLES
from jgraph.graph.ir import TaskName
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.server.task_context import TaskContext
from jgraph.server.task_service import TaskService


@asynccontextmanager
async def service_of(
    task: TaskName, records_dir: Path | None = None
) -> AsyncIterator[tuple[TaskService, GrpcTransport]]:
    transport = GrpcTransport(task, same_machine="off", roles=ROLES)
    context = TaskContext(task, transport, SystemClock(), records_dir=records_dir)
    service = TaskService(context, lambda grace_s: None)
    try:
        yield service, transport
    finally:
        await transport.close()
        service.records.close()
        service.shell.close()
