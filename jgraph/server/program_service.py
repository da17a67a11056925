"""Program service: registers the programs of a task, and forgets them."""

import asyncio
from collections.abc import AsyncIterator
from typing import final

from jgraph.cluster.methods import Answer
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.program_codec import decode_program
from jgraph.runtime.task import TaskRuntime
from jgraph.server.flight_service import FlightService
from jgraph.server.members.messages import arrangement_in
from jgraph.server.steps.task_host import TaskHost
from jgraph.server.task_context import TaskContext


@final
class ProgramService:
    """Answers who gives a task programs, or takes them back.

    Args:
      context: of the task.
      runtime: has the programs.
      shell: compiles in a thread.
      flight: takes note of when that was.
    """

    def __init__(
        self,
        context: TaskContext,
        runtime: TaskRuntime,
        shell: TaskHost,
        flight: FlightService,
    ) -> None:
        self._context = context
        self._runtime = runtime
        self._shell = shell
        self._flight = flight
        self._loading: set[str] = set()
        self.methods: dict[str, Answer] = {
            "RegisterProgram": self._register,
            "UnregisterProgram": self._unregister,
        }

    async def _register(self, request: Frame) -> AsyncIterator[Frame]:
        failpoint("program.received")
        body = body_of(request)
        if body.HasField("members"):
            self._context.arrange(arrangement_in(body.members))
        self._flight.client_phases(body)
        before, began = self._runtime.cache.compilations, self._shell.now()
        program = decode_program(body.program, request.tensors)
        self._loading.add(body.handle)
        try:
            loaded = await self._shell.run(
                lambda: self._runtime.load(program, all_sizes=body.all_sizes)
            )
            if body.handle in self._loading:  # else it was given up meanwhile
                tasks = [TaskName(task) for task in body.participants]
                self._runtime.register(body.handle, program, loaded, tasks)
        finally:
            self._loading.discard(body.handle)
        compiled = self._runtime.cache.compilations - before
        flight, now = self._runtime.flight, self._shell.now()
        flight.note("register", program.name, began, now)
        yield frame(
            program_handle=pb.ProgramHandle(handle=body.handle, compilations=compiled)
        )

    async def _unregister(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        self._loading.discard(body.handle)
        runs = self._runtime.unregister(body.handle)
        if body.settle:
            for run in runs:
                settled = asyncio.Event()
                run.work.when_settled(settled.set)
                await settled.wait()
        else:  # who waits for that has more to do first, and a step waits for it
            await self._shell.give_back_memory()
        yield frame(empty=pb.Empty())
