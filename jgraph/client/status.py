"""ClusterStatus and TaskStatus: state of a cluster, as plain data and as a table."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, final

from rich.console import Console
from rich.table import Table

from jgraph.cluster.spec import ClusterSpec
from jgraph.coordination.step.explain import StepWait, explain
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.view import markup

_COLUMNS = (
    *("task", "address", "state", "platform", "pid", "incarnation"),
    *("memory", "variables", "programs", "jax"),
)


_LINK_COLUMNS = ("task", "frames leave through", "for")
_TABLE_COLUMNS = ("task", "hash table", "rows", "in use", "budget", "evicted")


@final
@dataclass(frozen=True, slots=True)
class HashTableStatus:
    """How a task's shard of a hash table stands.

    Attributes:
      container: of the table; each Trainer has its own.
      name: of the shard, by its parameter.
      rows: ids that have a row now.
      nbytes: in use now.
      capacity_bytes: what it may use.
      evicted: rows given up so far, for others or because of their age.
    """

    container: str
    name: str
    rows: int
    nbytes: int
    capacity_bytes: int
    evicted: int

    @classmethod
    def from_message(cls, message: pb.HashTableStatus) -> Self:
        """Returns what a task told of a table."""
        report = message.report
        return cls(
            container=message.container,
            name=message.name,
            rows=report.rows,
            nbytes=report.nbytes,
            capacity_bytes=message.capacity_bytes,
            evicted=report.evicted + report.expired,
        )


@final
@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """Frames and bytes between a task and another, since the start of the task.

    Attributes:
      peer: the other task.
      frames_sent: to it.
      bytes_sent: to it, but for those in shared memory.
      frames_received: from it.
      bytes_received: from it, but for those in shared memory.
      shared_bytes_sent: to it, in shared memory.
      shared_bytes_received: from it, in shared memory.
    """

    peer: str
    frames_sent: int
    bytes_sent: int
    frames_received: int
    bytes_received: int
    shared_bytes_sent: int
    shared_bytes_received: int


@final
@dataclass(frozen=True, slots=True)
class MethodCalls:
    """Calls of one method that a task answered since its start.

    Attributes:
      method: its name.
      errors: how many ended with one.
      seconds: of all together.
      buckets: how many took how long; the bounds are 1, 2, 5, 10, 20, 50, 100, 200 and
        500 ms, 1, 3 and 10 s, and one more has those that took longer.
    """

    method: str
    errors: int
    seconds: float
    buckets: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class GateStatus:
    """How a gate of a ps stands, which says when a step may read.

    Attributes:
      gate: its name.
      max_staleness: the bound of asynchronous training; None: there is none.
      waiting: steps that may not read yet.
      oldest_s: how long the first of them waits.
      waits: how many steps waited, and do so no more.
      wait_s: how long these did, together.
      staleness: updates of each worker by how many others came between its read and
        its update; 64 stands for all above. Of synchronous training nothing.
    """

    gate: str
    max_staleness: int | None
    waiting: int
    oldest_s: float
    waits: int
    wait_s: float
    staleness: Mapping[str, Mapping[int, int]]

    @classmethod
    def from_message(cls, message: pb.GateStatus) -> Self:
        """Returns what a task told of a gate."""
        is_bounded = message.HasField("max_staleness")
        return cls(
            gate=message.gate,
            max_staleness=message.max_staleness if is_bounded else None,
            waiting=message.waiting,
            oldest_s=message.oldest_s,
            waits=message.waits,
            wait_s=message.wait_s,
            staleness={row.task: dict(row.updates) for row in message.senders},
        )


@final
@dataclass(frozen=True, slots=True)
class ShardSaves:
    """What a task wrote of checkpoints since its start.

    Attributes:
      saves: how many times it wrote its part of one.
      failures: how many times it could not.
      nbytes: of the last one.
      seconds: that took.
      age_s: since that.
    """

    saves: int
    failures: int
    nbytes: int
    seconds: float
    age_s: float


_TRAFFIC = tuple(field.name for field in fields(PeerTraffic))
_SAVES = tuple(field.name for field in fields(ShardSaves))


@final
@dataclass(frozen=True, slots=True)
class TaskStatus:
    """How one task is.

    Attributes:
      task: its name.
      address: where it listens.
      state: ``"ready"``, or ``"draining"`` when it takes no new work.
      incarnation: another one for each start of its process, in hexadecimal.
      pid: its process.
      platform: as ``jax.export`` names it: ``"cpu"``, ``"cuda"``, ``"tpu"``.
      device_count: devices of that platform.
      rss_bytes: memory of the process.
      variable_bytes: what its variables take of that.
      programs: handles of the programs that it has.
      compilations: segments compiled since it started.
      health_port: port of its health service.
      data_port: where frames from other machines arrive; 0: they take gRPC's stream.
      jgraph: version.
      jax: version.
      python: version.
      busy_s: CPU seconds since the start: all of ``"process"``, and of that work of the
        kinds ``"lookup"``, ``"update"`` and ``"compute"`` (without XLA's own threads),
        ``"rows"`` (ids and rows put in order), ``"copy"`` (to shared memory) and
        ``"read"`` (examples of the next batches).
      hash_tables: the shards that it has.
      steps: under way, the oldest of each program; see ``ClusterStatus.explain``.
      ways: by task, how frames leave for it now: through ``"shared memory"``, a
        ``"local socket"``, a ``"data socket (records)"``, ``"(tls)"`` or ``"(plain)"``,
        or the ``"gRPC stream"``; none where no link was needed yet.
      up_s: since its start; None of a task of an older version, which tells nothing of
        what follows.
      traffic: with each other task.
      repeats_dropped: frames that came twice.
      calls: that it answered, by method.
      gates: that it has.
      saves: what it wrote of checkpoints.
      memory_free: the share of its host's memory, or of its container's, that can be
        had; None of a task of an older version.
      disk_free: that of the disks of temporary files and records.
      certificate_ends_s: in seconds since 1970; None: it has none.
      newest_event: how many events it has noted; None of a task of an older version.
    """

    task: TaskName
    address: str
    state: str
    incarnation: str
    pid: int
    platform: str
    device_count: int
    rss_bytes: int
    variable_bytes: int
    programs: tuple[str, ...]
    compilations: int
    health_port: int
    data_port: int
    jgraph: str
    jax: str
    python: str
    busy_s: Mapping[str, float]
    hash_tables: tuple[HashTableStatus, ...]
    steps: tuple[StepWait, ...] = ()
    ways: Mapping[TaskName, str] = field(default_factory=dict)
    up_s: float | None = None
    traffic: tuple[PeerTraffic, ...] = ()
    repeats_dropped: int = 0
    calls: tuple[MethodCalls, ...] = ()
    gates: tuple[GateStatus, ...] = ()
    saves: ShardSaves = ShardSaves(0, 0, 0, 0.0, 0.0)
    memory_free: float | None = None
    disk_free: float | None = None
    certificate_ends_s: float | None = None
    newest_event: int | None = None

    @classmethod
    def from_message(cls, message: pb.TaskStatus) -> Self:
        """Returns what a task told of itself."""
        return cls(
            task=TaskName(message.task),
            address=message.address,
            state=message.state,
            incarnation=f"{message.incarnation:016x}",
            pid=message.pid,
            platform=message.platform,
            device_count=message.device_count,
            rss_bytes=message.rss_bytes,
            variable_bytes=message.variable_bytes,
            programs=tuple(message.programs),
            compilations=message.compilations,
            health_port=message.health_port,
            data_port=message.data_port,
            jgraph=message.jgraph,
            jax=message.jax,
            python=message.python,
            busy_s=dict(message.busy_s),
            hash_tables=tuple(map(HashTableStatus.from_message, message.hash_tables)),
            steps=tuple(map(wait_of, message.steps)),
            ways={TaskName(peer): message.ways[peer] for peer in sorted(message.ways)},
            up_s=message.up_s or None,
            traffic=tuple(
                PeerTraffic(**{name: getattr(row, name) for name in _TRAFFIC})
                for row in message.traffic
            ),
            repeats_dropped=message.repeats_dropped,
            calls=tuple(
                MethodCalls(row.method, row.errors, row.seconds, tuple(row.buckets))
                for row in message.calls
            ),
            gates=tuple(map(GateStatus.from_message, message.gates)),
            saves=ShardSaves(**{n: getattr(message.saves, n) for n in _SAVES}),
            memory_free=(
                message.memory_free if message.HasField("memory_free") else None
            ),
            disk_free=message.disk_free if message.HasField("disk_free") else None,
            certificate_ends_s=message.certificate_ends_s or None,
            newest_event=(
                message.newest_event if message.HasField("newest_event") else None
            ),
        )


@final
@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """How all tasks of a cluster are; printed, it is a table.

    Attributes:
      master: the task that asked the others.
      cluster: which tasks there are, and where.
      tasks: those that answered.
      missing: those that did not.
      arrangement: number that grows as tasks join the cluster and leave it; 0: it is
        as it was described.
      waits: for what runs wait, or why they have not as many ps as they should.
    """

    master: TaskName
    cluster: ClusterSpec
    tasks: tuple[TaskStatus, ...]
    missing: tuple[TaskName, ...]
    arrangement: int = 0
    waits: tuple[str, ...] = ()

    @classmethod
    def from_message(cls, message: pb.ClusterStatus) -> Self:
        """Returns what a master told."""
        return cls(
            master=TaskName(message.master),
            cluster=ClusterSpec.from_json(message.cluster_json),
            tasks=tuple(TaskStatus.from_message(task) for task in message.tasks),
            missing=tuple(TaskName(name) for name in message.missing),
            arrangement=message.arrangement,
            waits=tuple(_waits_of(message.runs)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as ``jgraph status --json`` prints them."""
        return {
            "master": self.master,
            "cluster": self.cluster.as_dict(),
            "tasks": [asdict(task) for task in self.tasks],
            "missing": list(self.missing),
            "arrangement": self.arrangement,
        }

    def explain(self) -> str:
        """Returns who waits for whom, since when: steps under way, and runs."""
        steps = explain({t.task: t.steps for t in self.tasks}, self.missing)
        return "\n".join([*self.waits, *steps])

    def __repr__(self) -> str:
        ready = sum(task.state == "ready" for task in self.tasks)
        missing = f", no answer from {', '.join(self.missing)}" if self.missing else ""
        count = len(self.tasks) + len(self.missing)
        return f"<ClusterStatus {ready} of {count} tasks ready{missing}>"

    def __str__(self) -> str:
        console = Console(width=140, no_color=True)
        with console.capture() as capture:
            for title, columns, rows in self._tables():
                table = Table(*columns, title=title)
                for row in rows:
                    table.add_row(*row)
                console.print(table)
        return capture.get().rstrip()

    def _repr_html_(self) -> str:
        return "".join(
            markup.table(columns, rows, title)
            for title, columns, rows in self._tables()
        )

    def _tables(self) -> Iterator[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
        """Yields title, columns and rows; of links and hash tables if there are any."""
        arranged = f", arrangement {self.arrangement}" if self.arrangement else ""
        title = f"jgraph cluster (master {self.master}{arranged})"
        yield title, _COLUMNS, list(self._rows())
        links: list[tuple[str, ...]] = [
            (task.task, way, ", ".join(to for to, at in task.ways.items() if at == way))
            for task in self.tasks
            for way in sorted(set(task.ways.values()))
        ]
        if links:
            yield "links", _LINK_COLUMNS, links
        shards: list[tuple[str, ...]] = [
            (
                task.task,
                " ".join(filter(None, (table.container, table.name))),
                f"{table.rows:,}",
                megabytes(table.nbytes),
                megabytes(table.capacity_bytes),
                f"{table.evicted:,}",
            )
            for task in self.tasks
            for table in task.hash_tables
        ]
        if shards:
            yield "hash tables", _TABLE_COLUMNS, shards

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for task in self.tasks:
            yield (
                task.task,
                task.address,
                task.state,
                f"{task.platform} x{task.device_count}",
                str(task.pid),
                task.incarnation,
                megabytes(task.rss_bytes),
                megabytes(task.variable_bytes),
                str(len(task.programs)),
                task.jax,
            )
        for name in self.missing:
            address = self.cluster.address(name)
            yield (name, address, "no answer", *[""] * (len(_COLUMNS) - 3))


def megabytes(nbytes: int) -> str:
    """Returns a size for people, in units of 1000.

    Example:
      >>> megabytes(1_234_000), megabytes(12)
      ('1.2 MB', '12 B')
    """
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def wait_of(message: pb.StepWait) -> StepWait:
    """Returns what a task told of a step."""
    senders = map(TaskName, message.senders)
    return StepWait(
        handle=message.handle,
        step_id=message.step_id,
        program=message.program,
        age_s=message.age_s,
        state=message.state,
        values=tuple(zip(message.keys, senders, strict=True)),
        drives=message.drives,
        pending=tuple(map(TaskName, message.pending)),
    )


def _waits_of(table: pb.RunTable) -> Iterator[str]:
    """Yields for what the runs of a cluster wait that go on."""
    for row in table.runs:
        if row.state != "running":
            continue
        least, _ = json.loads(row.info).get("workers") or (0, None)
        if len(row.workers) < least:
            yield (
                f"Run '{row.run}' has {len(row.workers)} of {least} workers that it "
                "needs, and waits for others."
            )
        if row.rescale:
            yield f"{row.rescale[0].upper()}{row.rescale[1:]}."
