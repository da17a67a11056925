"""Tasks of the replicas of a pipeline, as an array: a row for each replica."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from jgraph.counts import is_count
from jgraph.errors import PipelineError
from jgraph.graph.device import as_spec

TaskArray: TypeAlias = (
    int | Sequence[str] | Sequence[Sequence[str]] | np.ndarray[Any, Any]
)
"""How many workers a replica has, their names, or the names with a row per replica."""

Rows: TypeAlias = tuple[tuple[str, ...], ...]

_KINDS = (
    "give how many workers a replica has, a list of devices, or a list of such lists, "
    "one for each replica, as in [['/job:worker/task:0', '/job:worker/task:1'], "
    "['/job:worker/task:2', '/job:worker/task:3']]"
)


def task_rows(tasks: TaskArray, replicas: int | None = None) -> Rows:
    """Returns the devices of each replica.

    Args:
      tasks: how many workers a replica has: the first replica gets the first of them,
        the second one those that follow. Devices: dealt likewise to ``replicas``. Or
        an array of devices ``[replicas, tasks]``.
      replicas: how many; the rows of the array, or 1, if unset.

    Raises:
      PipelineError: no such number, rows of different lengths, a task of two replicas,
        or what is no device at all.
      DeviceSpecError: a text that is no device.

    Example:
      >>> for row in task_rows(2, 2): print(*row)
      /job:worker/task:0 /job:worker/task:1
      /job:worker/task:2 /job:worker/task:3
      >>> task_rows(["ps:0", "ps:1"], 2)
      (('ps:0',), ('ps:1',))
    """
    if replicas is not None and not is_count(replicas, 1):
        raise PipelineError(
            f"replicas is {replicas!r}; give how many copies of the pipeline there "
            "are, a whole number from 1 on"
        )
    if isinstance(tasks, int) and not isinstance(tasks, bool):
        count = replicas or 1
        rows = dealt([f"/job:worker/task:{n}" for n in range(tasks * count)], count)
    else:
        rows = _named(tasks, replicas)
    for device in (device for row in rows for device in row):
        as_spec(device)
    if len(rows) > 1:
        _refuse_shared(rows)
    return rows


def dealt(devices: Sequence[str], replicas: int) -> Rows:
    """Returns as many devices for each replica, in order.

    Raises:
      PipelineError: they cannot be dealt evenly.

    Example:
      >>> dealt(["a", "b", "c", "d"], 2)
      (('a', 'b'), ('c', 'd'))
    """
    each = len(devices) // replicas
    if len(devices) % replicas:
        raise PipelineError(
            f"{len(devices)} tasks cannot be dealt to {replicas} replicas; give each "
            f"as many, {replicas * max(each, 1)} or {replicas * (each + 1)} in all"
        )
    return tuple(tuple(devices[n * each : (n + 1) * each]) for n in range(replicas))


def _named(tasks: Any, replicas: int | None) -> Rows:
    values = tasks.tolist() if isinstance(tasks, np.ndarray) else tasks
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise PipelineError(f"tasks is {tasks!r}; {_KINDS}")
    if all(isinstance(value, str) for value in values):
        return dealt(list(values), replicas or 1)
    rows = [tuple(v) if isinstance(v, list | tuple | np.ndarray) else v for v in values]
    for row in rows:
        if not isinstance(row, tuple) or not all(isinstance(v, str) for v in row):
            wrong = list(row) if isinstance(row, tuple) else row
            raise PipelineError(f"tasks has {wrong!r}; {_KINDS}")
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise PipelineError(
            f"tasks has rows of {' and '.join(map(str, lengths))} tasks; each row is a "
            "replica of the pipeline, and all have as many tasks"
        )
    if replicas not in {None, len(rows)}:
        raise PipelineError(
            f"replicas is {replicas} and tasks has {len(rows)} rows, one for each "
            "replica; leave replicas out"
        )
    return tuple(tuple(map(str, row)) for row in rows)


def _refuse_shared(rows: Rows) -> None:
    names = [as_spec(device).task_name or device for row in rows for device in row]
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise PipelineError(
            f"tasks has '{name}' {count} times; it can be part of one replica only, so "
            "give another task in its place"
        )
