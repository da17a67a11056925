"""Facts for a board from what a client is told, and alarms of two looks."""

import threading
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from jgraph.client.connection import Connection
from jgraph.client.runs.runs import RunInfo, runs_of
from jgraph.client.status import ClusterStatus, TaskStatus
from jgraph.clock import WallClock
from jgraph.coordination.watch.alarms import Alarm
from jgraph.coordination.watch.board import Board
from jgraph.coordination.watch.facts import Fact, clean

_STEPS: Final = 8


def status_fact(status: ClusterStatus, now: float) -> Fact:
    """Returns what a master told of the tasks."""
    return _fact(
        "status",
        now,
        master=status.master,
        missing=list(status.missing),
        tasks={task.task: _task(task) for task in status.tasks},
    )


def runs_fact(runs: Iterable[RunInfo], now: float) -> Fact:
    """Returns how the runs stand."""
    told = {}
    for run in runs:
        row = asdict(run)
        del row["metrics"], row["name"]  # it is told under this name
        told[run.name] = row
    return _fact("runs", now, runs=told)


def alarms_of(cluster: Connection, seconds: float) -> list[Alarm]:
    """Looks at a cluster twice, so long apart, and returns what is wrong there."""
    board, clock, pause = Board(), WallClock(), threading.Event()
    for wait_s in (0.0, seconds):
        pause.wait(wait_s)
        board.take(status_fact(cluster.status(), clock.now()))
        board.take(runs_fact(runs_of(cluster), clock.now()))
    return board.alarms()


def _task(status: TaskStatus) -> dict[str, Any]:
    told = asdict(status)
    told["steps"] = told["steps"][:_STEPS]
    # By name: what is the same in two looks need not be told twice.
    for many, name in (("traffic", "peer"), ("calls", "method"), ("gates", "gate")):
        told[many] = {row.pop(name): row for row in told[many]}
    tables = told["hash_tables"]
    for row in tables:
        row["name"] = " ".join(filter(None, (row.pop("container"), row["name"])))
    told["hash_tables"] = {row.pop("name"): row for row in tables}
    return told


def _fact(kind: str, now: float, **what: Any) -> Fact:
    fact: Fact = clean({"kind": kind, "time": now, **what})
    return fact
