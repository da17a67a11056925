"""Gates at the client: open them before a run, read their staleness counts."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from jgraph.cluster.deadlines import CONTROL_S, SILENCE_S
from jgraph.cluster.loop_messages import first_handle
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame

if TYPE_CHECKING:
    from jgraph.client.cluster import Cluster


@final
@dataclass(frozen=True, slots=True)
class StaleUpdates:
    """``updates`` gradients of a program were ``staleness`` updates old on a task."""

    task: TaskName
    handle: str
    staleness: int
    updates: int


def open_gate(
    cluster: "Cluster",
    gate: str,
    shards: Sequence[TaskName],
    *,
    synchronous: bool = False,
    version: int = 0,
    max_staleness: int | None = None,
    run: str = "",
    term: int = 0,
    group: pb.CollectiveGroup | None = None,
    host_sums: pb.HostSums | None = None,
    handles: Sequence[str] = (),
    readers: int = 0,
) -> pb.OpenGate:
    """Opens a gate on tasks, in place of an earlier one of that name.

    Args:
      cluster: where.
      gate: the name that partitions give.
      shards: tasks with the gate; the first one decides for all.
      synchronous: contributions are averaged; else updates are asynchronous.
      version: synchronous only: updates applied so far.
      max_staleness: asynchronous only: the bound; None: there is none.
      run: which run it is part of, and under which term of masters.
      term: likewise.
      group: what children of the workers' servers sum; None: nothing.
      host_sums: what is summed on each host before it leaves that; None: nothing.
      handles: synchronous only: of the replicas' programs.
      readers: synchronous only: how many steps read at a time; 0: all that may.

    Returns:
      The order, for a task that is started again.
    """
    order = pb.OpenGate(
        gate=gate,
        shards=shards,
        synchronous=synchronous,
        version=version,
        max_staleness=max_staleness,
        opening=uuid.uuid4().hex,
        run=run,
        term=term,
        group=group,
        host_sums=host_sums,
        handles=handles,
        readers=readers,
    )
    request = frame(open_gate=order)
    cluster.call("Master.OpenGate", request, timeout_s=SILENCE_S + CONTROL_S)
    return order


def staleness_of(
    cluster: "Cluster",
    gate: str,
    shards: Sequence[TaskName],
    workers: Mapping[str, TaskName],
) -> dict[TaskName, dict[TaskName, dict[int, int]]]:
    """Returns how many updates were how old: by worker, by ps, by staleness.

    Args:
      cluster: of the gate.
      gate: its name.
      shards: tasks with the gate.
      workers: by the handles of their programs.
    """
    staleness: dict[TaskName, dict[TaskName, dict[int, int]]] = {}
    for row in stale_updates(cluster, gate, shards):
        # The master gives the programs of those that it takes back other ends.
        worker = workers[first_handle(row.handle)]
        ages = staleness.setdefault(worker, {}).setdefault(row.task, {})
        ages[row.staleness] = ages.get(row.staleness, 0) + row.updates
    return staleness


def stale_updates(
    cluster: "Cluster", gate: str, shards: Sequence[TaskName]
) -> list[StaleUpdates]:
    """Returns what the gate has counted on each task since it was opened."""
    query = pb.GateQuery(gate=gate, shards=shards)
    rows = body_of(cluster.call("Master.GateReport", frame(gate_query=query))).rows
    return [
        StaleUpdates(TaskName(row.task), row.handle, row.staleness, row.updates)
        for row in rows
    ]
