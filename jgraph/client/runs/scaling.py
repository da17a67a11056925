"""Scaling of a cluster: more workers, or fewer, while runs on it go on."""

import re
from collections.abc import Callable, Sequence
from typing import Final

from jgraph.client.connection import Connection
from jgraph.client.runs.runs import RunInfo, runs_of
from jgraph.cluster.options import check_seconds
from jgraph.cluster.polling import Polling
from jgraph.errors import ConfigError, DeadlineError, RescaleError
from jgraph.graph.device import TaskName

SCALE_S: Final = 60.0
"""So long ``scale`` waits."""
_POLL_S: Final = 0.1
_CHANGE: Final = re.compile(r"[+-]\d{1,6}")


def scale_workers(
    cluster: Connection,
    workers: int | str | None,
    ps: object,
    *,
    start: Callable[[int], None],
    drain: Callable[[TaskName], None],
    ended: Callable[[Sequence[TaskName]], None],
    timeout_s: float,
    wait: bool,
) -> list[TaskName]:
    """Makes a cluster have so many workers; see ``Cluster.scale``.

    Args:
      cluster: the client.
      workers: how many, or a change: "+1".
      ps: must be None.
      start: starts so many more.
      drain: tells one to leave.
      ended: learns which have left.
      timeout_s: how long to wait.
      wait: until those that join take part in the runs that take them.

    Returns:
      The workers there are then.
    """
    if ps is not None:
        raise RescaleError(
            f"scale(ps={ps!r:.40}): the parameter servers of a cluster are those that "
            "it began with, and stay; only workers join and leave: scale(workers=…)"
        )
    check_seconds("timeout_s", timeout_s)
    cluster.refresh()
    before = cluster.tasks("worker")
    wanted = wanted_workers(workers, len(before))
    runs = [run for run in runs_of(cluster) if run.state == "running"]
    for run in runs:
        _check_bounds(run, wanted)
    polling = Polling(_POLL_S, timeout_s)
    leavers = before[wanted:]
    if wanted > len(before):
        start(wanted - len(before))
    for task in reversed(leavers):
        drain(task)
    if not wait:
        return before[:wanted]
    _wait_members(cluster, wanted, leavers, polling, timeout_s)
    ended(leavers)
    _wait_taking_part(cluster, [run.name for run in runs], polling, timeout_s)
    return cluster.tasks("worker")


def wanted_workers(workers: object, now: int) -> int:
    """Returns how many workers are asked for.

    Args:
      workers: a count, or a change as text.
      now: how many there are.

    Raises:
      ConfigError: it is neither, or leaves none.

    Example:
      >>> wanted_workers("+2", 3), wanted_workers("-1", 3), wanted_workers(6, 3)
      (5, 2, 6)
    """
    if isinstance(workers, str) and _CHANGE.fullmatch(workers):
        wanted = now + int(workers)
    elif isinstance(workers, int) and not isinstance(workers, bool):
        wanted = workers
    else:
        raise ConfigError(
            f"scale(workers={workers!r:.40}): give how many workers there are to be, "
            'or how many more or fewer as text: workers=6, workers="+1", workers="-2"'
        )
    if wanted < 1:
        raise ConfigError(
            f"scale(workers={workers!r:.40}) would leave {max(wanted, 0)} of {now} "
            "workers; a cluster keeps 1 at least, cluster.shutdown() ends it"
        )
    return wanted


def _check_bounds(run: RunInfo, wanted: int) -> None:
    if run.bounds is None:
        return
    least, most = run.bounds
    if wanted < least or (most is not None and wanted > most):
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        raise RescaleError(
            f"scale(workers={wanted}): run '{run.name}' may have {bounds} workers, as "
            "jg.Elastic(workers=…) says; it goes on as before",
            run=run.name,
        )


def _wait_members(
    cluster: Connection,
    wanted: int,
    leavers: Sequence[TaskName],
    polling: Polling,
    timeout_s: float,
) -> None:
    """Waits until those that were started are members, and leavers none."""
    while True:
        cluster.refresh()
        there = cluster.tasks("worker")
        late = [task for task in leavers if task in there]
        if len(there) >= wanted and not late:
            return
        if not polling.wait():
            what = f"{', '.join(late)} to leave" if late else "workers to join"
            raise DeadlineError(
                f"scale waited {timeout_s:g} s for {what}: there are {len(there)} of "
                f"{wanted} workers; what runs goes on with those there are, and "
                "`jgraph events` tells what became of the others",
                pending=late,
            )


def _wait_taking_part(
    cluster: Connection, names: Sequence[str], polling: Polling, timeout_s: float
) -> None:
    """Waits until all workers take part in the runs that take them."""
    while True:
        workers = set(cluster.tasks("worker"))
        waits = {
            run.name: sorted(workers - set(run.workers))
            for run in runs_of(cluster)
            if run.name in names and run.state == "running" and run.bounds is not None
        }
        late = {name: tasks for name, tasks in waits.items() if tasks}
        if not late:
            return
        if not polling.wait():
            name, tasks = next(iter(late.items()))
            raise DeadlineError(
                f"scale waited {timeout_s:g} s for {', '.join(tasks)} to take part in "
                f"run '{name}'; they may need longer to load the data and to compile, "
                "and take part when they are ready",
                pending=tasks,
            )
