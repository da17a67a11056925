"""Durability of ps state in a run: a replica on the next ps, or a write-ahead log."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal, TypeAlias, final, get_args

from jgraph.client.cluster import Cluster
from jgraph.client.runs.replication import (
    keep_records,
    take_records,
)
from jgraph.client.session import Session
from jgraph.errors import ClusterError, ConfigError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.plan.program.replay import is_recorded, replayed
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.train.state.remote_arrays import total_nbytes
from jgraph.train.step.train_step import TrainStep

Durability: TypeAlias = Literal["checkpoint", "replica", "log"]
"""What outlives the loss of a ps: see ``AsyncPS``."""

DURABILITIES: Final[tuple[Durability, ...]] = get_args(Durability)


def check_durability(durability: object) -> None:
    """Refuses what is no level of durability.

    Raises:
      ConfigError: names those that are.

    Example:
      >>> check_durability("replica")
    """
    if durability not in DURABILITIES:
        raise ConfigError(
            f"durability is {durability!r}; it may be "
            f"{', '.join(map(repr, DURABILITIES[:-1]))} or {DURABILITIES[-1]!r}"
        )


def make_durable_copies(
    durability: Durability, cluster: Cluster, session: Session, step: TrainStep
) -> "Copies | None":
    """Returns what keeps copies for a strategy; None: nothing has to.

    Raises:
      ConfigError: a replica has nowhere to be.
    """
    if durability == "checkpoint":
        return None
    holders = [*cluster.tasks("ps"), *step.owners]
    if durability == "replica" and len(holders) < 2:
        raise ConfigError(
            "durability='replica' keeps a copy of each ps on another one, and the "
            "cluster has only one; start two, or save checkpoints with "
            "fit(checkpoint=…)"
        )
    return Copies(cluster, session, step, in_logs=durability == "log")


@final
class Copies:
    """Keeps the copies of one runner's variables.

    Args:
      cluster: with two ps, or owners, at least, unless the copies are logs.
      session: registers programs.
      step: whose variables.
      in_logs: what changes is written to a log of each ps, not done on another.
    """

    def __init__(
        self, cluster: Cluster, session: Session, step: TrainStep, *, in_logs: bool
    ) -> None:
        self._cluster = cluster
        self._session = session
        self._step = step
        self._ps: list[TaskName] = []
        self._in_logs = in_logs
        self._programs: list[Program] = []
        self._updates: int | None = None
        self._handles: list[str] = []
        self._times = 0

    @property
    def streams(self) -> list[str]:
        """Containers of the copies, of no other ones before."""
        name = f"{self._step.container}-{self._times}"
        return [f"{name}.ps{n}" for n in range(len(self._ps))]

    def open(self, programs: Sequence[Program], *, updates: int | None = None) -> None:
        """Copies what is there, and what changes from now on.

        Args:
          programs: what will change it, see ``admit``.
          updates: which of them makes synchronous updates; None: none does.
        """
        self._updates = updates
        self.end()
        # An owner may have lost its part to another one since.
        self._ps = [*self._cluster.tasks("ps"), *self._step.owners]
        self._times += 1
        self._cluster.reset(*self.streams)  # of who began a run that was attached to
        self._programs = list(programs)
        for src, dst in self._pairs():
            if src != dst:
                self._take(src, dst)
            self._keep(src, {})

    def admit(self, program: int, handles: Sequence[str]) -> None:
        """Keeps what the steps of a program change.

        Args:
          program: index into those of ``open``. What each ps does is the same for all
            its handles.
          handles: of the program; none of its steps is under way.
        """
        updates = program == self._updates
        for src in self._ps:
            if is_recorded(self._programs[program], src, updates=updates):
                self._keep(src, dict.fromkeys(handles, program), updates=updates)

    def about(self, handles: Sequence[str]) -> pb.RunCopies:
        """Returns what the master of a detached run is told of the copies.

        Args:
          handles: one of each program of ``open``.
        """
        copies = pb.RunCopies(handles=handles, updates=self._updates)
        for src in self._ps:
            copies.streams.add(
                task=src,
                stream=self._stream(src),
                backup=self._backup(src) or "",
                nbytes=self._nbytes,
                undoes=self._undoes,
            )
        return copies

    def end(self) -> None:
        """Drops the copies."""
        with suppress(ClusterError):  # of a task that is gone nothing is left
            for handle in self._handles:
                self._session.unregister(handle)
        if self._programs:
            self._cluster.reset(*self.streams)
        self._handles, self._programs = [], []

    def _pairs(self) -> list[tuple[TaskName, TaskName]]:
        """Returns each ps and the one with its copy: itself if that is a log."""
        other = self._ps if self._in_logs else [*self._ps[1:], self._ps[0]]
        return list(zip(self._ps, other, strict=True))

    def _stream(self, src: TaskName) -> str:
        return self.streams[self._ps.index(src)]

    def _take(self, src: TaskName, dst: TaskName) -> None:
        stream, again = self._stream(src), list[str]()
        for number, program in enumerate(self._programs):
            handle = ""
            if is_recorded(program, src, updates=number == self._updates):
                there = replayed(program, src, dst, stream)
                handle = self._session.register(there)
                self._handles.append(handle)
            again.append(handle)
        take_records(self._cluster, stream, src, dst, again)

    def _backup(self, src: TaskName) -> TaskName | None:
        return None if self._in_logs else dict(self._pairs())[src]

    def _keep(
        self, src: TaskName, programs: Mapping[str, int], *, updates: bool = False
    ) -> None:
        keep_records(
            self._cluster,
            self._stream(src),
            src,
            self._backup(src),
            programs,
            container=self._step.container,
            nbytes=self._nbytes,
            updates=updates,
            undoes=self._undoes,
        )

    @property
    def _undoes(self) -> bool:
        return self._updates is not None and not self._in_logs

    @property
    def _nbytes(self) -> int:
        shards = [spec for table in self._step.tables for _, spec in table.shards]
        tables = sum(spec.capacity_bytes for spec in shards)
        return total_nbytes(self._step.plain) + tables
