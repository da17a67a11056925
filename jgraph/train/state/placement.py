"""Placement of a Trainer's steps on tasks, and names of containers."""

import secrets
from collections.abc import Mapping, Sequence

from jgraph.client.cluster import Cluster
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName, VariableKey
from jgraph.plan.plan import Plan, plan


def plan_on(
    cluster: Cluster,
    graph: Graph,
    driver: TaskName,
    own: str | None = None,
    ps: Sequence[TaskName] = (),
    elsewhere: Mapping[VariableKey, TaskName] | None = None,
) -> Plan:
    """Returns what goes where; all that is not placed goes to the driver.

    Args:
      cluster: where.
      graph: what.
      driver: the task where feeds enter and fetches leave.
      own: how the names begin of variables that are the driver's, whatever their
        device says; None: no name does.
      ps: that there are, though they need not be there yet.
      elsewhere: tasks of variables, or shards, whose devices say something else.
    """
    tasks = cluster.tasks()
    tasks += [task for task in ps if task not in tasks]
    return plan(
        graph,
        tasks=tasks,
        driver=driver,
        default=DeviceSpec.from_string(driver),
        platforms=platforms_of_jobs(tasks, cluster.platforms),
        one_host=cluster.spec.is_on_one_host,
        variable_tasks={
            **{
                v.key: driver
                for v in graph.variables
                if own is not None and v.name.startswith(own)
            },
            **(elsewhere or {}),
        },
    )


def platforms_of_jobs(
    tasks: Sequence[TaskName], platforms: Mapping[TaskName, tuple[str, ...]]
) -> dict[TaskName, tuple[str, ...]]:
    """Returns for each task the kinds of device that its job has.

    A program of one task serves every other task of its job under another name, and
    those that join the job later.

    Example:
      >>> a, b = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")
      >>> platforms_of_jobs([a, b], {a: ("cpu",)})[b]
      ('cpu',)
      >>> platforms_of_jobs([a, b], {a: ("cpu",), b: ("cuda",)})[a]
      ('cpu', 'cuda')
    """
    of_jobs: dict[str, set[str]] = {}
    for task, kinds in platforms.items():
        of_jobs.setdefault(_job(task), set()).update(kinds)
    return {t: tuple(sorted(of_jobs[_job(t)])) for t in tasks if _job(t) in of_jobs}


def _job(task: TaskName) -> str:
    return task.partition("/task:")[0]


def new_container() -> str:
    """Returns a container of its own: Trainers on one cluster share no variables."""
    return f"train-{secrets.token_hex(4)}"
