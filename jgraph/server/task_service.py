"""Task service: the handler of step frames and of calls to one task."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, Final, final

import numpy as np

from jgraph.cluster.drain import SHARE, DrainHolders
from jgraph.cluster.events import EventLog
from jgraph.cluster.log_tail import log_tail
from jgraph.cluster.methods import Answer, check_request
from jgraph.errors import (
    FencedError,
    JGError,
    TaskLostError,
    UnknownMethodError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, installed_version, kind_of
from jgraph.rpc.resumable.backlog import default_queue_limit
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Frame, Tensor
from jgraph.runtime.compute_errors import as_error
from jgraph.runtime.cost import always_at_once_s, available_cores
from jgraph.runtime.task import TaskRuntime, by_name
from jgraph.server.flight_service import FlightService, recorder_rows
from jgraph.server.gates.gates import Gates
from jgraph.server.gates.group_host import GroupHost
from jgraph.server.loops.dealer import Dealers
from jgraph.server.loops.task_loops import TaskLoops
from jgraph.server.program_service import ProgramService
from jgraph.server.replication.kept_reads import KeptReads
from jgraph.server.replication.streams import ChangeStreams
from jgraph.server.state_service import state_methods
from jgraph.server.steps.driver import StepDriver
from jgraph.server.steps.messages import apart
from jgraph.server.steps.parts import StepParts
from jgraph.server.steps.task_host import TaskHost
from jgraph.server.task_context import TaskContext
from jgraph.server.task_facts import TaskFacts


class _Phase(Enum):
    SERVING = "serving"
    LEAVING = "told to end; those who hold it may still use it"
    DRAINING = "ends when nothing runs any more"


_REFUSED: Final[dict[_Phase, frozenset[str]]] = {
    _Phase.SERVING: frozenset(),
    _Phase.LEAVING: frozenset({"RunLoop"}),
    _Phase.DRAINING: frozenset({"RunStep", "RunLoop", "RegisterProgram"}),
}


@final
class TaskService:
    """The handler of a task's transport.

    Args:
      context: of the task.
      shutdown: called when a client asks the server to end, with the grace in seconds.
    """

    def __init__(self, context: TaskContext, shutdown: Callable[[float], None]) -> None:
        self.context = context
        self.task = task = context.task
        self._phase = _Phase.SERVING
        self.holders = DrainHolders()
        self.events = EventLog(task)
        self.replaced: FencedError | None = None
        """Set: another process has the place of this one, which ends."""
        self.shell = TaskHost(context)
        self.runtime = TaskRuntime(
            task,
            self.shell,
            max_early_bytes=default_queue_limit(),
            flight_rows=recorder_rows(),
        )
        self._at_once_s = always_at_once_s(available_cores())
        self.driver = StepDriver(self.runtime, self.shell.messages)
        self.shell.messages.drives = self.driver.steps.__contains__
        self.records = ChangeStreams(context, self.runtime, self.shell)
        self.kept_reads = KeptReads(self.runtime, self.shell)
        self.gates = Gates(
            task,
            context.transport,
            self.runtime.gates,
            clock=context.clock,
            groups=GroupHost(context, self.events),
            submit=self.shell.submit,
        )
        self._flight = FlightService(context, self.runtime.flight)
        self._facts = facts = TaskFacts(
            *(context, self.runtime, self.shell, self.driver, self.gates),
            self.events,
        )
        self.parts = StepParts(self.runtime, self.shell.messages, self.gates)
        self.dealers = Dealers(context.clock)
        self._shutdown = shutdown
        self.loops = TaskLoops(
            context, self.shell, self.driver, self.gates, self.dealers
        )
        programs = ProgramService(context, self.runtime, self.shell, self._flight)
        self.methods: dict[str, Answer] = {
            **programs.methods,
            "RunStep": self._run_step,
            **self.loops.methods,
            **self.records.methods,
            **self.kept_reads.methods,
            "GateReport": self._gate_report,
            "Variables": self._variables,
            **state_methods(
                context, self.runtime.store, self.shell, facts.saves, self._flight
            ),
            **self._flight.methods,
            "Reset": self._reset,
            "MoveVariables": self._move_variables,
            "TaskLog": self._task_log,
            "DrainHold": self.holders.hold,
            "Shutdown": self._shut_down,
        }

    @property
    def draining(self) -> bool:
        """Whether it begins no step any more."""
        return self._phase is _Phase.DRAINING

    # ------------------------------------------------------------ step frames

    def frame_received(self, src: TaskName, received: Frame) -> None:
        """Takes a frame of the path of a step."""
        self.shell.messages.gather()
        try:
            self._handle_frame(src, received)
        finally:
            self.shell.messages.flush()

    def _handle_frame(self, src: TaskName, received: Frame) -> None:
        body = body_of(received)
        match kind_of(received):
            case "values":
                for values, tensors in apart(body, received.tensors):
                    self._take_values(src, values, tensors)
            case "gate_event":
                self.gates.received(src, body, received.tensors)
            case "start_step":
                self.parts.start(src, body)
            case "step_done":
                self._part_over(src, body, received.tensors)
            case "record":
                self.records.received(src, received)
            case "records_kept":
                self.records.commit(body)
            case "abort_step":
                error = from_status(body.reason)
                self.runtime.abort((body.handle, body.step_id), error)

    def _take_values(
        self, src: TaskName, body: pb.Values, tensors: Sequence[Tensor]
    ) -> None:
        if body.HasField("done"):
            self._part_over(src, body.done, ())
        step = body.handle, body.step_id
        begins = body.HasField("start")
        if begins and step == (body.start.handle, body.start.step_id):
            self.parts.start(src, body.start)
            begins = False
        self.runtime.deliver(step, body.key, tensors)
        if begins:
            self.parts.start(src, body.start)

    def _part_over(
        self, src: TaskName, body: pb.StepDone, tensors: Sequence[Tensor]
    ) -> None:
        error = from_status(body.status) if body.HasField("status") else None
        nodes = tensors[0] if tensors else None
        self.driver.part_over(src, (body.handle, body.step_id), error, nodes)

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Ends every step that needs ``peer``; all, if it says that we are replaced."""
        if isinstance(error, FencedError) and self.replaced is None:
            why = f"{self.task} ends: {error}"
            self.events.note("replaced", why, level=logging.ERROR)
            self.replaced = error
            self._shutdown(0.0)
        why = error.message if peer in error.message else f"{peer}: {error.message}"
        if peer in self.context.addresses:  # else it has left the cluster
            self.events.note("lost", why, level=logging.WARNING)
        self.driver.peer_lost(peer, error)
        self.parts.peer_lost(peer, error)
        self.gates.peer_lost(peer)
        self.loops.peer_lost(peer)
        self.records.peer_lost(peer, error)

    async def drain(self, grace_s: float) -> None:
        """Takes no new work and lets what runs end, for at most ``grace_s`` seconds.

        Begins no loop at once, and no step when those who hold the task let it go.
        """
        ends, idle = self.context.clock.now() + grace_s, asyncio.Event()
        self._phase = _Phase.LEAVING
        self.loops.leave()
        await self.holders.announce(SHARE * grace_s)
        self._phase = _Phase.DRAINING
        self.loops.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(ends - self.context.clock.now()):
                await self.loops.wait_ended()
                self.runtime.when_idle(idle.set)
                await idle.wait()

    # ------------------------------------------------------------ calls

    def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        """Answers a call."""
        answer = self.methods.get(method)
        if answer is None:
            raise UnknownMethodError(
                f"{self.task} has no method '{method}'; this server runs jgraph "
                f"{installed_version('jgraph')}, the caller may run another version"
            )
        check_request(method, request)
        if method.removeprefix("Master.") in _REFUSED[self._phase]:
            raise TaskLostError(
                f"{self.task} is being stopped and takes no new work", task=self.task
            )
        return self._facts.calls.counted(method, answer(request))

    async def status(self) -> pb.TaskStatus:
        """Returns the facts about this task."""
        return await self._facts.status(ready=self._phase is _Phase.SERVING)

    def run_at_once(
        self, handle: str, arrays: Sequence[np.ndarray[Any, Any]], limit_s: float
    ) -> list[np.ndarray[Any, Any]] | None:
        """Runs a step in this thread if that is all it needs.

        Args:
          handle: the program.
          arrays: its feeds, in order.
          limit_s: what it may take, as far as is known.

        Returns:
          The fetches; None, and nothing was done, where it must be driven.

        Raises:
          JGError: as the call ``RunStep`` would.
        """
        try:
            return self.runtime.run_at_once(handle, arrays, limit_s)
        except JGError:
            raise
        except Exception as error:
            raise as_error(error, self.task) from error

    async def _run_step(self, request: Frame) -> AsyncIterator[Frame]:
        body, began_s = body_of(request), self.runtime.now()
        if not body.trace:
            found = self.run_at_once(body.handle, request.tensors, self._at_once_s)
            if found is not None:
                yield self._fetched(found, began_s)
                return
        fetches, parts = await self.driver.run(
            body.handle,
            by_name(self.runtime.program(body.handle), request.tensors),
            timeout_s=body.timeout_s,
            trace=body.trace,
        )
        if not body.trace:
            yield self._fetched(fetches, began_s)
            return
        traces = [
            pb.PartTrace(task=part.task, asked_s=part.asked_s, told_s=part.told_s)
            for part in parts
        ]
        times = [part.times for part in parts]
        trace = pb.StepTrace(parts=traces)
        yield frame(step_trace=trace, tensors=[*fetches, *times])

    def _fetched(self, fetches: Sequence[Tensor], began_s: float) -> Frame:
        reply = frame(empty=pb.Empty(), tensors=fetches)
        reply.header.busy_s = self.runtime.now() - began_s
        return reply

    async def _gate_report(self, request: Frame) -> AsyncIterator[Frame]:
        rows = self.gates.staleness(body_of(request).gate)
        yield frame(gate_table=pb.GateTable(rows=rows))

    async def _variables(self, request: Frame) -> AsyncIterator[Frame]:
        chosen = set(body_of(request).containers)
        rows = [
            pb.VariableInfo(
                container=row.container,
                name=row.name,
                type=pb.TensorType(dtype=row.type.dtype, shape=row.type.shape),
                version=row.version,
                task=self.task,
            )
            for row in self.runtime.store.table()
            if not chosen or row.container in chosen
        ]
        yield frame(variable_table=pb.VariableTable(variables=rows))

    async def _reset(self, request: Frame) -> AsyncIterator[Frame]:
        containers, names = list(body_of(request).containers), body_of(request).names
        if names:
            for container in containers:
                self.runtime.store.forget(container, names)
            yield frame(empty=pb.Empty())
            return
        self.runtime.reset(containers)
        self.records.drop(containers)
        self.kept_reads.drop(containers)
        self.gates.drop(containers or list(self.runtime.gates))
        self.loops.forget_data(containers)
        await self.shell.give_back_memory()
        yield frame(empty=pb.Empty())

    async def _move_variables(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        self.runtime.store.move(body.container, body.into, beside=body.beside)
        yield frame(empty=pb.Empty())

    async def _task_log(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        log = self.events.lines if body.events else log_tail()
        last, lines = log.after(body.after, body.limit)
        yield frame(log_lines=pb.LogLines(last=last, lines=lines))

    async def _shut_down(self, request: Frame) -> AsyncIterator[Frame]:
        yield frame(empty=pb.Empty())
        self._shutdown(body_of(request).grace_s)
