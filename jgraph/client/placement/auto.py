"""``jg.auto``: automatic placement by predicted step time and memory."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

from jgraph.client.connection import Connection
from jgraph.client.placement.measuring import MEASURE_S, measure
from jgraph.cluster.wait_message import show_wait
from jgraph.counts import is_count
from jgraph.errors import ConfigError, UnknownDeviceError
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.auto import AutoPlanner, Prediction
from jgraph.plan.auto.cost_model import CostModel
from jgraph.plan.plan import Plan
from jgraph.view import markup
from jgraph.view.units import ms_text

Times: TypeAlias = Sequence[float]

_cost_models: "WeakKeyDictionary[Connection, CostModel]" = WeakKeyDictionary()


@final
class AutoPlacement:
    """What ``jg.auto`` gives: ``cluster.session(placement=…)`` takes it.

    Attributes:
      planner: the cost model, the tasks, and the limits of memory.
    """

    def __init__(self, planner: AutoPlanner) -> None:
        self.planner = planner
        self._steps: list[tuple[str, tuple[TaskName, ...], Prediction, Times]] = []

    @property
    def cost_model(self) -> CostModel:
        """How fast tasks and links are; ``save`` keeps it for another time."""
        return self.planner.model

    def watch(self, plan: Plan, recent_s: Times) -> None:
        """Shows a planned step, and the seconds of its last runs, in ``report``."""
        if plan.prediction is not None:
            tasks = tuple(p.task for p in plan.program.partitions if p.nodes)
            row = plan.program.name, tasks, plan.prediction, recent_s
            self._steps.append(row)

    def report(self) -> "AutoReport":
        """Returns, for each step that was placed, predicted beside measured times."""
        return AutoReport([_row(*step) for step in self._steps])

    def __repr__(self) -> str:
        tasks = ", ".join(self.planner.tasks)
        return f"<automatic placement on {tasks}; report() tells times>"

    def _repr_html_(self) -> str:
        return markup.lines(f"{self!r}\n{self.report()}")


@final
class AutoReport:
    """Predicted and measured times of steps; prints as a table.

    Attributes:
      rows: per step ``name``, ``tasks`` with a part in it, ``predicted_s``,
        ``alone_s`` (predicted for one task; None if it does not fit one), ``runs``,
        and ``measured_s``, the median of the last runs, or None.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            measurement = ms_text(row["measured_s"]) if row["runs"] else "not run"
            alone = ""
            if row["alone_s"] is not None:
                alone = f", all on one task predicted {ms_text(row['alone_s'])}"
            lines.append(
                f"{row['name']} on {', '.join(row['tasks'])}: predicted "
                f"{ms_text(row['predicted_s'])}, measured {measurement} "
                f"(median of {row['runs']}){alone}"
            )
        return "\n".join(lines) or "no step was placed yet"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return markup.lines(str(self))


def _row(
    name: str, tasks: Sequence[TaskName], prediction: Prediction, recent_s: Times
) -> dict[str, Any]:
    return {
        "name": name,
        "tasks": list(tasks),
        "predicted_s": prediction.seconds,
        "alone_s": next(iter(prediction.alone.values()), None),
        "runs": len(recent_s),
        "measured_s": statistics.median(recent_s) if recent_s else None,
    }


def auto(
    cluster: Connection,
    cost_model: CostModel | None = None,
    *,
    tasks: Sequence[str] | None = None,
    memory_limit: int | Mapping[str, int] | None = None,
    timeout_s: float = MEASURE_S,
) -> AutoPlacement:
    """Places operations and variables so that a step is predicted to take least time.

    Parts of a model go to several tasks where that pays or where memory makes it
    necessary; else all goes on one. What is under ``jg.device``, and variables with a
    device or a value, stay where they are. ``session.plan(step, …)`` tells what was
    chosen and predicted, ``report()`` also what was measured since.

    Args:
      cluster: a ``LocalCluster`` or what ``jg.connect`` gave.
      cost_model: how fast its tasks and links are, for example
        ``jg.CostModel.load("links.json")``. If unset, it is measured, which takes some
        seconds, once per cluster; nothing else should run meanwhile.
      tasks: where things may go that nobody has placed; if unset, the workers, or all
        tasks if there is none.
      memory_limit: bytes that each of these tasks may use for variables and values of
        a step, or bytes by task; without limit if unset.
      timeout_s: limit for measuring, in seconds.

    Raises:
      ConfigError: a limit that is none, no task, or a cost model of another cluster.
      UnknownDeviceError: the cluster has no such task.
      TaskLostError, DeadlineError: measuring failed.
      MemoryLimitError: when a step is planned: nothing keeps the limits.

    Source: the cost model and the simulated placement of "TensorFlow: Large-Scale
    Machine Learning on Heterogeneous Distributed Systems" (2015), section 3.2.1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jgraph as jg
      >>> server = jg.Server({"worker": ["localhost:0"]})
      >>> w = jg.Variable("w", jnp.ones((4, 4)))
      >>> with jg.connect(server.target) as cluster:
      ...     placement = auto(cluster)
      ...     with cluster.session(placement=placement) as sess:
      ...         found = sess.run(lambda x: (x @ w[...]).sum(), jnp.ones((2, 4)))
      ...         report = placement.report()
      >>> float(found), report.rows[0]["tasks"]
      (32.0, ['/job:worker/task:0'])
      >>> server.stop()
    """
    if not isinstance(cluster, Connection):
        raise ConfigError(
            f"cluster of jg.auto is {cluster!r:.60}; give what jg.connect("
            "'jgraph://host:port') or jg.LocalCluster(…) returns"
        )
    task_names = _tasks(cluster, tasks)
    limits = _limits(cluster, memory_limit, task_names)
    if cost_model is None:
        cost_model = measured(cluster, timeout_s)
    elif not isinstance(cost_model, CostModel):
        raise ConfigError(
            f"cost_model is {cost_model!r:.60}; give what jg.CostModel.load(path) reads"
        )
    cost_model.check(cluster.tasks())
    return AutoPlacement(AutoPlanner(cost_model, task_names, limits))


def measured(cluster: Connection, timeout_s: float = MEASURE_S) -> CostModel:
    """Returns the cost model of a cluster, measured once per connection.

    Raises:
      TaskLostError, DeadlineError: see ``measure``.
    """
    if cluster not in _cost_models:
        with show_wait("measuring the tasks and the links between them"):
            _cost_models[cluster] = measure(cluster, timeout_s=timeout_s)
    return _cost_models[cluster]


def _tasks(
    cluster: Connection, selection: Sequence[str] | None
) -> tuple[TaskName, ...]:
    tasks = cluster.tasks()
    if selection is None:
        return tuple(cluster.tasks("worker") or tasks)
    if isinstance(selection, str):
        raise ConfigError(
            f"tasks of jg.auto is {selection!r:.60}; give a list of names, for example "
            f"tasks=[{tasks[0]!r}]"
        )
    unknown = [task for task in selection if task not in tasks]
    if unknown:
        raise UnknownDeviceError(
            f"tasks of jg.auto names {', '.join(map(repr, unknown))}, and the cluster "
            f"has {', '.join(tasks)}",
            tasks=tasks,
        )
    if not selection:
        raise ConfigError("tasks of jg.auto is empty; name one, or leave it out")
    return tuple(TaskName(task) for task in dict.fromkeys(selection))


def _limits(
    cluster: Connection,
    memory_limit: int | Mapping[str, int] | None,
    tasks: Sequence[TaskName],
) -> dict[TaskName, int]:
    if memory_limit is None:
        return {}
    limits = (
        memory_limit
        if isinstance(memory_limit, Mapping)
        else dict.fromkeys(tasks, memory_limit)
    )
    cluster_tasks = cluster.tasks()
    for task, nbytes in limits.items():
        if task not in cluster_tasks:
            raise UnknownDeviceError(
                f"memory_limit of jg.auto names '{task}', which the cluster does not "
                f"have; it has {', '.join(cluster_tasks)}",
                tasks=cluster_tasks,
            )
        if not is_count(nbytes, 1):
            raise ConfigError(
                f"memory_limit of {task} is {nbytes!r:.40}; give bytes, for example "
                "8 << 30"
            )
    return {TaskName(task): nbytes for task, nbytes in limits.items()}
