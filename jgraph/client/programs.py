"""Program registry of one client: registers, runs and unregisters its programs."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, final

from jgraph.client.connection import Connection, unique
from jgraph.clock import SystemClock
from jgraph.cluster.deadlines import COMPILE_S, CONTROL_S, bulk_timeout_s
from jgraph.cluster.in_process import run_in_process
from jgraph.coordination.run.recovery import is_loss
from jgraph.coordination.step.run_metadata import PartTimes
from jgraph.errors import (
    ClusterError,
    ClusterUnreachableError,
    DeadlineError,
    JGError,
)
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.program_codec import encode_program

STEP_S = 60.0
REGISTER_S: Final = COMPILE_S + CONTROL_S
_clock = SystemClock()


@final
class Programs:
    """Registers programs with the master, runs them, and takes them back."""

    def __init__(self, cluster: Connection) -> None:
        self._cluster = cluster
        self._handles: list[str] = []
        self._garbage: deque[str] = deque()
        self.losses = 0
        """How often tasks lost programs: one was lost and began anew, or all were taken
        back."""

    def __len__(self) -> int:
        return len(self._handles)

    def register(
        self,
        program: Program,
        name: str | None = None,
        phases: Sequence[tuple[str, float, float]] = (),
        timeout_s: float = REGISTER_S,
    ) -> str:
        """Compiles a program on its tasks and returns its handle.

        Args:
          program: to register.
          name: before the handle; that of the program if unset.
          phases: what was done for it before, from when to when, for a timeline.
          timeout_s: limit, in seconds.
        """
        self._take_back_garbage()
        handle = unique(name or program.name)
        message, tensors = encode_program(program)
        now = _clock.now()
        done = [
            pb.ClientPhase(
                name=f"{what} {program.name}", ago_s=now - began, seconds=ended - began
            )
            for what, began, ended in phases
        ]
        order = pb.RegisterProgram(handle=handle, program=message, phases=done)
        self._handles.append(handle)
        try:
            self._cluster.call(
                "Master.RegisterProgram",
                frame(register_program=order, tensors=tensors),
                timeout_s=timeout_s,
            )
        except BaseException:
            self.give_up(handle)  # some of its tasks may have it
            raise
        return handle

    def register_all(self, programs: Sequence[Program]) -> list[str]:
        """Compiles programs side by side and returns their handles.

        Raises:
          JGError: one cannot be registered; then none is.
        """
        with ThreadPoolExecutor(max(1, min(8, len(programs)))) as threads:
            registrations = [threads.submit(self.register, one) for one in programs]
        try:
            return [one.result() for one in registrations]
        except JGError:
            for one in registrations:
                if one.exception() is None:
                    self.give_up(one.result())
            self._take_back_garbage()
            raise

    def unregister(self, handle: str) -> None:
        """Makes all tasks forget a program, unless all were taken back since."""
        try:
            self._handles.remove(handle)
        except ValueError:  # by another thread, too
            return
        order = pb.ProgramHandle(handle=handle)
        self._cluster.call("Master.UnregisterProgram", frame(program_handle=order))

    def give_up(self, handle: str) -> None:
        """Takes a program back when the next one is registered; never waits."""
        self._garbage.append(handle)

    def _take_back_garbage(self) -> None:
        while (old := self._next_garbage()) is not None:
            with suppress(ClusterError):
                self.unregister(old)

    def _next_garbage(self) -> str | None:
        # Programs are registered side by side: another thread may take the last one.
        with suppress(IndexError):
            return self._garbage.popleft()
        return None

    def run(
        self,
        handle: str,
        arrays: Sequence[Any],
        timeout_s: float,
        driver: TaskName | None = None,
    ) -> list[Any]:
        """Runs one step and returns its fetches.

        Args:
          handle: of the program.
          arrays: its feeds, in order.
          timeout_s: limit for the step.
          driver: of the program; the master if unset.
        """
        cluster = self._cluster
        to = cluster.spec.address(driver) if driver else cluster.address
        try:
            fetches = run_in_process(to, handle, arrays)
        except JGError as error:
            self.losses += is_loss(error)
            raise
        if fetches is None:
            order = pb.RunStep(handle=handle, timeout_s=timeout_s)
            fetches = list(self._run(order, arrays, to).tensors)
        return fetches

    def run_traced(
        self, handle: str, arrays: Sequence[Any], timeout_s: float
    ) -> tuple[list[Any], list[PartTimes]]:
        """Runs one step as ``run`` does, and returns when its nodes ran as well."""
        order = pb.RunStep(handle=handle, timeout_s=timeout_s, trace=True)
        reply = self._run(order, arrays, self._cluster.address)
        rows = list(body_of(reply).parts)
        first = len(reply.tensors) - len(rows)
        parts = [
            PartTimes(TaskName(part.task), times, part.asked_s, part.told_s)
            for part, times in zip(rows, reply.tensors[first:], strict=True)
        ]
        return list(reply.tensors[:first]), parts

    def _run(self, order: pb.RunStep, arrays: Sequence[Any], to: Address) -> Frame:
        request = frame(run_step=order, tensors=arrays)
        spare_s = bulk_timeout_s(sum(array.nbytes for array in arrays))
        try:
            return self._cluster.call(
                "RunStep",
                request,
                timeout_s=order.timeout_s + spare_s,
                begin_s=order.timeout_s,
                to=to,
            )
        except JGError as error:
            self.losses += is_loss(error)
            raise

    def unregister_all(self) -> None:
        """Makes the tasks forget them all; who does not answer is not asked again."""
        self._garbage.clear()
        self.losses += 1
        for handle in list(self._handles):
            try:
                self.unregister(handle)
            except (ClusterUnreachableError, DeadlineError):
                return
            except ClusterError:  # one that is gone has forgotten it
                continue
