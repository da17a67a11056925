"""Runs of a cluster at the client: list, follow, stop, wait for checkpoints."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from jgraph.client.connection import Connection
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import bounded_s
from jgraph.cluster.loop_messages import Homes, homes_in
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Address, Frame, Transport
from jgraph.view.markup import data


@final
@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run that its master follows, whether or not its client is there.

    Attributes:
      name: what ``Trainer.attach`` takes.
      state: "running", "done", "stopped", or "failed".
      step: updates that were told of, those before the run included.
      steps: updates when it has all.
      seconds: how long it has gone on.
      master: the task that follows it.
      first_step: updates before it.
      batch_size: examples per step.
      metrics: names of what is told of each step.
      container: of its variables.
      data_run: under which its data is dealt out.
      synchronous: whether each step is one of all workers.
      checkpoints: where its master saves; empty: nowhere.
      term: number of its master; each is greater than those before.
      workers: that take part now; none of a run that is over.
      bounds: the least and the most workers of an elastic run; None: it is none.
      tables: parameters on ps, where the workers hold all others; None: ps hold all.
      ps_bounds: the least and the most ps; None: it keeps those that it began with.
      ps: how many it has, if there are bounds.
      rescale: why it has not as many as its cluster; empty: it has.
      homes: who has the parts of owners that are away, the how many-th time.
    """

    name: str
    state: str
    step: int
    steps: int
    seconds: float
    master: TaskName
    first_step: int
    batch_size: int
    metrics: tuple[str, ...]
    container: str
    data_run: str
    synchronous: bool
    checkpoints: str
    term: int
    workers: tuple[TaskName, ...] = ()
    bounds: tuple[int, int | None] | None = None
    tables: tuple[str, ...] | None = None
    ps_bounds: tuple[int, int] | None = None
    ps: int = 0
    rescale: str = ""
    homes: Homes = (0, {})

    def _repr_html_(self) -> str:
        return data(self)


def run_infos(table: pb.RunTable) -> list[RunInfo]:
    """Returns what a master told of the runs, the newest one last."""
    rows = sorted(table.runs, key=lambda row: -row.age_s)
    return [info_of(row) for row in rows]


def info_of(row: pb.RunRow) -> RunInfo:
    """Returns what a master tells of a run."""
    info = json.loads(row.info)
    bounds, tables = info.get("workers"), info.get("tables")
    return RunInfo(
        name=row.run,
        state=row.state,
        step=info["first_step"] + row.steps,
        steps=info["steps"],
        seconds=row.seconds,
        master=TaskName(row.task),
        first_step=info["first_step"],
        batch_size=info["batch_size"],
        metrics=tuple(info["metrics"]),
        container=info["container"],
        data_run=row.data_run,
        synchronous=info["synchronous"],
        checkpoints=info["checkpoints"],
        term=row.term,
        workers=tuple(map(TaskName, row.workers)),
        bounds=None if bounds is None else (bounds[0], bounds[1]),
        tables=None if tables is None else tuple(tables),
        ps_bounds=None if info.get("ps") is None else tuple(info["ps"]),
        ps=row.ps,
        rescale=row.rescale,
        homes=homes_in(row.homes),
    )


def runs_of(cluster: Connection) -> list[RunInfo]:
    """Returns the runs of a cluster that outlive their clients; see ``RunInfo``."""
    return run_infos(body_of(cluster.call("Master.Runs", frame(empty=pb.Empty()))))


def reports_of(
    cluster: Connection, run: RunInfo, *, owner: bool = False
) -> Iterator[Frame]:
    """Yields the frames of all reports of a run so far, and those to come.

    Args:
      cluster: its client.
      run: which.
      owner: this client began it, and answers questions.

    Raises:
      ConfigError: its master knows it no more.
      TaskLostError: its master was lost.
      JGError: the run failed.
    """
    query = frame(run_query=pb.RunQuery(run=run.name, owner=owner))
    address = cluster.find(run.master)
    return stream_of(cluster.transport, address, "Master.Attach", query)


def stream_of(
    transport: Transport, address: Address, method: str, request: Frame
) -> Iterator[Frame]:
    """Yields the replies to a call that goes on as long as a run does."""
    replies = transport.call(address, method, request, timeout_s=bounded_s(0.0))

    async def next_one() -> Frame | None:
        return await anext(replies, None)

    while (reply := event_loop.run(next_one())) is not None:
        yield reply


def position_of(cluster: Connection, run: RunInfo) -> dict[str, Any]:
    """Returns where in its data a run is, as its master knows."""
    query = frame(data_run=pb.DataRun(run=run.name))
    address = cluster.find(run.master)
    reply = cluster.call("Master.DataPosition", query, to=address)
    position: dict[str, Any] = json.loads(body_of(reply).position)
    return position


def wait_saved(cluster: Connection, directory: str, timeout_s: float) -> None:
    """Waits until the newest run that is saved to a directory is over and saved.

    Raises:
      DeadlineError: it is not, after ``timeout_s``.
      TaskLostError, ClusterUnreachableError: its master was lost.
    """
    for run in reversed(runs_of(cluster)):
        if run.checkpoints == directory:
            query = frame(run_query=pb.RunQuery(run=run.name))
            address = cluster.find(run.master)
            cluster.call("Master.RunSaved", query, to=address, timeout_s=timeout_s)
            return


def stop_run(cluster: Connection, run: RunInfo) -> None:
    """Asks the loops of a run to stop after their steps in flight."""
    query = frame(run_query=pb.RunQuery(run=run.name))
    address = cluster.find(run.master)
    cluster.call("Master.StopRun", query, to=address)


def succeed_run(cluster: Connection, run: RunInfo) -> None:
    """Makes the standby of a run its master, as this client does not reach its own."""
    query = frame(run_query=pb.RunQuery(run=run.name, master=run.master))
    cluster.call("Master.SucceedRun", query)
