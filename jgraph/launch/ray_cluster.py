"""A cluster whose servers are actors of Ray, for those who have Ray running already."""

import atexit
import logging
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from jgraph.client.cluster import Cluster, open_cluster
from jgraph.clock import Clock, SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.options import check_sources
from jgraph.cluster.spec import ClusterSpec, task_named
from jgraph.cluster.transport_choice import TransportChoice, as_tls, check_transport
from jgraph.counts import check_flags
from jgraph.errors import ConfigError, RescaleError, StartError
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.device import TaskName
from jgraph.launch.local.processes import (
    START_S,
    check_environment,
    counts_of,
    tasks_of,
)
from jgraph.launch.local.restarts import check_none_gone, check_restarts
from jgraph.launch.ray_task import (
    RayOrder,
    RayTask,
    end_of_log,
    forget_log,
    free_address,
)
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import file_stem
from jgraph.rpc.security.token import NAME, Token

# Ray actors of a cluster's tasks, as the process that made them sees them.
#
# They lie in a placement group, a bundle each: it keeps a task's resources while it is
# dead, and brings it back to the host that its address names.


_LOG = logging.getLogger("jgraph.ray")
_ANSWER_S: Final = 10.0
_WARN_S: Final = 2.0
_GRACE_S: Final = 1.0
_LOG_LINES: Final = 20
_SPARES: Final = 64
"""Certificates of a job for tasks that may join."""


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
        self._by_job = {job: dict(one) for job, one in asked.items()}
        self._asked = [self._asks(task) for task in tasks]
        self._spread = spread
        self._name = f"jgraph-ray-{secrets.token_hex(6)}"
        self._group: Any = None
        # Of tasks that join: a placement group each, which goes with it.
        self._own_groups: dict[TaskName, Any] = {}
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
            remaining_s = 0.0 if alone else max(0.0, timeout_s - _WARN_S)
            if not self._group.wait(remaining_s):
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
        actor_class = self._ray.remote(RayTask)
        for order in orders:
            asked = self._asks(order.task)
            self._actors[order.task] = actor_class.options(
                name=f"{self._name}{order.task}",
                num_cpus=asked.pop("CPU", 0),
                num_gpus=asked.pop("GPU", 0),
                resources=asked,
                max_restarts=restarts,
                runtime_env={"env_vars": dict(environment)},
                scheduling_strategy=self._bundle(order.task),
            ).remote(order)
        new_tasks = [order.task for order in orders]
        asks = [self._actors[task].node.remote() for task in new_tasks]
        nodes = self._get(asks, timeout_s, "start the servers")
        self._nodes |= dict(zip(new_tasks, nodes, strict=True))

    def add(
        self,
        orders: Sequence[RayOrder],
        restarts: int,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """Makes actors of tasks that join, and waits until they are members.

        Raises:
          StartError: Ray has not what they ask for, or one could not start; none of
            them is left.
        """
        ray, tasks = self._ray, [order.task for order in orders]
        for task in tasks:
            self._own_groups[task] = ray.util.placement_group([self._asks(task)])
        try:
            for task in tasks:
                self._wait_for_group(task, timeout_s)
            self.start(orders, restarts, environment, timeout_s)
        except BaseException:
            for task in tasks:
                self.forget(task)
            raise

    def _wait_for_group(self, task: TaskName, timeout_s: float) -> None:
        if not self._own_groups[task].wait(timeout_s):
            free = self._ray.available_resources().get("CPU", 0)
            raise StartError(
                f"Ray has not the resources that {task} asks for ({self._asks(task)}) "
                f"after {timeout_s:g} s; {free:g} CPU are free: give nodes to Ray, or "
                "ask for fewer tasks",
                task=task,
            )

    def forget(self, task: TaskName) -> None:
        """Ends the actor of a task that joined, and gives back what it had of Ray."""
        if (actor := self._actors.pop(task, None)) is not None:
            self._ray.kill(actor)
        self._nodes.pop(task, None)
        if (group := self._own_groups.pop(task, None)) is not None:
            self._ray.util.remove_placement_group(group)

    def knows(self, task: TaskName) -> bool:
        """Whether there is, or was, an actor of a task."""
        return task in self._actors

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
        for group in (self._group, *self._own_groups.values()):
            if group is not None:
                ray.util.remove_placement_group(group)
        if self._ours:
            ray.shutdown()

    # ------------------------------------------------------------ parts

    def _bundle(self, task: TaskName) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if (own := self._own_groups.get(task)) is not None:
            return PlacementGroupSchedulingStrategy(own, placement_group_bundle_index=0)
        return PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._tasks.index(task)
        )

    def _asks(self, task: TaskName) -> dict[str, float]:
        return dict(self._by_job.get(_job_of(task), {"CPU": 1}))

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


@final
class RayCluster(Cluster):
    """A cluster whose servers are actors of Ray, on whatever nodes Ray has.

    Uses the Ray that is connected to; where none is, calls ``ray.init()``, which
    connects to the one that ``RAY_ADDRESS`` names or starts one here. Nodes need jgraph
    and the JAX of this process. All connections have certificates of this cluster. The
    actors end with ``close()``, at the end of a ``with`` block, and with this process.

    Needs ``pip install 'jgraph[ray]'``.

    Args:
      ps: how many parameter servers.
      workers: how many workers.
      evaluators: 1: a task that evaluates while the workers train on.
      jobs: further jobs, ``{"name": count}``.
      resources: what a task of a job asks of Ray, ``{"worker": {"CPU": 4, "GPU": 1}}``;
        one CPU if it is not named.
      spread: over as many nodes as there are, or close together.
      restarts: how often Ray makes an actor that died again, in all; at its old
        address, and without what it held. See ``Trainer.fit(checkpoint=…)`` for what a
        run does then. An actor whose node is lost is not made again elsewhere.
      timeout_s: how long to wait for the resources, and until all tasks serve.
      env: environment variables for the actors.
      allow_sources: see ``Server``.
      transport: see ``LocalCluster``.

    Raises:
      ConfigError: Ray is not installed, or no task.
      StartError: Ray has not what the tasks ask for, or one could not start.
      TaskMissingError: a task did not answer in time.

    Example:
      >>> with RayCluster(ps=1, workers=2) as cluster:  # doctest: +SKIP
      ...     trainer = jg.Trainer(model, loss, tx, cluster=cluster)
    """

    @short_traceback
    def __init__(
        self,
        ps: int = 2,
        workers: int = 2,
        *,
        evaluators: int = 0,
        jobs: Mapping[str, int] | None = None,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        spread: bool = True,
        restarts: int = 2,
        timeout_s: float = START_S,
        env: Mapping[str, str] | None = None,
        allow_sources: Sequence[str] = (),
        transport: TransportChoice = "auto",
        clock: Clock | None = None,
    ) -> None:
        check_flags(spread=spread)
        check_transport(transport)
        counts = counts_of(ps, workers, evaluators, jobs)
        check_restarts(restarts)
        tasks = tasks_of(counts)
        more = {"worker": _SPARES, "ps": _SPARES if ps else 0}
        with_spares = tasks_of({j: n + more.get(j, 0) for j, n in counts.items()})
        self._spares = [task for task in with_spares if task not in tasks]
        self._restarts, self._env = restarts, check_environment(env)
        self._way: TransportChoice = transport
        self._allow_sources = check_sources(allow_sources)
        clock = clock or SystemClock()
        deadline = clock.now() + timeout_s
        self._actors = RayActors(tasks, resources or {}, spread=spread)
        self._secrets = tempfile.TemporaryDirectory(prefix="jgraph-secrets-")
        directory = Path(self._secrets.name)
        try:
            make_certificates(directory, with_spares)
            spec = self._actors.reserve(timeout_s)
            orders = [
                RayOrder(
                    task,
                    spec.to_json(),
                    _files(directory, task),
                    self._actors.log_of(task),
                    task.startswith(("/job:ps/", "/job:evaluator/")),
                    transport,
                    self._allow_sources,
                )
                for task in tasks
            ]
            remaining_s = max(1.0, deadline - clock.now())
            self._actors.start(orders, restarts, self._env, remaining_s)
            chief = TaskName("/job:worker/task:0")
            address = spec.address(chief if workers else tasks[0])
            remaining_s = max(1.0, deadline - clock.now())
            files = as_tls(directory, None)
            token = Token.read(directory / NAME)
            client, reply = event_loop.run(
                open_cluster(address, remaining_s, token, files)
            )
        except BaseException:
            self._end()
            raise
        atexit.register(self._end)  # before Ray's own end, which leaves the logs
        super().__init__(address, client, reply, files, token.path)

    def logs(self, task: str, tail: int = 20) -> str:
        """Returns the last lines of a task's log."""
        return self._actors.tail(self._known(task), tail)

    def pid(self, task: str) -> int:
        """Returns the process id of a task, on its host."""
        return self._actors.pid(self._known(task))

    def kill(self, task: str) -> None:
        """Kills a task's process, as a crash would; Ray makes it again."""
        self._actors.kill(self._known(task))

    @property
    def starts_workers(self) -> bool:
        """See ``Cluster.starts_workers``."""
        return True

    def _start_tasks(self, job: str, count: int) -> None:
        members, directory = set(self.tasks(job)), Path(self._secrets.name)
        free = [
            task
            for task in self._spares
            if _job_of(task) == job
            and task not in members
            and not self._actors.knows(task)
        ]
        if count > len(free):
            raise RescaleError(
                f"{count} more of job {job} cannot join: a jg.RayCluster has {_SPARES} "
                f"certificates of a job for that, and {len(free)} are not in use"
            )
        orders = [
            RayOrder(
                task,
                "",
                _files(directory, task),
                self._actors.log_of(task),
                job == "ps",
                self._way,
                self._allow_sources,
                joins=f"jgraphs://{self.address}",
            )
            for task in free[:count]
        ]
        self._actors.add(orders, self._restarts, self._env, START_S)

    def _forget_tasks(self, tasks: Sequence[TaskName]) -> None:
        for task in tasks:
            self._actors.forget(task)

    @property
    def tls_directory(self) -> str:
        """Where the certificates are, for other clients of this host."""
        return self._secrets.name

    def gone(self) -> Mapping[TaskName, str]:
        """See ``Cluster.gone``."""
        return self._actors.gone()

    @property
    def starts_again(self) -> bool:
        """See ``Cluster.starts_again``."""
        return True

    def check_startable(self) -> None:
        """See ``Cluster.check_startable``."""
        remedy = "make a new jg.RayCluster, with more restarts, and resume there with "
        check_none_gone(self.gone(), f"{remedy}trainer.restore(…)")

    def close(self) -> None:
        """Ends all actors, and gives back what they had of Ray."""
        if not self._closed:
            try:
                super().close()
            finally:
                self._end()

    def _known(self, task: str) -> TaskName:
        return task_named(task, self.spec.tasks())

    def _end(self) -> None:
        atexit.unregister(self._end)
        self._actors.end()
        self._secrets.cleanup()


def _files(directory: Path, task: TaskName) -> dict[str, bytes]:
    names = ("ca.crt", NAME, f"{file_stem(task)}.crt", f"{file_stem(task)}.key")
    return {name: (directory / name).read_bytes() for name in names}
