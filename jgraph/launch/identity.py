"""Identity of a server, from environment variables of Slurm or Kubernetes."""

import re
from collections.abc import Mapping
from typing import Final

from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import ClusterSpecError
from jgraph.graph.device import DeviceSpec

_ORDINAL: Final = re.compile(r"-(\d+)\Z")


def task_here(
    spec: ClusterSpec, job: str | None, task: int | None, environ: Mapping[str, str]
) -> tuple[str | None, int | None]:
    """Returns job and index as told, or as a launcher's variables say; None: unknown.

    In this order: what is told; ``JOB_COMPLETION_INDEX`` of an Indexed Job; the ordinal
    at the end of the ``HOSTNAME`` of a pod, as a StatefulSet gives it. Pods have to be
    told their job, which they do not know. Without a job: ``SLURM_PROCID``, which
    counts the tasks in the order of the cluster file.

    Args:
      spec: the cluster.
      job: of ``--job``.
      task: of ``--task``.
      environ: environment variables.

    Raises:
      ClusterSpecError: Slurm started more processes than the cluster has tasks.

    Example:
      >>> spec = ClusterSpec({"ps": ["a:1"], "worker": ["b:1", "c:1"]})
      >>> task_here(spec, None, None, {"SLURM_PROCID": "2"})
      ('worker', 1)
      >>> task_here(spec, "worker", None, {"JOB_COMPLETION_INDEX": "1"})
      ('worker', 1)
    """
    if task is not None:
        return job, task
    if job is not None:
        return job, _index_of_pod(environ)
    if "SLURM_PROCID" in environ:
        return _by_rank(spec, int(environ["SLURM_PROCID"]))
    return None, None


def _index_of_pod(environ: Mapping[str, str]) -> int | None:
    if "JOB_COMPLETION_INDEX" in environ:
        return int(environ["JOB_COMPLETION_INDEX"])
    ordinal = _ORDINAL.search(environ.get("HOSTNAME", ""))
    # A host that is called node-3 is no pod.
    in_pod = "KUBERNETES_SERVICE_HOST" in environ
    return int(ordinal[1]) if ordinal and in_pod else None


def _by_rank(spec: ClusterSpec, rank: int) -> tuple[str | None, int | None]:
    tasks = spec.tasks()
    if rank >= len(tasks):
        raise ClusterSpecError(
            f"SLURM_PROCID is {rank}, and the cluster has {len(tasks)} tasks; start as "
            f"many: srun --ntasks={len(tasks)}"
        )
    found = DeviceSpec.from_string(tasks[rank])
    return found.job, found.task
