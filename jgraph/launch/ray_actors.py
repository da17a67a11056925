"""Ray actors of a cluster's tasks, as the process that made them sees them.

They lie in a placement group, a bundle each: it keeps a task's resources while it is
dead, and brings it back to the host that its address names.
"""

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import ConfigError, StartError
from jgraph.graph.device import TaskName
from jgraph.launch.ray_task import (
    RayOrder,
    RayTask,
    end_of_log,
    forget_log,
    free_address,
)
from jgraph.rpc.security.tls import file_stem

_LOG = logging.getLogger("jgraph.ray")
_ANSWER_S: Final = 10.0
_WARN_S: Final = 2.0
_GRACE_S: Final = 1.0
_LOG_LINES: Final = 20


def needs_ray() -> Any:
    """Imports Ray.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import ray
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            f"jg.RayCluster needs Ray, which cannot be imported here ({error}); type: "
            "pip install 'jgraph[ray]', or use jg.LocalCluster on this machine"
        ) from error
    return ray


@final
class RayActors:
    """An actor for each task.

    Args:
      tasks: which.
      asked: what a task of a job asks of Ray; one CPU if its job is not named.
      spread: over as many nodes as there are, or close together.

    Raises:
      ConfigError: Ray is not installed, or a job of ``asked`` has no task.
    """

    def __init__(
        self,
        tasks: Sequence[TaskName],
        asked: Mapping[str, Mapping[str, float]],
        *,
        spread: bool,
    ) -> None:
        self._ray = needs_ray()
        jobs = {_job_of(task) for task in tasks}
        if unknown := sorted(asked.keys() - jobs):
            raise ConfigError(
                f"resources names '{unknown[0]}', and the cluster has only "
                f"{', '.join(sorted(jobs))}; write for example "
                'resources={"worker": {"CPU": 4, "GPU": 1}}'
            )
        self._tasks = list(tasks)
        self._asked = [dict(asked.get(_job_of(task), {"CPU": 1})) for task in tasks]
        self._spread = spread
        self._name = f"jgraph-ray-{secrets.token_hex(6)}"
        self._group: Any = None
        self._actors: dict[TaskName, Any] = {}
        self._nodes: dict[TaskName, str] = {}
        self._ours = False

    def reserve(self, timeout_s: float) -> ClusterSpec:
        """Waits for the resources; returns where each task will be.

        Raises:
          StartError: Ray has not as much, or jgraph is not installed on its nodes.
        """
        ray = self._ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
            self._ours = True
        self._group = ray.util.placement_group(
            self._asked, strategy="SPREAD" if self._spread else "PACK", name=self._name
        )
        if not self._group.wait(min(_WARN_S, timeout_s)):
            _LOG.warning("waiting for Ray: %s", self._shortage())
            # A Ray of this process gets no nodes; others may have an autoscaler.
            alone = self._ours and "RAY_ADDRESS" not in os.environ
            left = 0.0 if alone else max(0.0, timeout_s - _WARN_S)
            if not self._group.wait(left):
                raise StartError(
                    f"Ray has not the resources that the tasks ask for: "
                    f"{self._shortage()}. Start fewer tasks, give nodes to Ray, or let "
                    'tasks ask for less, resources={"ps": {"CPU": 0.5}}'
                )
        asks = [self._there(free_address, task).remote() for task in self._tasks]
        found = self._get(asks, timeout_s, "find a port on the nodes of Ray")
        jobs: dict[str, list[str]] = {}
        for task, address in zip(self._tasks, found, strict=True):
            jobs.setdefault(_job_of(task), []).append(address)
        return ClusterSpec(jobs)

    def start(
        self,
        orders: Sequence[RayOrder],
        restarts: int,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """Makes the actors, and waits until they listen.

        Raises:
          StartError: one could not; shows why.
        """
        made = self._ray.remote(RayTask)
        for order in orders:
            asked = dict(self._asked[self._tasks.index(order.task)])
            self._actors[order.task] = made.options(
                name=f"{self._name}{order.task}",
                num_cpus=asked.pop("CPU", 0),
                num_gpus=asked.pop("GPU", 0),
                resources=asked,
                max_restarts=restarts,
                runtime_env={"env_vars": dict(environment)},
                scheduling_strategy=self._bundle(order.task),
            ).remote(order)
        asks = [actor.node.remote() for actor in self._actors.values()]
        nodes = self._get(asks, timeout_s, "start the servers")
        self._nodes = dict(zip(self._actors, nodes, strict=True))

    def log_of(self, task: TaskName) -> str:
        """Returns the log of a task, below the temporary files of its host."""
        return f"{self._name}/{file_stem(task)}.log"

    def tail(self, task: TaskName, lines: int = _LOG_LINES) -> str:
        """Returns the end of the log of a task, also of one that is dead."""
        ask = self._there(end_of_log, task).remote(self.log_of(task), lines)
        (text,) = self._get([ask], _ANSWER_S, f"read the log of {task}")
        return str(text)

    def pid(self, task: TaskName) -> int:
        """Returns the process id of a task, on its host."""
        ask = self._actors[task].pid.remote()
        (found,) = self._get([ask], _ANSWER_S, f"ask {task} for its process")
        return int(found)

    def kill(self, task: TaskName) -> None:
        """Kills the process of a task, which Ray makes again."""
        self._ray.kill(self._actors[task], no_restart=False)

    def gone(self) -> dict[TaskName, str]:
        """Returns why, by task, for those that Ray does not make again."""
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        found = {
            task: f"{task} was lost with its node of Ray, and does not move to "
            "another: clients and tasks know its address"
            for task, node in self._nodes.items()
            if node not in alive
        }
        here = {t: actor for t, actor in self._actors.items() if t not in found}
        asks = {task: actor.pid.remote() for task, actor in here.items()}
        for task, ask in asks.items():
            try:
                self._ray.get(ask, timeout=0.1)
            except self._ray.exceptions.ActorDiedError:
                tail = self.tail(task)
                found[task] = f"{task} died. The end of its log:\n{tail}"
            except self._ray.exceptions.RayError:
                continue  # it is being made again
        return found

    def end(self) -> None:
        """Ends the servers, then the actors, and gives their resources back."""
        ray = self._ray
        if not ray.is_initialized():  # the user has ended Ray, and all with it
            return
        if asks := [actor.stop.remote(_GRACE_S) for actor in self._actors.values()]:
            ray.wait(asks, num_returns=len(asks), timeout=_ANSWER_S)
        for actor in self._actors.values():
            ray.kill(actor)
        with suppress(StartError, ray.exceptions.RayError):
            asks = [
                self._there(forget_log, task).remote(self.log_of(task))
                for task in self._actors
            ]
            self._get(asks, _ANSWER_S, "remove the logs")
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        if self._ours:
            ray.shutdown()

    # ------------------------------------------------------------ parts

    def _bundle(self, task: TaskName) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._tasks.index(task)
        )

    def _there(self, function: Any, task: TaskName) -> Any:
        """Returns a function of Ray that runs where a task is, and asks for nothing."""
        return self._ray.remote(function).options(
            num_cpus=0, max_retries=0, scheduling_strategy=self._bundle(task)
        )

    def _get(self, asks: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
        try:
            found: list[Any] = self._ray.get(list(asks), timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            raise StartError(
                f"could not {what} within {timeout_s:g} s; see the logs of Ray"
            ) from None
        except self._ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise StartError(
                f"could not {what}: {last}. Nodes of Ray need jgraph and the JAX of "
                "this process"
            ) from error
        return found

    def _shortage(self) -> str:
        has = self._ray.cluster_resources()
        free = self._ray.available_resources()
        kinds = sorted({kind for asked in self._asked for kind in asked})
        sums = {k: sum(asked.get(k, 0) for asked in self._asked) for k in kinds}
        return "; ".join(
            f"{len(self._tasks)} tasks ask for {total:g} {kind}, Ray has "
            f"{has.get(kind, 0):g}, {free.get(kind, 0):g} of them free"
            for kind, total in sums.items()
        )


def _job_of(task: TaskName) -> str:
    return task.removeprefix("/job:").partition("/")[0]
