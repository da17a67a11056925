"""Submission of a run: its client tells the master all of it, and then begins it."""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from jgraph.client.connection import Connection, unique
from jgraph.client.runs.failover import open_data, take_over
from jgraph.client.runs.follower import Owner, RunFollower
from jgraph.client.runs.runs import info_of
from jgraph.cluster.deadlines import COMPILE_S, SILENCE_S
from jgraph.cluster.loop_messages import (
    DealtData,
    LoopRequest,
    RunRequest,
    order_in_run,
    plain,
)
from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    JGError,
    TaskLostError,
)
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame

MakeLoops: TypeAlias = Callable[[str], tuple[Sequence[LoopRequest], pb.OpenGate | None]]
"""Given the name of a run, opens its gates; returns a request for each loop, and the
gate of asynchronous training."""


def submit_run(
    cluster: Connection,
    make: MakeLoops,
    about: RunRequest,
    data: DealtData | None,
    stop: threading.Event,
    owner: Owner | None,
    check: Callable[[], None],
) -> RunFollower:
    """Makes the master begin a run that it looks after, and follows it.

    A master that is lost before the run has begun is replaced here. One that was
    started again may have lost what was made ready on it, which its caller does again.

    Args:
      cluster: the client.
      make: makes its loops.
      about: what the master must know of the run.
      data: what is dealt out; None: training is synchronous, and a loop decides.
      stop: see ``RunFollower``.
      owner: see ``RunFollower``.
      check: raises if a task has lost since what was made for the run.

    Raises:
      JGError: it does not begin.
    """
    remaining = len(cluster.tasks())
    while True:
        master, run = cluster.master, unique("run")
        query = frame(run_query=pb.RunQuery(run=run))
        try:
            row = _order_run(cluster, run, make, about, data)
            check()
            _begin(cluster, query)
        except JGError as error:
            is_loss = isinstance(error, ClusterUnreachableError | TaskLostError)
            if is_loss and error.details.get("task", master) == master:
                remaining -= 1
                if not remaining:
                    raise
                take_over(cluster, error)
                continue
            if isinstance(error, ConfigError) and error.details.get("run") == run:
                what = f"{master} was started again while it was told of a run"
                raise TaskLostError(what, task=master) from error
            _forget(cluster, query)
            raise
        return RunFollower(cluster, info_of(row), stop, owner)


def _begin(cluster: Connection, query: Frame) -> None:
    """Lets a run begin; who follows it sees whether its master is lost meanwhile."""
    with suppress(ClusterUnreachableError, TaskLostError):
        cluster.call("Master.BeginRun", query)


def _forget(cluster: Connection, query: Frame) -> None:
    """Lets the master forget a run that does not begin: it would be there for ever."""
    with suppress(JGError):  # it is lost, or was started again
        cluster.call("Master.StopRun", query)


def _order_run(
    cluster: Connection,
    run: str,
    make: MakeLoops,
    about: RunRequest,
    data: DealtData | None,
) -> pb.RunRow:
    """Tells the master all of a run; returns how it stands then."""
    requests, gate = make(run)
    arbiter = next((one for one in requests if one.sync is not None), None)
    deal = data if arbiter is None else arbiter.sync
    assert deal is not None  # which a master deals out
    _open_run(cluster, run, about, gate)
    if data is not None:
        open_data(cluster, run, data)
    for request in requests:
        order = order_in_run(
            *(request, f"{run}-{request.replica}"),
            run=run,
            plan=plain(deal.plan),
            arbiter=arbiter,
        )
        cluster.call("Master.RunLoop", frame(run_loop=order))
    return pb.RunRow(
        run=run,
        task=cluster.master,
        state="running",
        info=json.dumps(about.about),
        data_run=run,
        term=1,
    )


def _open_run(
    cluster: Connection, run: str, about: RunRequest, gate: pb.OpenGate | None
) -> None:
    """Makes the master of a client look after a run."""
    order = pb.OpenRun(
        run=run,
        info=json.dumps(about.about),
        saves=about.saves,
        source=about.source,
        source_info=about.source_info,
        copies=about.copies,
        gate=gate,
        wait_s=about.wait_s,
        client=about.client,
        elastic=about.elastic,
        owners=about.owners,
        ps=about.ps,
    )
    cluster.call("Master.OpenRun", frame(open_run=order), timeout_s=SILENCE_S)
    for program in about.programs:
        body_of(program).run = run
        cluster.call("Master.KeepProgram", program, timeout_s=COMPILE_S)
