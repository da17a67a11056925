"""Worker setup: gives a restarted task the programs, data and values of a run."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, final

from jgraph.cluster.deadlines import COMPILE_S, CONTROL_S
from jgraph.cluster.loop_messages import check_source, first_handle
from jgraph.errors import ConfigError, DataError, JGError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.plan.program.replicas import for_replica
from jgraph.plan.program.stand_in import standing_in
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.program_codec import decode_program, encode_program
from jgraph.server.runs.peers import Peers, stand_ins_of
from jgraph.server.runs.run_client import RunClient

_LOG = logging.getLogger("jgraph.recover")
_DATA_S: Final = 3600.0
"""For data that one task sends another; how large it is only that one knows."""


@final
@dataclass(slots=True)
class WorkerSetup:
    """Gives tasks of one run their programs, data and first values again.

    Args:
      order: what the client said of the run.
      peers: to the tasks.

    Attributes:
      client: may have the data; None: there is none.
      ps: for how many ps programs are given; 0: that does not change.
    """

    order: pb.OpenRun
    peers: Peers
    client: RunClient | None = field(init=False, default=None)
    ps: int = field(init=False, default=0)
    _cuts: defaultdict[int, dict[str, Frame]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """Programs by handle, for each number of ps; 0: that does not change."""
    _before: defaultdict[TaskName, list[Frame]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def keep(self, request: Frame) -> None:
        """Keeps a program of the run; see ``Master.KeepProgram``."""
        body = body_of(request)
        if body.handle:
            self._cuts[body.ps][body.handle] = request
        else:
            self._before[TaskName(body.program.driver)].append(request)

    def keep_for(self, loop: pb.RunLoop, like: pb.RunLoop) -> list[Frame]:
        """Keeps the programs of a worker that joins, made from those of another.

        Args:
          loop: of the one that joins; its handle names its program.
          like: of the other.

        Returns:
          What is kept, for who keeps it as well.
        """
        old, new = TaskName(like.task), TaskName(loop.task)

        def made(frame_kept: Frame, handle: str, ps: int = 0) -> Frame:
            original = decode_program(body_of(frame_kept).program, frame_kept.tensors)
            program = for_replica(
                original.rename_task(old, new), loop.replica, of=like.replica
            )
            message, tensors = encode_program(program)
            body = pb.RegisterProgram(
                handle=handle, program=message, run=loop.run, ps=ps
            )
            return frame(register_program=body, tensors=tensors)

        before = [] if new in self._before else self._before.get(old, [])
        first = first_handle(like.handle)
        programs = [
            made(cut[first], loop.handle, ps)
            for ps, cut in self._cuts.items()
            if first in cut
        ]
        programs += [made(one, "") for one in before]
        for one in programs:
            self.keep(one)
        return programs

    async def prepare(self, loop: pb.RunLoop, number: int) -> str:
        """Prepares the worker of a loop; returns the handle of its program.

        Args:
          loop: what it did last.
          number: of this time.

        Raises:
          JGError: the worker, or one it works with, does not answer.
        """
        task = TaskName(loop.task)
        await self.drop(loop.handle)
        await self.give_data(task, loop.data)  # before anything is compiled for it
        suffix = _suffix(loop, number)
        handle = await self.give(loop.handle, suffix, self.ps, home=[task])
        await self.begin(task, handle)
        return handle

    def next_handle(self, loop: pb.RunLoop, number: int) -> str:
        """Returns the handle that ``prepare`` gives."""
        return f"{first_handle(loop.handle)}~{_suffix(loop, number)}"

    async def begin(self, task: TaskName, once: str) -> None:
        """Gives a task the first values of what begins anew with its process.

        Args:
          task: a worker, or a ps.
          once: names this time.

        Raises:
          JGError: it does not answer.
        """
        for number, program in enumerate(self._before[task]):
            handle = f"{once}.{number}"
            step = frame(run_step=pb.RunStep(handle=handle, timeout_s=COMPILE_S))
            try:
                await self._register(program, handle)
                await self.peers.call(task, "RunStep", step, timeout_s=COMPILE_S)
            finally:
                await self.drop(handle)

    async def renew(self, handle: str, suffix: str) -> str:
        """Gives all tasks a program whose driver is another process; returns its name.

        It needs another one: steps of the driver before had the same numbers.

        Raises:
          JGError: a task does not answer.
        """
        await self.drop(handle)
        return await self.give(handle, suffix, self.ps)

    async def give(
        self,
        handle: str,
        suffix: str,
        ps: int,
        home: Collection[str] = (),
        *,
        all_sizes: bool = False,
    ) -> str:
        """Gives all tasks a program, cut for so many ps, under a new name.

        Args:
          handle: of it, whichever.
          suffix: of the new name.
          ps: how many.
          home: these tasks have their own parts again.
          all_sizes: compile for each number of rows that may come, too.

        Raises:
          JGError: a task does not answer.
        """
        original, new = self._kept(handle, ps), f"{first_handle(handle)}~{suffix}"
        if self._away(home):
            message, tensors = encode_program(self._program(original, home))
            body = pb.RegisterProgram(program=message)
            original = frame(register_program=body, tensors=tensors)
        await self._register(original, new, all_sizes=all_sizes)
        return new

    def program(self, handle: str, ps: int | None = None) -> Program:
        """Returns a program that is kept.

        Args:
          handle: of it.
          ps: for how many it is cut; None: as many as there are.

        Raises:
          ConfigError: there is none.
        """
        return self._program(self._kept(handle, ps))

    def _program(self, original: Frame, home: Collection[str] = ()) -> Program:
        """Returns a program as it is while some stand in for others."""
        program = decode_program(body_of(original).program, original.tensors)
        return standing_in(program, self._away(home))

    def _away(self, home: Collection[str]) -> dict[TaskName, TaskName]:
        away = stand_ins_of(self.order).items()
        return {task: by for task, by in away if task not in home}

    def _kept(self, handle: str, ps: int | None = None) -> Frame:
        cut = self._cuts[self.ps if ps is None else ps]
        if (first := first_handle(handle)) not in cut:
            raise ConfigError(f"the program '{first}' is not kept")
        return cut[first]

    async def _register(
        self, program: Frame, handle: str, *, all_sizes: bool = False
    ) -> None:
        body = pb.RegisterProgram(
            handle=handle, program=body_of(program).program, all_sizes=all_sizes
        )
        request = frame(register_program=body, tensors=program.tensors)
        await self.peers.register(request)

    async def drop(self, handle: str, *, settle: bool = False) -> None:
        """Makes all tasks refuse steps of a program, whoever still asks for some.

        With ``settle`` none of its steps changes anything on any task from here on.
        """
        body = pb.ProgramHandle(handle=handle, settle=settle)
        limit_s = COMPILE_S if settle else CONTROL_S
        calls = [
            self.peers.call(
                task,
                "UnregisterProgram",
                frame(program_handle=body),
                timeout_s=limit_s,
            )
            for task in self.peers.tasks()
        ]
        # Who does not answer does none.
        await asyncio.gather(*calls, return_exceptions=True)

    async def give_data(self, task: TaskName, name: str) -> None:
        """Gives a task a data set that another one has, or opens the source.

        Raises:
          DataError: nobody has it.
          SourceError: what it opens is not what others have.
          JGError: the client, which has it, cannot give it.
        """
        if self.order.source:
            source = pb.OpenSource(name=name, source=self.order.source)
            reply = await self.peers.call(
                task, "OpenSource", frame(open_source=source), timeout_s=COMPILE_S
            )
            if self.order.HasField("source_info"):
                check_source(task, body_of(reply), self.order.source_info)
            return
        if self.client is not None and self.order.client.gives_data:
            await self.client.ask("data", tasks=[task])
            return
        send = pb.SendData(name=name, task=task)
        others = [other for other in self.peers.tasks() if other != task]
        # The master has it, or a worker.
        for holder in sorted(others, key=lambda other: other != self.peers.task):
            try:
                request = frame(send_data=send)
                await self.peers.call(holder, "SendData", request, timeout_s=_DATA_S)
            except JGError as error:
                _LOG.debug("%s does not send '%s': %s", holder, name, error.message)
            else:
                return
        raise DataError(f"no task that answers has the data set '{name}' for {task}")


def _suffix(loop: pb.RunLoop, number: int) -> str:
    return f"{loop.term}.{number}"
