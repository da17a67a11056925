"""Identity of a server: its task in the cluster, and the address to announce."""

from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import is_loopback
from jgraph.errors import ConfigError
from jgraph.graph.ir import TaskName


def dialled(listed: str, bound: str) -> str:
    """Returns where others reach a task; 0.0.0.0 is no address that one can dial."""
    host, port = bound.rpartition(":")[::2]
    return bound if is_loopback(host) else f"{listed.rpartition(':')[0]}:{port}"


def with_address(spec: ClusterSpec, task: TaskName, address: str) -> ClusterSpec:
    """Returns the spec with the address that a task really listens on."""
    jobs: dict[str, dict[int, str]] = {}
    for name in spec.tasks():
        job, index = name.removeprefix("/job:").split("/task:")
        where = address if name == task else spec.address(name)
        jobs.setdefault(job, {})[int(index)] = where
    return ClusterSpec(jobs, port_zero=True)


def own_task(
    cluster: ClusterSpec, job_name: str | None, task_index: int | None
) -> TaskName:
    """Returns the task that a server is told to be; it may be left out if it is clear.

    Raises:
      ConfigError: it is not.
      UnknownDeviceError: the cluster has no such task.
    """
    tasks = cluster.tasks()
    if job_name is None and len(tasks) == 1:
        return tasks[0]
    if job_name is None or (task_index is None and cluster.num_tasks(job_name) != 1):
        raise ConfigError(
            "which task of the cluster is this server? Give job_name and task_index, "
            "on the command line --job and --task; "
            f"the cluster has {', '.join(tasks)}"
        )
    index = cluster.task_indices(job_name)[0] if task_index is None else task_index
    cluster.task_address(job_name, index)
    return TaskName(f"/job:{job_name}/task:{index}")
