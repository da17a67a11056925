"""Facts for a board from what a client is told, and alarms of two looks."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from jgraph.client.connection import Connection
from jgraph.client.runs.runs import RunInfo, runs_of
from jgraph.client.status import ClusterStatus, TaskStatus
from jgraph.clock import WallClock
from jgraph.cluster.events import Event
from jgraph.cluster.loop_messages import report_in
from jgraph.coordination.step.step_metrics import (
    LOCAL_STEPS,
    Array,
    metrics_by_name,
)
from jgraph.coordination.sync.rounds import RoundRecord
from jgraph.coordination.watch.alarms import Alarm
from jgraph.coordination.watch.board import Board
from jgraph.coordination.watch.facts import Fact, clean, fields_of
from jgraph.errors import JGError
from jgraph.graph.device import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.rpc.frames import body_of
from jgraph.rpc.transport import Frame

_STEPS: Final = 8
_SAMPLES: Final = 16
_SHARDS: Final = 2_000
_ROUNDS: Final = 50
_REAL: Final = frozenset(
    f"{kind}{bits}" for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)
) | {"bfloat16"}


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
    rows = {}
    for run in runs:
        row = fields_of(run)
        del row["metrics"], row["name"]  # it is told under this name
        rows[run.name] = row
    return _fact("runs", now, runs=rows)


def report_fact(
    run: RunInfo, tasks: dict[int, TaskName], message: Frame, now: float
) -> Fact | None:
    """Returns what a loop of a run told; None: nothing that there is to see.

    Args:
      run: which.
      tasks: of the replicas, as far as is known; learns more.
      message: the report.
      now: when it came.
    """
    body = body_of(message)
    if body.HasField("question"):
        return None
    if body.task:
        tasks[body.replica] = TaskName(body.task)
    report = report_in(tasks, message)
    back = report.restored
    rounds = [_round(record, wait_s) for record, wait_s in report.rounds[-_ROUNDS:]]
    if not (len(report.steps) or report.dropped or rounds) and back is None:
        return None
    # In synchronous training only who decides fetches anything.
    tells = len(report.fetches) == len(run.metrics)
    named = metrics_by_name(run.metrics, report.fetches) if tells else {}
    metrics = {
        name: value
        for name, values in named.items()
        if (value := _summed_up(values)) is not None
    }
    return _fact(
        "report",
        now,
        run=run.name,
        task=report.task,
        state=report.state,
        steps=len(report.steps),
        step_s=_some_steps(report.seconds),
        times=dict(report.times),
        metrics=metrics,
        dropped=dict(report.dropped),
        rounds=rounds,
        own_rounds=[] if run.synchronous else _own_rounds(report.seconds, named),
        back_to=None if back is None else back.back_to,
    )


def _round(record: RoundRecord, wait_s: float) -> Fact:
    return {
        "number": record.number + 1,
        "members": list(record.members),
        "dropped": dict(record.dropped),
        "wait_s": wait_s,
        "void": record.void,
    }


def _own_rounds(seconds: Array, metrics: Mapping[str, Array]) -> list[Fact]:
    """Returns rounds of one client each: when they were done, and whether they count.

    Args:
      seconds: when steps were done, since the run began.
      metrics: of these steps.
    """
    steps = metrics.get(LOCAL_STEPS)
    if steps is None:
        return []
    # One that is not finite has no steps.
    done = zip(seconds.tolist(), (steps > 0).tolist(), strict=True)
    return [{"seconds": s, "finite": finite} for s, finite in done]


def variables_fact(variables: Iterable[Any], now: float) -> Fact:
    """Returns what tasks store, by task."""
    shards: dict[str, dict[str, Any]] = {}
    for row in variables:
        name = " ".join(filter(None, (row.container, row.name)))
        of_task = shards.setdefault(row.task, {})
        if len(of_task) < _SHARDS:
            nbytes = ValueType(tuple(row.type.shape), row.type.dtype).nbytes
            of_task[name] = {"nbytes": nbytes, "version": row.version}
    return _fact("variables", now, shards=shards)


def events_fact(events: Iterable[Event], now: float) -> Fact:
    """Returns what became of tasks and runs."""
    return _fact("events", now, events=[fields_of(event) for event in events])


def silent_fact(error: JGError, now: float) -> Fact:
    """Returns that nobody answered, and why."""
    return _fact("silent", now, text=error.message)


def trouble_fact(name: str, what: str, now: float) -> Fact:
    """Returns what is wrong with who watches; an empty text: nothing more."""
    return _fact("trouble", now, id=name, text=what)


def _some_steps(seconds: Array) -> list[float]:
    """Returns how long some of the steps took that a report tells of."""
    between = np.diff(seconds)
    return [float(s) for s in between[:: max(1, len(between) // _SAMPLES)]]


def _summed_up(values: Array) -> dict[str, float] | None:
    """Returns least, mean and most of a metric; None: it is no single real number."""
    if values.ndim != 1 or not len(values) or values.dtype.name not in _REAL:
        return None
    real = values.astype(np.float64)
    # One that is not finite must show, whatever the others are.
    ends = {"min": real.min(), "mean": real.mean(), "max": real.max()}
    return {name: float(value) for name, value in ends.items()}


def alarms_of(cluster: Connection, seconds: float) -> list[Alarm]:
    """Looks at a cluster twice, so long apart, and returns what is wrong there."""
    board, clock, pause = Board(), WallClock(), threading.Event()
    for wait_s in (0.0, seconds):
        pause.wait(wait_s)
        board.take(status_fact(cluster.status(), clock.now()))
        board.take(runs_fact(runs_of(cluster), clock.now()))
    return board.alarms()


def _task(status: TaskStatus) -> dict[str, Any]:
    facts = fields_of(status)
    facts["steps"] = facts["steps"][:_STEPS]
    # By name: what is the same in two looks need not be told twice.
    for many, name in (("traffic", "peer"), ("calls", "method"), ("gates", "gate")):
        rows = map(fields_of, facts[many])
        facts[many] = {row.pop(name): row for row in rows}
    tables = list(map(fields_of, facts["hash_tables"]))
    for row in tables:
        row["name"] = " ".join(filter(None, (row.pop("container"), row["name"])))
    facts["hash_tables"] = {row.pop("name"): row for row in tables}
    return facts


def _fact(kind: str, now: float, **what: Any) -> Fact:
    fact: Fact = clean({"kind": kind, "time": now, **what})
    return fact
