"""Master service: one entry point to the whole cluster, offered by every server.

Clients talk to a master only (uploads of training data excepted). It waits for tasks,
passes partitions to them, runs steps as their driver, and relays loops and their
reports. It is not on the path of a step of a loop.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, final

from jgraph.cluster.deadlines import (
    COMPILE_S,
    CONTROL_S,
    SILENCE_S,
    bounded_s,
    bulk_timeout_s,
    loop_timeout_s,
)
from jgraph.cluster.events import lone_loop
from jgraph.cluster.methods import Answer
from jgraph.coordination.liveness.join import (
    AskAgain,
    Complete,
    Event,
    GiveUp,
    JoinBarrier,
    TaskAnswered,
    TaskRefused,
    TimeIsUp,
)
from jgraph.coordination.liveness.members import LEASE_S
from jgraph.errors import (
    ClusterUnreachableError,
    JGError,
    TaskLostError,
    UnknownDeviceError,
)
from jgraph.failpoints import failpoint
from jgraph.graph.device import is_ps, is_worker
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.program_codec import decode_program, encode_program
from jgraph.runtime.compute_errors import as_error
from jgraph.server.members.messages import members_message
from jgraph.server.members.registrar import Registrar
from jgraph.server.runs.calls import Runs, merged
from jgraph.server.runs.peers import Peers, of_task
from jgraph.server.task_service import TaskService

_ASK_AGAIN_S = 0.2


@final
class Master:
    """Adds the ``Master.…`` methods to a task's service.

    Args:
      service: the service of the task that this master runs in.
    """

    def __init__(self, service: TaskService, lease_s: float = LEASE_S) -> None:
        self._service = service
        self._context = context = service.context
        self.registrar = Registrar(context, self, service.events, lease_s)
        self._transport = context.transport
        self.dealers = service.dealers
        self.runs = Runs(self, context.clock)
        methods: Mapping[str, Answer] = {
            "TaskStatus": self._task_status,
            "Master.Connect": self._connect,
            "Master.Status": self._status,
            "Master.RegisterProgram": self._register_program,
            "Master.UnregisterProgram": self._each("UnregisterProgram", lost_ok=True),
            "Master.Variables": self._variables,
            "Master.ReadTable": self._of_a_table("ReadTable"),
            "Master.LoadTable": self._of_a_table("LoadTable"),
            "Master.Reset": self._each("Reset", lost_ok=True),
            "Master.RunLoop": self._run_loop,
            "Master.StopLoop": self._stop_loop,
            "Master.OpenDataRun": self._open_data_run,
            "Master.AskData": self._ask_data,
            "Master.SecureSum": self._secure_sum,
            "Master.DataPosition": self._data_position,
            "Master.CloseDataRun": self._close_data_run,
        }
        service.methods.update(methods)
        service.methods.update(self.registrar.methods)
        service.methods.update(self.runs.methods)
        service.methods.update(GateMethods(self).methods)
        context.rearranged.append(self.runs.rearranged)

    @property
    def task(self) -> TaskName:
        """Where it is."""
        return self._context.task

    @property
    def incarnation(self) -> int:
        """Which start of its task it is."""
        return self._context.incarnation

    def tasks(self) -> list[TaskName]:
        """Returns all tasks of the cluster."""
        return list(self._context.addresses)

    def workers(self) -> dict[TaskName, str]:
        """Returns the workers that stay, each with its process if that joined."""
        context = self._context
        if not context.arrangement.number:
            return {task: "" for task in context.addresses if is_worker(task)}
        return {
            task: f"{member.incarnation:x}" if member.incarnation else ""
            for task, member in context.arrangement.members.items()
            if is_worker(task) and not member.leaves
        }

    def ps(self) -> dict[int, bool]:
        """Returns, for the index of each ps, whether it was not told to leave."""
        members = self._context.arrangement.members
        return {
            int(task.rpartition(":")[2]): task not in members
            or not members[task].leaves
            for task in self._context.addresses
            if is_ps(task)
        }

    def leavers(self) -> frozenset[TaskName]:
        """Returns the tasks that do not come back when they are told to end."""
        members = self._context.arrangement.members.items()
        return frozenset(t for t, one in members if one.incarnation or one.leaves)

    def note(self, kind: str, text: str, *, level: int = logging.INFO) -> None:
        """Notes an event of the cluster."""
        self._service.events.note(kind, text, level=level)

    async def _connect(self, request: Frame) -> AsyncIterator[Frame]:
        timeout_s = body_of(request).timeout_s
        call = JoinBarrier(dict(self._context.addresses))
        events: asyncio.Queue[Event] = asyncio.Queue()
        statuses: dict[TaskName, pb.TaskStatus] = {}
        loop = asyncio.get_running_loop()
        asking: dict[TaskName, asyncio.Task[None]] = {}
        is_over = False

        def ask(task: TaskName) -> None:
            if not is_over:
                question = self._ask(task, events, statuses)
                asking[task] = loop.create_task(question)

        for task in self.tasks():
            ask(task)
        timer = loop.call_later(timeout_s, events.put_nowait, TimeIsUp(timeout_s))
        try:
            while True:
                for instruction in call.handle(await events.get()):
                    match instruction:
                        case AskAgain(task):
                            loop.call_later(_ASK_AGAIN_S, ask, task)
                        case GiveUp(error):
                            raise error
                        case Complete():
                            yield self._cluster_status(statuses, [])
                            return
        finally:
            is_over = True
            timer.cancel()
            for question in asking.values():
                question.cancel()

    async def _ask(
        self,
        task: TaskName,
        events: asyncio.Queue[Event],
        statuses: dict[TaskName, pb.TaskStatus],
    ) -> None:
        try:
            status = await self._status_of(task)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
            events.put_nowait(TaskRefused(task, as_error(error, task)))
            return
        if status.state != "ready":
            loss = TaskLostError(f"{task} is being stopped", task=task)
            events.put_nowait(TaskRefused(task, loss))
            return
        statuses[task] = status
        events.put_nowait(TaskAnswered(task, status.incarnation))

    async def _task_status(self, request: Frame) -> AsyncIterator[Frame]:
        """Tells how this task is, and which runs have their master here."""
        status = await self._service.status()
        status.runs.CopyFrom(self.runs.own())
        yield frame(task_status=status)

    async def _status(self, request: Frame) -> AsyncIterator[Frame]:
        statuses: dict[TaskName, pb.TaskStatus] = {}

        async def ask(task: TaskName) -> None:
            with suppress(JGError):
                statuses[task] = await self._status_of(task)

        await asyncio.gather(*map(ask, self.tasks()))
        missing = [task for task in self.tasks() if task not in statuses]
        yield self._cluster_status(statuses, missing)

    async def _status_of(self, task: TaskName) -> pb.TaskStatus:
        reply = await self.call(task, "TaskStatus", frame(empty=pb.Empty()))
        status: pb.TaskStatus = body_of(reply)
        if status.arrangement != self._context.arrangement.number:
            await self.registrar.exchange(task)  # one of the two was started again
        if status.task != task:
            raise ClusterUnreachableError(
                f"{self.address(task)} should be {task}, but is {status.task}; "
                "correct the cluster description",
                task=task,
            )
        return status

    def _cluster_status(
        self, statuses: Mapping[TaskName, pb.TaskStatus], missing: list[TaskName]
    ) -> Frame:
        all_tell = all(status.HasField("runs") for status in statuses.values())
        runs = merged(s.runs for s in statuses.values()) if all_tell else None
        for status in statuses.values():
            status.ClearField("runs")  # they are told once
        return frame(
            cluster_status=pb.ClusterStatus(
                runs=runs,
                cluster_json=self._context.spec.to_json(),
                master=self.task,
                tasks=[statuses[task] for task in sorted(statuses)],
                missing=missing,
                arrangement=self._context.arrangement.number,
                leaving=[
                    task
                    for task, member in self._context.arrangement.members.items()
                    if member.leaves
                ],
            )
        )

    async def _register_program(self, request: Frame) -> AsyncIterator[Frame]:
        yield await self.register(request)

    def stream(
        self, task: TaskName, method: str, request: Frame
    ) -> AsyncIterator[Frame]:
        """Calls another task for all replies, however long they take."""
        where = self.address(task)
        return self._transport.call(where, method, request, timeout_s=bounded_s(0.0))

    async def register(self, request: Frame) -> Frame:
        """Passes every task its part of a program."""
        body = body_of(request)
        program = decode_program(body.program, request.tensors)
        participants = [partition.task for partition in program.partitions]

        async def register(task: TaskName) -> int:
            message, tensors = encode_program(program.only(task))
            order = pb.RegisterProgram(
                handle=body.handle,
                program=message,
                participants=participants,
                all_sizes=body.all_sizes,
            )
            if task == program.driver:
                order.phases.extend(body.phases)
            if self._context.arrangement.number:  # a task that was started again
                order.members.CopyFrom(members_message(self._context.arrangement))
            reply = await self.call(
                task,
                "RegisterProgram",
                frame(register_program=order, tensors=tensors),
                timeout_s=COMPILE_S,
            )
            return int(body_of(reply).compilations)

        counts = await asyncio.gather(*map(register, participants))
        return frame(
            program_handle=pb.ProgramHandle(
                handle=body.handle, compilations=sum(counts)
            )
        )

    async def _variables(self, request: Frame) -> AsyncIterator[Frame]:
        # What a lost worker does not hold can be told without it; who asks for
        # something that nobody has sees who is missing.
        table = pb.VariableTable()
        calls = (self.call(task, "Variables", request) for task in self.tasks())
        for reply in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(reply, TaskLostError):
                table.missing.append(to_status(reply))
            elif isinstance(reply, BaseException):
                raise reply
            else:
                table.variables.extend(body_of(reply).variables)
        yield frame(variable_table=table)

    async def _run_loop(self, request: Frame) -> AsyncIterator[Frame]:
        failpoint("loop.asked")
        order = body_of(request)
        if order.run:  # its reports are those of the run
            self.runs.get(order.run).order(order)
            yield frame(empty=pb.Empty())
            return
        async for report in self.loop(order):
            yield report

    def loop(self, order: pb.RunLoop) -> AsyncIterator[Frame]:
        """Runs a loop on its task; yields its reports."""
        watched = bool(order.data_run) and not order.dealer
        order.dealer = order.dealer or self.task
        order.master = self.task
        return self._reports(order, frame(run_loop=order), watched=watched)

    async def _reports(
        self, order: pb.RunLoop, request: Frame, *, watched: bool
    ) -> AsyncIterator[Frame]:
        """Yields the reports of a loop, from which the dealer of its data learns."""
        task = TaskName(order.task)
        reports = self._relay(task, request)
        if watched:
            reports = self.dealers.get(order.data_run).watch(order.loop, task, reports)
        events, what = self._service.events, f"{order.steps} steps"
        # Who looks after a run notes its own.
        notes = nullcontext() if order.run else lone_loop(events, order.loop, what)
        with notes:
            try:
                async for report in reports:
                    yield report
            except TaskLostError as error:
                raise error if error.details else of_task(task, error) from error

    async def _relay(self, task: TaskName, request: Frame) -> AsyncIterator[Frame]:
        if task == self.task:
            async for report in self._service.handle_call("RunLoop", request):
                yield report
            return
        order, address = body_of(request), self.address(task)
        reports = self._transport.call(
            address,
            "RunLoop",
            request,
            timeout_s=loop_timeout_s(order.steps, order.step_timeout_s),
        )
        try:
            async for report in reports:
                yield report
        except (ClusterUnreachableError, TaskLostError) as error:
            if error.details.get("address") != address:
                raise  # another task's, which this one told of
            raise of_task(task, error) from error

    async def _open_data_run(self, request: Frame) -> AsyncIterator[Frame]:
        self.dealers.open(body_of(request))
        self.runs.note(request)
        yield frame(empty=pb.Empty())

    async def _ask_data(self, request: Frame) -> AsyncIterator[Frame]:
        yield frame(data_deal=await self.dealers.ask(body_of(request)))

    async def _secure_sum(self, request: Frame) -> AsyncIterator[Frame]:
        yield frame(sum_answer=await self.dealers.sum(body_of(request)))

    async def _data_position(self, request: Frame) -> AsyncIterator[Frame]:
        name = body_of(request).run
        supervisor = self.runs.find(name)
        yield _position(
            self.dealers.position(name) if supervisor is None else supervisor.position()
        )

    async def _close_data_run(self, request: Frame) -> AsyncIterator[Frame]:
        yield _position(self.dealers.close(body_of(request).run))

    async def _stop_loop(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        # Until the steps under way have ended, if an account of them is wanted.
        limit_s = CONTROL_S + (bounded_s(order.timeout_s) if order.account else 0.0)
        task = TaskName(order.task)
        yield await self.call(task, "StopLoop", request, timeout_s=limit_s)

    def _of_a_table(self, method: str) -> Callable[[Frame], AsyncIterator[Frame]]:
        async def forward(request: Frame) -> AsyncIterator[Frame]:
            body = body_of(request)
            limit_s = bulk_timeout_s(body.table.capacity_bytes)
            task = TaskName(body.task)
            yield await self.call(task, method, request, timeout_s=limit_s)

        return forward

    def _each(
        self, method: str, *, lost_ok: bool = False
    ) -> Callable[[Frame], AsyncIterator[Frame]]:
        async def forward(request: Frame) -> AsyncIterator[Frame]:
            # Every task is asked, also when one of them does not answer.
            calls = (self.call(task, method, request) for task in self.tasks())
            results = await asyncio.gather(*calls, return_exceptions=True)
            for result in results:
                if lost_ok and isinstance(result, TaskLostError):
                    continue  # a task that is gone has forgotten it
                if isinstance(result, BaseException):
                    raise result
            yield frame(empty=pb.Empty())

        return forward

    def address(self, task: TaskName) -> str:
        """Returns where a task listens."""
        if task not in self._context.addresses:
            if is_ps(task) and self._context.arrangement.number:
                what = f"{task} is no member of the cluster now"
                raise TaskLostError(what, task=task)
            raise UnknownDeviceError(
                f"this cluster has no {task}; it has {', '.join(self.tasks())}"
            )
        return self._context.addresses[task]

    async def call(
        self,
        task: TaskName,
        method: str,
        request: Frame,
        *,
        timeout_s: float = CONTROL_S,
    ) -> Frame:
        """Calls a task; who is lost is named."""
        address = self.address(task)
        if task != self.task:
            try:
                return await self._transport.ask(
                    address, method, request, timeout_s=timeout_s
                )
            except (ClusterUnreachableError, TaskLostError) as error:
                raise of_task(task, error) from error
        answers = [reply async for reply in self._service.handle_call(method, request)]
        return answers[-1]


def _position(position: Mapping[str, Any]) -> Frame:
    return frame(data_position=pb.DataPosition(position=json.dumps(position)))


@final
@dataclass(frozen=True, slots=True)
class GateMethods:
    """Passes calls about gates on to the tasks that have them.

    Args:
      peers: to the tasks.
    """

    peers: Peers

    @property
    def methods(self) -> Mapping[str, Answer]:
        """The calls, by name."""
        return {"Master.OpenGate": self._open, "Master.GateReport": self._report}

    async def _open(self, request: Frame) -> AsyncIterator[Frame]:
        failpoint("gates.opening")
        await self._each("OpenGate", request, SILENCE_S)
        failpoint("gates.opened")
        yield frame(empty=pb.Empty())

    async def _report(self, request: Frame) -> AsyncIterator[Frame]:
        replies = await self._each("GateReport", request, CONTROL_S)
        rows = [row for reply in replies for row in body_of(reply).rows]
        yield frame(gate_table=pb.GateTable(rows=rows))

    async def _each(self, method: str, request: Frame, timeout_s: float) -> list[Frame]:
        shards = map(TaskName, body_of(request).shards)
        call = self.peers.call
        calls = (call(s, method, request, timeout_s=timeout_s) for s in shards)
        return await asyncio.gather(*calls)
