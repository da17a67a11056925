"""Clusters of ours that run steps when asked: what null steps and Trainers share."""

from typing import Any, Self, final

import jgraph as jg
from benchmarks import measure
from jgraph.client.cluster import Cluster


class OnCluster:
    """Work on a cluster of its own, which ends with the ``with`` block."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def peaks(self) -> dict[str, float]:
        """Returns the peak memory of each task, in MB."""
        return {task: measure.peak_mb(pid) for task, pid in self._pids().items()}

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU time that each task has used."""
        return {task: measure.cpu_seconds(pid) for task, pid in self._pids().items()}

    def _pids(self) -> dict[str, int]:
        cluster = self.cluster
        if not isinstance(cluster, jg.LocalCluster):
            return {}  # the processes of others cannot be looked at
        return {str(task): cluster.pid(task) for task in cluster.tasks()}

    def close(self) -> None:
        self.cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@final
class Training(OnCluster):
    """A Trainer, asked for steps of all workers of its cluster.

    Args:
      cluster: is closed with this.
      trainer: trains on it.
      data: what it trains on.
      batch: examples of one worker's step.
      in_step: whether an update takes a step of every worker.
    """

    def __init__(
        self,
        cluster: jg.LocalCluster,
        trainer: jg.Trainer,
        data: Any,
        batch: int,
        *,
        in_step: bool = False,
    ) -> None:
        super().__init__(cluster)
        self.trainer, self.data, self.batch = trainer, data, batch
        self._in_step = in_step

    def run(self, workers: int, steps: int) -> measure.Times:
        """Runs ``steps`` steps on each of the workers."""
        updates = steps if self._in_step else workers * steps
        run = self.trainer.fit(
            self.data, steps=updates, batch_size=self.batch, progress=False
        )
        losses = run.metrics("loss")
        if self._in_step:
            # All workers end a step together.
            return [losses["seconds"]] * workers
        return [losses["seconds"][losses["replica"] == i] for i in range(workers)]

    @property
    def bytes_per_step(self) -> int:
        """What one step sends between tasks at most; known after the first run."""
        sent: int = self.trainer.plan().nbytes_per_step
        return sent
