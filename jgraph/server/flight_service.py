"""Flight service: what a task noted of its last steps, and XLA's profile of it."""

import asyncio
import math
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, final

import jax
import numpy as np

from jgraph.clock import clock_identity
from jgraph.cluster.methods import Answer
from jgraph.errors import ClusterBusyError, ConfigError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.flight import ROWS, FlightRecorder, FlownProgram
from jgraph.server.task_context import TaskContext

MOST_PROFILE_S: Final = 60.0
MOST_WHOLE_S: Final = 3600.0
"""Whoever asks that every step be noted is forgotten after so long."""


@final
class FlightService:
    """Answers who asks for the timeline of a task.

    Args:
      context: of the task.
      flight: what it notes.
    """

    def __init__(self, context: TaskContext, flight: FlightRecorder) -> None:
        self._context = context
        self._flight = flight
        self._identity = clock_identity()
        self._profiling = False
        self.methods: dict[str, Answer] = {
            "Flight": self._records,
            "Profile": self._profile,
        }

    async def noted(
        self, kind: str, label: str, replies: AsyncIterator[Frame]
    ) -> AsyncIterator[Frame]:
        """Passes replies on, and notes how long they took.

        Args:
          kind: of the note.
          label: of the note.
          replies: of a call.
        """
        began = self._context.clock.now()
        async for reply in replies:
            yield reply
        self._flight.note(kind, label, began, self._context.clock.now())

    def client_phases(self, body: pb.RegisterProgram) -> None:
        """Notes what a client did before it registered a program."""
        now = self._context.clock.now()
        for phase in body.phases:
            began = now - phase.ago_s
            self._flight.note("client", phase.name, began, began + phase.seconds)

    async def _records(self, request: Frame) -> AsyncIterator[Frame]:
        received_s, body = self._context.clock.now(), body_of(request)
        if body.whole_s > 0:
            self._flight.note_all(received_s + min(body.whole_s, MOST_WHOLE_S))
        answer = pb.Flight(
            received_s=received_s, clock=self._identity, last=self._flight.last
        )
        tensors: list[np.ndarray[Any, Any]] = []
        if not body.no_records:
            since_s = received_s - body.last_s if body.last_s > 0 else 0.0
            found = self._flight.after(body.after, since_s)
            known, index = set(body.known), {h: n for n, h in enumerate(found.programs)}
            answer.since_s = found.since_s
            answer.handles.extend(index)
            answer.programs.extend(
                _program(handle, program)
                for handle, program in found.programs.items()
                if handle not in known
            )
            answer.notes.extend(
                pb.FlightNote(
                    kind=note.kind,
                    label=note.label,
                    began_s=note.began_s,
                    ended_s=note.ended_s,
                )
                for note in found.notes
            )
            steps = [(index[handle], number) for handle, number in found.steps]
            tensors = [np.array(steps, np.int64).reshape(-1, 2), found.times]
        answer.answered_s = self._context.clock.now()
        yield frame(flight=answer, tensors=tensors)

    async def _profile(self, request: Frame) -> AsyncIterator[Frame]:
        seconds = body_of(request).seconds
        if not (math.isfinite(seconds) and 0 < seconds <= MOST_PROFILE_S):
            raise ConfigError(
                f"{self._context.task} profiles for more than 0 and at most "
                f"{MOST_PROFILE_S:g} seconds, not {seconds:g}; ask for 5"
            )
        if self._profiling:
            raise ClusterBusyError(
                f"{self._context.task} is being profiled for somebody else, and XLA "
                "keeps one profile at a time; ask again when that is over"
            )
        self._profiling = True
        try:
            with tempfile.TemporaryDirectory(prefix="jgraph-profile-") as folder:
                await asyncio.to_thread(jax.profiler.start_trace, folder)
                try:
                    await asyncio.sleep(seconds)
                finally:
                    await asyncio.to_thread(jax.profiler.stop_trace)
                files = await asyncio.to_thread(_files_in, folder)
        finally:
            self._profiling = False
        names = pb.ProfileFiles(names=list(files))
        yield frame(profile_files=names, tensors=list(files.values()))


def recorder_rows() -> int:
    """Returns how much the tasks of this process note: nothing by JGRAPH_FLIGHT=0."""
    return 0 if os.environ.get("JGRAPH_FLIGHT") == "0" else ROWS


def _files_in(folder: str) -> dict[str, np.ndarray[Any, Any]]:
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): np.fromfile(path, np.uint8)
        for path in files
    }


def _program(handle: str, program: FlownProgram) -> pb.FlightProgram:
    nodes = [
        pb.FlightNode(
            kind=node.kind,
            label=node.label,
            nbytes=node.nbytes,
            peer=node.peer or "",
            key=node.key,
        )
        for node in program.nodes
    ]
    return pb.FlightProgram(
        handle=handle, name=program.name, driver=program.driver, nodes=nodes
    )
