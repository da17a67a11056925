"""Attach: follows a detached run that another client began."""

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from jgraph.client.cluster import Cluster
from jgraph.client.runs.follower import RunFollower, wait_for_new_master
from jgraph.client.runs.runs import RunInfo, position_of
from jgraph.clock import Clock
from jgraph.cluster.polling import Polling
from jgraph.coordination.run.supervisor import WAIT_S
from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    TaskLostError,
    UninitializedError,
)
from jgraph.train.parts import TrainerBuild, TrainerConfig
from jgraph.train.run.history import History
from jgraph.train.run.run import Result, Run
from jgraph.train.run.watch import Watch
from jgraph.train.state.remote_arrays import KEPT_BYTES
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.workers import chunks_of

_LOG = logging.getLogger("jgraph.run")
_POLL_S: Final = 0.2
"""Between two looks: that a run goes on again shows only by asking for it."""


def find_run(cluster: Cluster, name: str | None) -> RunInfo:
    """Returns a run of a cluster by its name; the only one that goes on if None.

    Raises:
      ConfigError: there is none, or several; says which there are.
    """
    runs = cluster.runs()
    if name is None:
        found = [run for run in runs if run.state == "running"]
    else:
        found = [run for run in runs if run.name == name]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"'{run.name}' ({run.state})" for run in runs) or "none"
    wanted = "one run that goes on" if name is None else f"the run '{name}'"
    raise ConfigError(
        f"the cluster does not have {wanted}; its runs are: {known}. Runs outlive "
        "their client with fit(…, detached=True)"
    )


def attach(
    result: Result, given: TrainerConfig, parts: TrainerBuild, name: str | None
) -> Run:
    """Returns a run that another client began; see ``Trainer.attach``."""
    cluster = given.cluster
    check_detachable(cluster, given.strategy)
    assert cluster is not None  # checked
    info = find_run(cluster, name)
    try:
        adopt = partial(_adopt, cluster, info, given.clock)
        state = parts.adopt(info.container, adopt)
    except UninitializedError as error:
        where = info.checkpoints
        where = where and f", from its checkpoint: trainer.restore('{where}')"
        raise TaskLostError(
            f"run '{info.name}' does not go on, and a ps has lost what it held "
            f"({error.message.rstrip('.')}); go on with another run{where}",
            run=info.name,
        ) from error
    history, stop = History(info.first_step), threading.Event()
    run = Run(result, history, stop)
    AttachedRun(cluster, info, run, history, state, stop, given.clock).start()
    return run


def _adopt(cluster: Cluster, info: RunInfo, clock: Clock, state: RemoteState) -> None:
    """Lets a client have the variables of a run, as soon as all ps do.

    The master of a run that lost a ps gives them to it again, which is waited for.

    Raises:
      UninitializedError: the run does not go on, and a ps has lost what it held.
      JGError: likewise, and a ps does not answer.
    """
    polling, is_told = Polling(_POLL_S, WAIT_S, clock), False
    while True:
        try:
            state.adopt(position_of(cluster, info))
        except (ClusterUnreachableError, TaskLostError, UninitializedError) as error:
            runs = [run for run in cluster.runs() if run.name == info.name]
            if not runs:  # its standby takes over just now
                runs = [wait_for_new_master(cluster, info, error)]
            (info,) = runs
            if info.state == "running" and not is_told:
                _LOG.info("run '%s' is waited for: %s", info.name, error.message)
                is_told = True
            if info.state != "running" or not polling.wait():
                raise
        else:
            return


@final
@dataclass(slots=True)
class AttachedRun:
    """What follows a run of another client.

    Attributes:
      cluster: where it is.
      info: which run; at its newest master.
      run: the user's handle.
      history: where measurements go.
      state: its variables.
      stop: set from another thread: ask it to stop.
      clock: measures rates.
    """

    cluster: Cluster
    info: RunInfo
    run: Run
    history: History
    state: RemoteState
    stop: threading.Event
    clock: Clock

    def start(self) -> None:
        """Begins in a thread."""
        threading.Thread(target=self._work, name="jgraph-attached", daemon=True).start()

    def _work(self) -> None:
        info = self.info
        watch = Watch(self.history, info.steps, info.batch_size, self.clock)
        error: BaseException | None = None
        values, position = None, None
        follower = RunFollower(self.cluster, info, self.stop)
        try:
            together = info.synchronous
            for _, chunk in chunks_of(follower, info.metrics, together=together):
                if chunk is None:
                    continue
                if chunk.restored is None:
                    self.run.report(watch.take(chunk))
                else:
                    self.history.go_back(chunk.restored.back_to, 0.0)
                    self.run.recovered(chunk.restored)
            if self.state.nbytes() <= KEPT_BYTES:
                values = self.state.values()
            self.history.ended(self.state.global_step())
            position = follower.position()
            self.state.adopt(position)  # where to go on
        except BaseException as caught:  # noqa: BLE001  # Run.wait raises it
            error = caught
        done = "done" if self.history.steps >= info.steps else "stopped"
        self.run.finish("failed" if error else done, values, position, error)
        follower.close()


def check_detachable(cluster: Cluster | None, strategy: Strategy) -> None:
    """Refuses runs that cannot outlive their client.

    Raises:
      ConfigError: says why.
    """
    if cluster is not None and cluster.ends_with_client:
        raise ConfigError(
            "detached=True lets the run go on when this process is gone, and the tasks "
            "of a jg.LocalCluster end with it; start them with `jgraph up` and connect "
            "with jg.connect(…)"
        )
    if cluster is None:
        raise ConfigError(
            f"detached=True needs a cluster, and {strategy!r} trains in this process, "
            "which ends with it; give Trainer(…, cluster=jg.connect(…))"
        )
