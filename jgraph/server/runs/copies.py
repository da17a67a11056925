"""Copies and logs of a run's parameter servers, which take the place of lost ones.

Each ps has a stream of what its state changes by. A follower on the next ps applies
that to variables of its own, or the ps writes it to a log. After a loss the copy
becomes the state of the ps, in the variables that the run has; then all streams begin
anew.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from jgraph.cluster.deadlines import COMPILE_S, REPLAY_S, bulk_timeout_s
from jgraph.coordination.run.same_version import Ask, Differ, meet
from jgraph.coordination.run.stand_ins import ring
from jgraph.errors import CopyLostError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.plan.program.replay import changing, is_recorded, replayed
from jgraph.plan.program.replicas import is_own
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.program_codec import encode_program
from jgraph.server.runs.peers import Peers, stand_ins_of
from jgraph.server.runs.ps_setup import container_of, first_step_of, ps_task
from jgraph.server.runs.worker_setup import WorkerSetup

_LOG = logging.getLogger("jgraph.recover")


@final
@dataclass(frozen=True, slots=True)
class NextCopies:
    """Streams of a run as they will be with other ps, beside those that are kept.

    Attributes:
      ps: how many there are to be.
      streams: one of each.
    """

    ps: int
    streams: list[pb.RunCopy]


@final
@dataclass(slots=True)
class RunCopies:
    """The copies, or the logs, of the ps of one run.

    Args:
      order: what the client said of the run; its streams are changed.
      peers: to the tasks.
      workers: has the programs.

    Attributes:
      began: updates of the model when the streams began.
    """

    order: pb.OpenRun
    peers: Peers
    workers: WorkerSetup
    began: int = field(init=False)

    def __post_init__(self) -> None:
        self.began = first_step_of(self.order)

    @property
    def is_kept(self) -> bool:
        """Whether the run has any."""
        return self.order.HasField("copies")

    @property
    def backups(self) -> dict[TaskName, TaskName]:
        """Who has the copy of what a task holds; none: it is in a log, or nowhere."""
        return {TaskName(s.task): TaskName(s.backup) for s in self._streams if s.backup}

    @property
    def _streams(self) -> list[pb.RunCopy]:
        """Those that are kept: one that holds all there is has nobody for a copy."""
        # Copies can undo, logs cannot.
        return [one for one in self._there if one.backup or not one.undoes]

    @property
    def _there(self) -> list[pb.RunCopy]:
        """Those of tasks that hold something now."""
        away = stand_ins_of(self.order)
        return [one for one in self.order.copies.streams if one.task not in away]

    # ------------------------------------------------------------ what is recorded

    async def admit(
        self, handle: str, number: int, to: NextCopies | None = None
    ) -> None:
        """Records what the steps of a program change.

        Args:
          handle: of the program; none of its steps is under way.
          number: which of the recorded programs it is.
          to: which streams; None: those that are kept.

        Raises:
          JGError: a ps does not answer.
        """
        if not self.is_kept:
            return
        copies = self.order.copies
        updates = copies.HasField("updates") and copies.updates == number
        program = self._program(number, None if to is None else to.ps)
        for one in self._streams if to is None else to.streams:
            if is_recorded(program, TaskName(one.task), updates=updates):
                await self._keep(one, {handle: number}, updates=updates)

    async def _keep(
        self,
        one: pb.RunCopy,
        programs: Mapping[str, int],
        *,
        updates: bool = False,
        without: Collection[str] = (),
    ) -> None:
        order = pb.KeepRecords(
            stream=one.stream,
            container=container_of(self.order),
            handles=list(programs),
            programs=list(programs.values()),
            backup=one.backup,
            updates=updates,
            undoes=one.undoes,
            without=without,
        )
        await self._call(one.task, "KeepRecords", frame(keep_records=order), one.nbytes)

    def _program(self, number: int, ps: int | None = None) -> Program:
        return self.workers.program(self.order.copies.handles[number], ps)

    async def _call(self, task: str, method: str, request: Frame, nbytes: int) -> None:
        limit_s = bulk_timeout_s(nbytes)
        await self.peers.call(TaskName(task), method, request, timeout_s=limit_s)

    # ------------------------------------------------------------ after a loss

    async def part_of(self, task: TaskName) -> pb.StandIn:
        """Returns what a task holds, as who has the copy of it knows.

        Raises:
          JGError: that one does not answer.
        """
        (one,) = [stream for stream in self._streams if stream.task == task]
        query = frame(variable_query=pb.VariableQuery(containers=[one.stream]))
        reply = await self.peers.call(TaskName(one.backup), "Variables", query)
        rows = body_of(reply).variables
        names = [row.name for row in rows if not is_own(row.name)]
        return pb.StandIn(task=task, by=one.backup, variables=names, nbytes=one.nbytes)

    async def restore(
        self, lost: Collection[TaskName], away: Collection[TaskName] = ()
    ) -> int | None:
        """Gives lost ps what is kept of them; in synchronous training all one version.

        Args:
          lost: they have processes that hold nothing, or none.
          away: the copies of these become part of what their tasks hold.

        Returns:
          How many updates the model has; None: nobody counts them together.

        Raises:
          CopyLostError: it is not kept, or in different versions.
          JGError: a ps does not answer.
        """
        streams = {TaskName(one.task): one for one in self._streams}
        if missing := sorted(set(lost) - streams.keys()):
            raise CopyLostError(
                f"there was no copy of what {missing[0]} held: no other task was there "
                "to have one",
                task=missing[0],
            )
        counting = self._counted() & streams.keys()
        losses = set(lost) & streams.keys()
        for task in losses - counting:
            await self._kept(streams[task])
        held = {
            task: range(0) if task in losses else await self._hold(streams[task])
            for task in sorted(counting)
        }
        copies: dict[TaskName, range] = {}
        while isinstance(met := meet(held, copies), Ask):
            copies |= {task: await self._kept(streams[task]) for task in met.tasks}
        if isinstance(met, Differ):
            each = [f"{t} has {list(v)}" for t, v in sorted(met.versions.items())]
            raise CopyLostError(
                "what the ps hold, and what is kept of it, is of different synchronous "
                f"updates: {', '.join(each)}"
            )
        for task in counting:
            if task in met.again:
                await self._end(streams[task], met.version)
            else:
                await self._hold(streams[task], met.version)
        for task in met.again | (losses - counting):
            one = streams[task]
            if task in away:
                await self._move(TaskName(one.backup), one.stream, beside=True)
                _LOG.info("%s has the part of %s", one.backup, task)
                continue
            await self._take_place(one)
            _LOG.info("%s has what was kept of its process before", task)
        return self.began + met.version if counting else None

    def _counted(self) -> set[TaskName]:
        """Returns the ps whose synchronous updates are counted: who makes some."""
        copies = self.order.copies
        if not copies.HasField("updates"):
            return set()
        partitions = self._program(copies.updates).partitions
        return {part.task for part in partitions if changing(part)}

    async def _hold(self, one: pb.RunCopy, version: int | None = None) -> range:
        """Lets no update change what a ps holds; returns the versions it can have."""
        order = pb.EndRecords(stream=one.stream, source=True, version=version)
        return await self._ended(one.task, order)

    async def _kept(self, one: pb.RunCopy) -> range:
        """Ends a copy, or reads a log; returns the versions that it can have."""
        if not one.backup:
            await self._follow(one, TaskName(one.task), REPLAY_S)
        return await self._end(one)

    async def _end(self, one: pb.RunCopy, version: int | None = None) -> range:
        order = pb.EndRecords(stream=one.stream, version=version)
        return await self._ended(one.backup or one.task, order)

    async def _ended(self, task: str, order: pb.EndRecords) -> range:
        request = frame(end_records=order)
        reply = await self.peers.call(
            TaskName(task), "EndRecords", request, timeout_s=bulk_timeout_s(0)
        )
        body = body_of(reply)
        return range(body.first, body.end)

    async def _take_place(self, one: pb.RunCopy) -> None:
        """Makes the copy of a ps what the ps holds."""
        there = one.stream
        if one.backup:
            # The other way: who has the copy tells the ps all that is in it.
            there = f"{one.stream}-home"
            take = pb.TakeRecords(stream=there, src=one.backup)
            await self._call(one.task, "TakeRecords", frame(take_records=take), 0)
            keep = pb.KeepRecords(stream=there, container=one.stream, backup=one.task)
            request = frame(keep_records=keep)
            await self._call(one.backup, "KeepRecords", request, one.nbytes)
            await self._ended(one.task, pb.EndRecords(stream=there))
        await self._move(TaskName(one.task), there)
        if one.backup:
            await self._reset(TaskName(one.backup), [there])

    async def _move(self, task: TaskName, there: str, *, beside: bool = False) -> None:
        """Makes variables of a container those of the run."""
        into = container_of(self.order)
        move = pb.MoveVariables(container=there, into=into, beside=beside)
        await self._call(task, "MoveVariables", frame(move_variables=move), 0)

    # ------------------------------------------------------------ anew

    async def open(self, name: str, step: int) -> None:
        """Begins all streams anew, with what the ps hold now.

        Args:
          name: of this time.
          step: updates of the model.

        Raises:
          JGError: a ps does not answer.
        """
        there = self._there
        old = [one.stream for one in self.order.copies.streams]
        backups = ring(TaskName(one.task) for one in there)
        for one in there:
            one.stream = f"{one.stream.partition('-back.')[0]}-{name}"
            if one.undoes:
                one.backup = backups.get(TaskName(one.task), "")
        await asyncio.gather(*map(self._begin, self._streams))
        self.began = step
        await asyncio.gather(*(self._reset(TaskName(s.task), old) for s in there))

    async def _begin(self, one: pb.RunCopy) -> None:
        if one.backup:
            await self._follow(one, TaskName(one.backup), bulk_timeout_s(0))
        await self._keep(one, {})

    # ------------------------------------------------------------ of other ps

    def next(self, ps: int, number: int) -> NextCopies | None:
        """Returns the streams of so many ps; None: none are kept.

        Args:
          ps: how many there are to be.
          number: of the rescale.
        """
        if not self.is_kept:
            return None
        tasks = [ps_task(index) for index in range(ps)]
        like = self.order.copies.streams[0]
        backups = ring(tasks) if like.backup else {}
        streams = [
            pb.RunCopy(
                task=task,
                stream=self._rescaled(index, number),
                backup=backups.get(task, ""),
                nbytes=like.nbytes,
                undoes=like.undoes,
            )
            for index, task in enumerate(tasks)
        ]
        return NextCopies(ps, streams)

    def _rescaled(self, index: int, number: int) -> str:
        """Returns the name of the stream of a ps after a rescale."""
        first = self.order.copies.streams[0].stream.partition("-back.")[0]
        return f"{first.rpartition('.ps')[0]}.ps{index}-back.rescaled.{number}"

    async def ready(self, to: NextCopies) -> None:
        """Gives tasks the programs by which they will follow others.

        Raises:
          JGError: a task does not answer.
        """
        for one in to.streams:
            await self._give_followed(one, TaskName(one.backup or one.task), to.ps)

    async def begin(self, to: NextCopies, leave: Mapping[str, Collection[str]]) -> None:
        """Begins streams beside those that are kept, with what ps hold now.

        Args:
          to: these; ``ready`` has given the programs.
          leave: variables of each ps that will not be there.

        Raises:
          JGError: a ps does not answer.
        """

        async def begin(one: pb.RunCopy) -> None:
            if one.backup:
                await self._take(one, TaskName(one.backup), to.ps)
            await self._keep(one, {}, without=leave.get(one.task, ()))

        await asyncio.gather(*map(begin, to.streams))

    def switch(self, streams: Iterable[pb.RunCopy], step: int) -> None:
        """Takes note that these streams are kept from now on.

        Args:
          streams: the new ones.
          step: updates of the model when they began.
        """
        new = pb.RunCopies(streams=streams)
        del self.order.copies.streams[:]
        self.order.copies.streams.extend(new.streams)
        self.began = step

    async def drop(self, streams: Iterable[pb.RunCopy]) -> None:
        """Drops streams that are not kept; of a task that is gone nothing is left."""
        names = defaultdict[str, list[str]](list)
        for one in streams:
            for task in {one.task, one.backup or one.task}:
                names[task].append(one.stream)
        calls = [self._reset(TaskName(task), some) for task, some in names.items()]
        await asyncio.gather(*calls, return_exceptions=True)

    async def tidy(self, most: int, number: int) -> None:
        """Drops what a master before had begun for a rescale of this number."""
        if self.is_kept:
            tasks = [ps_task(index) for index in range(most)]
            names = [self._rescaled(index, number) for index in range(most)]
            calls = [self._reset(task, names) for task in tasks]
            await asyncio.gather(*calls, return_exceptions=True)

    # ------------------------------------------------------------ ends

    async def close(self) -> None:
        """Drops the streams of the run, which is over."""
        await self.drop(self.order.copies.streams)

    async def _follow(self, one: pb.RunCopy, onto: TaskName, limit_s: float) -> None:
        """Makes a task apply what a ps records, or has in its log."""
        await self._give_followed(one, onto)
        await self._take(one, onto, limit_s=limit_s)

    def _followed(
        self, one: pb.RunCopy, ps: int | None
    ) -> Iterator[tuple[str, Program]]:
        """Yields each recorded program, and its name where it is repeated; or none."""
        copies, src = self.order.copies, TaskName(one.task)
        for number in range(len(copies.handles)):
            program, updates = self._program(number, ps), copies.updates == number
            recorded = is_recorded(program, src, updates=updates)
            yield f"{one.stream}.{number}" if recorded else "", program

    async def _give_followed(
        self, one: pb.RunCopy, onto: TaskName, ps: int | None = None
    ) -> None:
        """Gives a task the programs by which it follows a ps."""
        for handle, program in self._followed(one, ps):
            if handle:
                again = replayed(program, TaskName(one.task), onto, one.stream)
                message, tensors = encode_program(again)
                body = pb.RegisterProgram(handle=handle, program=message)
                await self.peers.register(frame(register_program=body, tensors=tensors))

    async def _take(
        self,
        one: pb.RunCopy,
        onto: TaskName,
        ps: int | None = None,
        limit_s: float | None = None,
    ) -> None:
        handles = [handle for handle, _ in self._followed(one, ps)]
        order = pb.TakeRecords(stream=one.stream, src=one.task, handles=handles)
        limit_s = bulk_timeout_s(0) if limit_s is None else limit_s
        request = frame(take_records=order)
        await self.peers.call(onto, "TakeRecords", request, timeout_s=limit_s)

    async def _reset(self, task: TaskName, containers: list[str]) -> None:
        request = frame(reset=pb.Reset(containers=containers))
        await self.peers.call(task, "Reset", request, timeout_s=COMPILE_S)
