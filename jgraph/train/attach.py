"""Attach: finds a run that another client began, and takes its variables."""

import logging
import threading
from functools import partial
from typing import Final

from jgraph.client.cluster import Cluster
from jgraph.client.runs.follower import wait_for_new_master
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
from jgraph.train.arguments import check_attachable, check_private
from jgraph.train.attempt import Attempt
from jgraph.train.parts import TrainerBuild, TrainerConfig
from jgraph.train.state.remote_state import RemoteState

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
        matches = [run for run in runs if run.state == "running"]
    else:
        matches = [run for run in runs if run.name == name]
    if len(matches) == 1:
        return matches[0]
    listing = ", ".join(f"'{run.name}' ({run.state})" for run in runs) or "none"
    subject = "one run that goes on" if name is None else f"the run '{name}'"
    raise ConfigError(
        f"the cluster does not have {subject}; its runs are: {listing}. Runs outlive "
        "their client with fit(…, detached=True)"
    )


def attach(config: TrainerConfig, parts: TrainerBuild, name: str | None) -> Attempt:
    """Returns what follows a run that another client began; see ``Trainer.attach``."""
    cluster = check_attachable(config.cluster, config.strategy)
    check_private(config.strategy, check_finite=False, is_detached=True)
    info = find_run(cluster, name)
    try:
        adopt = partial(_adopt, cluster, info, config.clock)
        runner = parts.adopt(info.container, info.tables, adopt)
    except UninitializedError as error:
        where = info.checkpoints
        where = where and f", from its checkpoint: trainer.restore('{where}')"
        raise TaskLostError(
            f"run '{info.name}' does not go on, and a ps has lost what it held "
            f"({error.message.rstrip('.')}); go on with another run{where}",
            run=info.name,
        ) from error
    stop = threading.Event()
    return Attempt(
        runner=runner,
        chunks=partial(runner.runs.attached, info, stop),
        first=info.first_step,
        total=info.steps,
        batch_size=info.batch_size,
        stop=stop,
        ends_here=False,
    )


def _adopt(cluster: Cluster, info: RunInfo, clock: Clock, state: RemoteState) -> None:
    """Lets a client have the variables of a run, as soon as all ps do.

    The master of a run that lost a ps gives them to it again, which is waited for.

    Raises:
      UninitializedError: the run does not go on, and a ps has lost what it held.
      JGError: likewise, and a ps does not answer.
    """
    polling, is_told = Polling(_POLL_S, WAIT_S, clock), False
    while True:
        if info.ps and len(state.step.arrangement.ps) != info.ps:
            state.move_to(info.ps)
        state.look_at(*info.homes)
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
