"""Parameters of a run where they are served: copies of dense ones, rows as they are.

Each parameter server is asked directly, by programs that need no other task: one reads
all its dense parameters, at one moment, and one looks rows of its tables up. So whether
another server, or the master, is there changes nothing.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.client.cluster import Cluster
from jgraph.client.values import in_pieces, joined, types_of, values_of
from jgraph.clock import Clock
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.errors import (
    ClusterBusyError,
    JGError,
    OverloadedError,
    UninitializedError,
)
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName, VariableKey
from jgraph.graph.rows.rows import unique_rows
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.placement.spread import nbytes_of
from jgraph.plan.plan import plan
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.serving.live.table_rows import LiveTable, TableRows, split_ids

_LOG = logging.getLogger("jgraph.serving")
Array: TypeAlias = np.ndarray[Any, Any]
LOOKUP_S: Final = 2.0
"""A parameter server that has not answered a lookup by then counts as lost."""
_CALL_S: Final = 250e-6
"""What a call takes of a task beside what that tells: bytes that come and go."""


@final
@dataclass(frozen=True, slots=True)
class DenseCopy:
    """Parameters that are not looked up by rows, and state, of one moment.

    Attributes:
      values: by name of the variable.
      step: updates that had been applied.
      at: when it was taken.
    """

    values: Mapping[str, jax.Array]
    step: int
    at: float


@final
@dataclass(frozen=True, slots=True)
class FoundRows:
    """What a lookup found.

    Attributes:
      tables: rows, by the name of their table.
      busy_s: for how long it kept the parameter server busy that it kept the longest.
    """

    tables: Mapping[str, TableRows]
    busy_s: float = 0.0


class Parameters(Protocol):
    """Where a served model's parameters come from."""

    @property
    def copy(self) -> DenseCopy:
        """The newest copy of the dense ones."""

    @property
    def lost(self) -> Mapping[TaskName, JGError]:
        """Tasks that do not answer, and what they were lost with."""

    async def refresh(self) -> None:
        """Takes a new copy; an error is kept in ``lost``, and the copy as it was."""

    async def rows(self, wanted: Mapping[str, Array]) -> FoundRows:
        """Returns rows of tables, by their ids, each of which is there once."""

    def close(self) -> None:
        """Drops what is held for this on other tasks."""


def why_lost(error: JGError) -> str:
    """Returns what became of a task that gives no parameters, in words."""
    if isinstance(error, UninitializedError):
        return "has no values of them: its Trainer was closed, or they lie elsewhere"
    return "does not answer"


def read_first(parameters: Parameters) -> None:
    """Takes the first copy.

    Raises:
      JGError: a parameter server does not answer.
    """
    event_loop.run(parameters.refresh(), "reading the parameters")
    for error in parameters.lost.values():
        raise error


@final
@dataclass(slots=True)
class _Server:
    """A parameter server.

    Attributes:
      task: which.
      dense: shards of dense variables that it has.
      shards: (table, number, variable) of shards of tables that it has.
      reads: programs that read ``dense``, one after the other.
      lookups: a program for each size.
      handles: of all of them once they are registered, in this order.
      address: where it is then.
      error: what it was lost with; None: it answers.
    """

    task: TaskName
    dense: list[Variable] = field(default_factory=list)
    shards: list[tuple[str, int, Variable]] = field(default_factory=list)
    reads: list[Program] = field(default_factory=list)
    lookups: list[Program] = field(default_factory=list)
    handles: list[str] = field(default_factory=list)
    address: str = ""
    error: JGError | None = None


@final
class RemoteParameters:
    """Parameters on the parameter servers of a cluster.

    Args:
      cluster: where they are.
      dense: variables of which copies are served.
      count: the variable that counts updates.
      tables: those of which rows are looked up.
      cache_rows: of each table, rows that are kept for when its server is lost.
      threads: where what blocks is done.
      clock: for ages.
      newest: returns all variables of the model, in a new list once they lie elsewhere;
        None: they stay where they are.
    """

    def __init__(
        self,
        cluster: Cluster,
        dense: Sequence[Variable],
        count: Variable,
        tables: Mapping[str, LiveTable],
        cache_rows: int,
        threads: Executor,
        clock: Clock,
        newest: Callable[[], Sequence[Variable]] | None = None,
    ) -> None:
        self._newest = newest
        self._variables = None if newest is None else newest()
        self._cluster = cluster
        self._session = cluster.session()
        self._threads = threads
        self._clock = clock
        self._count = count
        self._dense = [*dense, count]
        self._tables = tables
        self._container = f"{count.spec.container}/serve-{secrets.token_hex(4)}"
        self._holds_copies = False
        self._copy: DenseCopy | None = None
        self._caches = {
            name: table.cache(cache_rows)
            for name, table in tables.items()
            if cache_rows
        }
        self._servers = self._found(self._dense, tables)

    @property
    def copy(self) -> DenseCopy:
        """See ``Parameters.copy``."""
        assert self._copy is not None  # refreshed before it is served
        return self._copy

    @property
    def lost(self) -> Mapping[TaskName, JGError]:
        """See ``Parameters.lost``."""
        return {s.task: s.error for s in self._servers.values() if s.error is not None}

    # ------------------------------------------------------------ programs

    def _found(
        self, dense: Sequence[Variable], tables: Mapping[str, LiveTable]
    ) -> dict[TaskName, _Server]:
        """Returns who has what, and the programs that ask for it."""
        arrays = [t.variable for t in tables.values() if not t.is_hashed]
        tasks = self._session.variable_tasks([*dense, *arrays])
        servers: dict[TaskName, _Server] = {}

        def at(shard: Variable) -> _Server:
            # A shard of a hash table may be made by whoever looks it up first.
            task = tasks.get(shard.spec.key) or TaskName(str(shard.device.task_name))
            return servers.setdefault(task, _Server(task))

        for variable in dense:
            for shard in variable.shards:
                at(shard).dense.append(shard)
        for name, table in tables.items():
            for number, shard in enumerate(table.variable.shards):
                at(shard).shards.append((name, number, shard))
        sizes = range(max((len(t.counts) for t in tables.values()), default=0))
        for server in servers.values():
            server.reads = self._reads(server)
            if server.shards:
                server.lookups = [self._lookup(server, size) for size in sizes]
        return servers

    def _program(
        self,
        server: _Server,
        name: str,
        fn: Callable[..., Any],
        variables: Sequence[Variable],
        *args: Any,
    ) -> Program:
        with types_of(variables):
            graph, _ = trace(fn, *args, variables=variables, name=name)
            return plan(
                graph,
                tasks=self._cluster.tasks(),
                driver=server.task,
                default=DeviceSpec.from_string(server.task),
                platforms=self._cluster.platforms,
            ).program

    def _reads(self, server: _Server) -> list[Program]:
        """Returns what reads all that is dense there; of one moment, if it is much."""
        shards = server.dense
        pieces = in_pieces(shards)

        def read(piece: Sequence[Variable]) -> Program:
            return self._program(server, "serve_read", partial(values_of, piece), piece)

        if len(pieces) <= 1:
            return [read(piece) for piece in pieces]
        copies = [self._beside(server, shard) for shard in shards]
        self._holds_copies = True

        def copy() -> None:
            values = values_of(shards)
            for one, value in zip(copies, values, strict=True):
                one[...] = value

        first = self._program(server, "serve_copy", copy, [*shards, *copies])
        return [first, *(read(piece) for piece in in_pieces(copies))]

    def _beside(self, server: _Server, shard: Variable) -> Variable:
        # Never initialised: the copy is what writes it first.
        return Variable(
            shard.name,
            (shard.shape, shard.dtype, None),
            device=server.task,
            container=self._container,
        )

    def _lookup(self, server: _Server, size: int) -> Program:
        """Returns what looks rows up there; it changes nothing, of hash tables too."""
        shards = [shard for _, _, shard in server.shards]
        tables = [self._tables[name] for name, _, _ in server.shards]
        wanted = [
            jax.ShapeDtypeStruct((table.counts[size], 2), jnp.uint32)
            if table.is_hashed
            else jax.ShapeDtypeStruct((table.counts[size],), jnp.int32)
            for table in tables
        ]

        def lookup(*wanted: Any) -> list[Any]:
            ids = [
                unique_rows(
                    one,
                    rows=1 if table.is_hashed else shard.shape[0],
                    feature=table.variable.name,
                )[0]
                for table, shard, one in zip(tables, shards, wanted, strict=True)
            ]
            return [s[i] for s, i in zip(shards, ids, strict=True)]

        return self._program(server, "serve_rows", lookup, shards, *wanted).peeking()

    def _ready_at(self, variables: Sequence[Variable]) -> dict[TaskName, _Server]:
        """Returns who has the variables by now, with programs that ask for them."""
        servers = self._found(*self._among(variables))
        for server in servers.values():
            with suppress(JGError):  # the next copy says that it is lost
                self._register(server)
        return servers

    def _among(
        self, variables: Sequence[Variable]
    ) -> tuple[list[Variable], dict[str, LiveTable]]:
        by_name = {variable.name: variable for variable in variables}
        dense = [by_name[variable.name] for variable in self._dense]
        tables = self._tables.items()
        return dense, {n: replace(t, variable=by_name[n]) for n, t in tables}

    async def _follow(self) -> None:
        """Asks for the variables where they lie by now, if that is elsewhere."""
        if self._newest is None or (new := self._newest()) is self._variables:
            return
        loop, before = asyncio.get_running_loop(), self._servers
        try:
            servers = await loop.run_in_executor(self._threads, self._ready_at, new)
        except JGError as error:
            _LOG.info("Where the parameters lie is asked again: %s", error)
            return
        self._dense, self._tables = self._among(new)
        self._servers, self._variables = servers, new
        for server in before.values():
            await loop.run_in_executor(self._threads, self._forget, server)

    def _forget(self, server: _Server) -> None:
        for handle in server.handles:
            with suppress(JGError, ValueError):
                self._session.unregister(handle)
        server.handles = []

    def _register(self, server: _Server) -> None:
        """Gives a server its programs; it may have been started again."""
        self._forget(server)
        programs = [*server.reads, *server.lookups]
        server.handles = [self._session.register(one) for one in programs]
        server.address = self._cluster.find(server.task)

    async def _run(
        self, server: _Server, handle: str, arrays: Sequence[Array], timeout_s: float
    ) -> Frame:
        order = pb.RunStep(handle=handle, timeout_s=timeout_s)
        return await self._cluster.transport.ask(
            server.address,
            "RunStep",
            frame(run_step=order, tensors=arrays),
            timeout_s=timeout_s + 1,
        )

    # ------------------------------------------------------------ dense copies

    async def refresh(self) -> None:
        """See ``Parameters.refresh``."""
        await self._follow()
        at = self._clock.now()
        read = await asyncio.gather(*map(self._read, self._servers.values()))
        if None in read:
            return
        values: dict[VariableKey, Any] = {}
        for one in read:
            values |= one or {}
        dense = {v.name: jnp.asarray(joined(v, values)) for v in self._dense}
        step = int(dense.pop(self._count.name))
        self._copy = DenseCopy(dense, step, at)

    async def _read(self, server: _Server) -> dict[VariableKey, Any] | None:
        loop = asyncio.get_running_loop()
        nbytes = sum(nbytes_of(shard.spec) for shard in server.dense)
        try:
            if server.error is not None or not server.handles:
                await loop.run_in_executor(self._threads, self._register, server)
            found: list[Any] = []
            for handle in server.handles[: len(server.reads)]:
                timeout_s = LOOKUP_S + bulk_timeout_s(nbytes)
                found += (await self._run(server, handle, (), timeout_s)).tensors
        except ClusterBusyError:
            return None  # it trains; the next copy is as good
        except JGError as error:
            self._lose(server, error)
            return None
        if server.error is not None:
            _LOG.info("%s answers again.", server.task)
        server.error = None
        keys = [shard.spec.key for shard in server.dense]
        return dict(zip(keys, found, strict=True))

    def _lose(self, server: _Server, error: JGError) -> None:
        if server.error is None:
            _LOG.warning(
                "%s %s, and what is served of it stays as it was: %s",
                *(server.task, why_lost(error), error),
            )
        server.error = error

    # ------------------------------------------------------------ rows

    async def rows(self, wanted: Mapping[str, Array]) -> FoundRows:
        """See ``Parameters.rows``."""
        found: dict[str, TableRows] = {}
        places: dict[str, list[tuple[Array, Array]]] = {}
        for name, ids in wanted.items():
            variable, count = self._tables[name].variable, len(ids)
            rows = np.zeros((count, *variable.shape[1:]), np.dtype(variable.dtype))
            found[name] = TableRows(rows, np.zeros(count, bool), from_cache=False)
            places[name] = split_ids(self._tables[name].layout, ids)
        busy_s = await asyncio.gather(
            *(
                self._look_up(server, places, found)
                for server in self._servers.values()
                if any(len(places[name][n][0]) for name, n, _ in server.shards)
            )
        )
        tables = {n: self._with_cache(n, wanted[n], one) for n, one in found.items()}
        return FoundRows(tables, max(busy_s, default=0.0))

    async def _look_up(
        self,
        server: _Server,
        places: Mapping[str, list[tuple[Array, Array]]],
        tables: Mapping[str, TableRows],
    ) -> float:
        """Puts the rows that a server has into ``tables``; none if it is lost.

        Returns:
          For how long it was busy, as far as it answered.
        """
        if server.error is not None or not server.handles:
            return 0.0
        size = self._size(server, places)
        handle = server.handles[len(server.reads) + size]
        rounds = max(
            -(-len(places[name][n][0]) // self._tables[name].counts[size])
            for name, n, _ in server.shards
        )
        busy_s = 0.0
        try:
            for number in range(rounds):
                busy_s += await self._look_up_part(
                    server, handle, size, number, places, tables
                )
        except ClusterBusyError as error:
            raise OverloadedError(
                f"{server.task} has too many calls, and training goes first; send the "
                "request again in 1 s",
                retry_after_s=1,
            ) from error
        except JGError as error:
            self._lose(server, error)
        return busy_s

    def _size(
        self, server: _Server, places: Mapping[str, list[tuple[Array, Array]]]
    ) -> int:
        """Returns which program takes so many ids; the largest, if none does."""
        sizes = range(len(server.lookups))
        fitting = (
            size
            for size in sizes
            if all(
                len(places[name][n][0]) <= self._tables[name].counts[size]
                for name, n, _ in server.shards
            )
        )
        return next(fitting, sizes[-1])

    async def _look_up_part(
        self,
        server: _Server,
        handle: str,
        size: int,
        part: int,
        places: Mapping[str, list[tuple[Array, Array]]],
        tables: Mapping[str, TableRows],
    ) -> float:
        arrays, where = [], []
        for name, number, _ in server.shards:
            count = self._tables[name].counts[size]
            of_part = slice(part * count, (part + 1) * count)
            positions, rows = (one[of_part] for one in places[name][number])
            arrays.append(self._tables[name].asked(rows, count))
            where.append(positions)
        asked_s = self._clock.now()
        reply = await self._run(server, handle, arrays, LOOKUP_S)
        for (name, _, _), positions, rows in zip(
            server.shards, where, reply.tensors, strict=True
        ):
            tables[name].rows[positions] = np.asarray(rows)[: len(positions)]
            tables[name].is_there[positions] = True
        if reply.header.busy_s > 0:
            return float(reply.header.busy_s) + _CALL_S
        return self._clock.now() - asked_s  # an older one does not tell

    def _with_cache(self, name: str, ids: Array, live: TableRows) -> TableRows:
        cache = self._caches.get(name)
        if cache is None:
            return live
        if live.is_there.all():
            cache.put(ids, live.rows)
            return live
        cache.put(ids[live.is_there], live.rows[live.is_there])
        missing = ~live.is_there
        rows, found = cache.get(ids[missing])
        live.rows[missing], live.is_there[missing] = rows, found
        return TableRows(live.rows, live.is_there, from_cache=bool(found.any()))

    def close(self) -> None:
        """See ``Parameters.close``."""
        with suppress(JGError):
            self._session.close()
        if self._holds_copies:
            with suppress(JGError):
                self._cluster.reset(self._container)
