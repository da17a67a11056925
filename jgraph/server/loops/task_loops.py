"""Loops and data sets of one task: start, stop, and final reports."""

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, final

from jgraph.cluster.deadlines import CONTROL_S, bounded_s, bulk_timeout_s
from jgraph.cluster.fed_data import FedReader
from jgraph.cluster.loop_messages import source_info, sums_of
from jgraph.cluster.methods import Answer, reading
from jgraph.coordination.data.dispatch import Dispatch
from jgraph.coordination.data.shares import PieceTimes
from jgraph.coordination.data.slots import SlotPlan
from jgraph.coordination.run.recovery import LOST_DATA
from jgraph.coordination.run.succession import MasterTerms
from jgraph.errors import (
    ClusterBusyError,
    ClusterUnreachableError,
    DataError,
    TaskLostError,
    UnknownDeviceError,
)
from jgraph.failpoints import failpoint
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Address, Frame
from jgraph.runtime.data.batches import ArrayReader, Reader
from jgraph.runtime.data.sources import open_source
from jgraph.server.gates.gates import Gates
from jgraph.server.loops.arbiter_loop import ArbiterLoop, AskMaster
from jgraph.server.loops.data_feed import Ask, BatchReader, DataFeed, deal_alone
from jgraph.server.loops.dealer import ANSWER_S, Dealers
from jgraph.server.loops.replica_loop import LoopRun
from jgraph.server.loops.reports import LoopReports
from jgraph.server.loops.sum_part import SumPart
from jgraph.server.steps.driver import StepDriver
from jgraph.server.steps.task_host import TaskHost
from jgraph.server.task_context import TaskContext

_KEPT: Final = 16


@final
class TaskLoops:
    """Runs loops: of a replica, or of the first ps of synchronous training.

    Args:
      context: of the task.
      shell: runs what reads data.
      driver: runs the steps of loops.
      gates: of the task.
      dealers: of the data that this task deals out.

    Attributes:
      methods: the calls about loops and data, by name.
    """

    def __init__(
        self,
        context: TaskContext,
        shell: TaskHost,
        driver: StepDriver,
        gates: Gates,
        dealers: Dealers,
    ) -> None:
        self._context = context
        self._task = context.task
        self._shell = shell
        self._driver = driver
        self._gates = gates
        self._dealers = dealers
        self._data: dict[str, Reader | FedReader] = {}
        self._loops: dict[str, LoopRun | ArbiterLoop] = {}
        # The last that ended: a new master asks what they did.
        self._ended: OrderedDict[str, LoopReports] = OrderedDict()
        # What loops are told before they begin: it may overtake the order to run them.
        self._early: deque[pb.StopLoop] = deque(maxlen=_KEPT)
        self._terms = MasterTerms()
        self._none = asyncio.Event()
        self._none.set()
        self.methods: Mapping[str, Answer] = {
            "RunLoop": self._run_loop,
            "StopLoop": self._stop_loop,
            "OpenGate": self._open_gate,
            "PutData": self._put_data,
            "SendData": self._send_data,
            "OpenSource": self._open_source,
            "FeedData": self._feed_data,
        }

    def leave(self) -> None:
        """Ends the loops of replicas: their run goes on with other workers."""
        for loop in self._loops.values():
            if isinstance(loop, LoopRun):
                loop.leave()

    def stop(self) -> None:
        """Asks all loops to end after their current step."""
        for loop in self._loops.values():
            loop.stop()

    async def wait_ended(self) -> None:
        """Waits until no loop runs, and each has told what it did."""
        await self._none.wait()

    def peer_lost(self, peer: TaskName) -> None:
        """Tells loops that a task went away."""
        for loop in list(self._loops.values()):
            if isinstance(loop, ArbiterLoop):
                loop.peer_lost(peer)

    def forget_data(self, containers: Sequence[str]) -> None:
        """Drops the data sets of these containers; of none: all."""
        ends = tuple(f"{container}/" for container in containers)
        for name in list(self._data):
            if not containers or name in containers or name.startswith(ends):
                del self._data[name]

    async def _put_data(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        with reading("a data set"):
            arrays = dict(zip(body.fields, request.tensors, strict=True))
            self._data[body.name] = ArrayReader(arrays)
        yield frame(empty=pb.Empty())

    async def _send_data(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        reader = self._data.get(body.name)
        if not isinstance(reader, ArrayReader):
            raise DataError(f"{self._task} has no arrays of a data set '{body.name}'")
        order = pb.PutData(name=body.name, fields=list(reader.arrays))
        arrays = list(reader.arrays.values())
        yield await self._context.transport.ask(
            self._address(TaskName(body.task)),
            "PutData",
            frame(put_data=order, tensors=arrays),
            timeout_s=bulk_timeout_s(sum(array.nbytes for array in arrays)),
        )

    async def _open_source(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        with reading("the data source"):
            spec = dict(json.loads(body.source))
        allowed = self._context.allow_sources
        index = DeviceSpec.from_string(self._task).task
        reader = await self._shell.run(lambda: open_source(spec, allowed, index))
        self._data[body.name] = reader
        yield frame(source_info=source_info(reader))

    async def _feed_data(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        if body.about:
            with reading("a data set that its client reads"):
                self._data[body.name] = FedReader.from_json(body.about)
            yield frame(wanted_data=pb.WantedData())
            return
        reader = self._data.get(body.name)
        if not isinstance(reader, FedReader):
            raise DataError(
                f"{self._task} has no data set '{body.name}' that its client reads; "
                "it may have been restarted"
            )
        reader.take(body, tuple(request.tensors))
        yield await reader.next_request()

    async def _run_loop(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        failpoint("order.received")
        self._terms.begin(order.run, order.term, order.loop)
        failpoint("order.accepted")
        if order.loop in self._loops:
            raise ClusterBusyError(f"loop '{order.loop}' already runs on {self._task}")
        with reading(f"the order of loop '{order.loop}'"):
            loop = self._make_loop(order)
        self._loops[order.loop] = loop
        self._none.clear()
        if isinstance(loop, ArbiterLoop):
            self._dealers.loop_begins(order.loop, loop)
        for early in [one for one in self._early if one.loop == order.loop]:
            self._early.remove(early)
            # When it has begun.
            asyncio.get_running_loop().call_soon(self._tell, early)
        try:
            async for report in loop.reports():
                yield report
        finally:
            del self._loops[order.loop]
            self._keep(order.loop, loop)
            if not self._loops:
                self._none.set()
            if isinstance(loop, ArbiterLoop):
                self._dealers.loop_ends(order.loop)

    def _keep(self, name: str, loop: LoopRun | ArbiterLoop) -> None:
        self._ended[name] = loop.record
        if len(self._ended) > _KEPT:
            self._ended.popitem(last=False)

    def _make_loop(self, order: pb.RunLoop) -> LoopRun | ArbiterLoop:
        if order.HasField("sync"):
            return ArbiterLoop(
                *(order, self._driver, self._gates, self._context.clock),
                self._shell.run,
                self._ask_whether_there(TaskName(order.master)),
            )
        if order.data not in self._data:
            raise DataError(
                f"{self._task} has no data set '{order.data}' (it may have been "
                "restarted); call fit again to upload the data",
                **{"task": self._task, LOST_DATA: order.data},
            )
        times, part = PieceTimes(), self._part(order)
        feed = self._feed(order, self._data[order.data], times, part)
        return LoopRun(order, feed, self._driver, self._context.clock, times, part)

    def _part(self, order: pb.RunLoop) -> SumPart | None:
        """Returns the part of a loop in secure sums; None: it has none."""
        if (rule := sums_of(order)) is None:
            return None
        plan = SlotPlan.from_dict(json.loads(order.data_plan))
        dealer = TaskName(order.dealer)
        address = "" if dealer == self._task else self._address(dealer)

        async def send(message: pb.SumMessage) -> pb.SumAnswer:
            message.run, message.handle = order.data_run, order.handle
            if dealer == self._task:
                return await self._dealers.sum(message)
            reply = await self._context.transport.ask(
                address,
                "Master.SecureSum",
                frame(sum_message=message),
                timeout_s=ANSWER_S + CONTROL_S,
            )
            answer: pb.SumAnswer = body_of(reply)
            return answer

        return SumPart(self._task, rule, plan, send, self._shell.run)

    def _feed(
        self,
        order: pb.RunLoop,
        reader: Reader | FedReader,
        times: PieceTimes,
        part: SumPart | None = None,
    ) -> DataFeed:
        if order.data_plan:
            plan = SlotPlan.from_dict(json.loads(order.data_plan))
        else:
            plan = SlotPlan(
                reader.parts, order.batch_size, order.seed, shuffle=reader.shuffle
            )
        if order.data_run:
            ask = self._ask_master(order, times)
        else:
            own = Dispatch(plan, budget=order.steps, workers=1, skip=order.first_step)
            ask = deal_alone(own)
        if part is not None:
            ask = part.asking(ask)
        feeds = dict(zip(sorted(reader.fields), order.data_feeds, strict=False))
        # A dealer of synchronous training tells no answers that were lost apart.
        supervised = bool(order.data_run) and not order.batch_feed
        batches = BatchReader(plan, reader, self._shell, feeds, order.replica)
        if order.pieces and isinstance(reader, FedReader):
            raise DataError(
                f"loop '{order.loop}' takes several batches at a time, and its client "
                "reads them; give arrays, or a jg.Source that the workers read"
            )
        return DataFeed(
            *(batches, ask, self._context.clock),
            supervised=supervised,
            pieces=order.pieces,
        )

    def _ask_whether_there(self, master: TaskName) -> AskMaster | None:
        address = self._context.addresses.get(master)
        if master == self._task or address is None:
            return None
        question = frame(empty=pb.Empty())
        ask = self._context.transport.ask
        return lambda: ask(address, "TaskStatus", question, timeout_s=CONTROL_S)

    def _ask_master(self, order: pb.RunLoop, times: PieceTimes) -> Ask:
        dealer = TaskName(order.dealer)
        address = "" if dealer == self._task else self._address(dealer)

        async def ask(
            done: int, batches: int, idle: bool, received: int
        ) -> pb.DataDeal:
            question = pb.AskData(
                run=order.data_run,
                loop=order.loop,
                done=done,
                batches=batches,
                idle=idle,
                handle=order.handle if order.batch_feed else "",
                received=received,
                piece_s=times.piece_s,
            )
            if dealer == self._task:
                return await self._dealers.ask(question)
            try:
                reply = await self._context.transport.ask(
                    address,
                    "Master.AskData",
                    frame(ask_data=question),
                    timeout_s=ANSWER_S + CONTROL_S,
                )
            except (ClusterUnreachableError, TaskLostError) as error:
                if "address" in error.details:  # else it is the answer
                    error.details["task"] = dealer
                raise
            deal: pb.DataDeal = body_of(reply)
            return deal

        return ask

    def _address(self, task: TaskName) -> Address:
        """Returns where a task is that an order names.

        No order names an address: a caller cannot choose what is dialled, and is shown
        the token, or sent data.

        Raises:
          UnknownDeviceError: the cluster of this task has no such task.
        """
        if task not in self._context.addresses:
            raise UnknownDeviceError(
                f"{self._task} should call '{task}', and its cluster has no such task; "
                "give all tasks one cluster description",
                task=task,
            )
        return self._context.addresses[task]

    async def _stop_loop(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        self._terms.check(body.run, body.term, takes_over=body.takes_over)
        if body.account:
            yield await self._account(body)
            return
        if body.go_on:
            loop = self._loops.get(body.loop)
            stood = loop is not None and loop.go_on(body.go_on)
            halted = body.go_on if stood else 0
            yield frame(loop_report=pb.LoopReport(halted=halted))
            return
        if body.loop in self._loops:
            self._tell(body)
        elif body.loop and body.loop not in self._ended:
            self._early.append(body)
        elif not body.loop:  # another master says so, and asks for what it may not know
            yield frame(loop_report=known_of_run(self._terms, body))
            return
        yield frame(empty=pb.Empty())

    async def _open_gate(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        # A gate that another master opened since would let nobody through.
        self._terms.check(order.run, order.term)
        self._gates.open(order)
        yield frame(empty=pb.Empty())

    def _tell(self, order: pb.StopLoop) -> None:
        loop = self._loops.get(order.loop)
        if isinstance(loop, ArbiterLoop) and order.lost:
            loop.replica_lost(TaskName(order.lost))
        elif isinstance(loop, LoopRun) and order.halt:
            loop.halt(order.halt, bounded_s(order.timeout_s))
        elif loop is not None:
            self._stop(loop, pause=order.pause)

    def _stop(self, loop: LoopRun | ArbiterLoop, *, pause: bool) -> None:
        if isinstance(loop, ArbiterLoop):
            loop.stop(pause=pause)
        else:
            loop.stop()

    async def _account(self, order: pb.StopLoop) -> Frame:
        loop, record = self._loops.get(order.loop), self._ended.get(order.loop)
        if loop is not None:
            self._stop(loop, pause=order.pause)
            record = loop.record
        if record is None:
            raise TaskLostError(
                f"{self._task} knows of no loop '{order.loop}': it was never begun "
                "there, or the task was started again, or ended it many loops ago",
                task=self._task,
                loop=order.loop,
            )
        return await record.account(order.after, bounded_s(order.timeout_s))


def known_of_run(terms: MasterTerms, order: pb.StopLoop) -> pb.LoopReport:
    """Returns what a task knows of a run, for a master that may not have read it.

    Args:
      terms: of the task.
      order: who is the master, and perhaps where the variables of the run lie now.

    Raises:
      FencedError: a later master of that run was here already.
    """
    if order.HasField("switch"):
        terms.switch(order.run, order.term, order.switch.SerializeToString())
    known = pb.LoopReport(loop=terms.newest_loop(order.run))
    if switch := terms.newest_switch(order.run):
        known.rescaled.ParseFromString(switch)
    return known
