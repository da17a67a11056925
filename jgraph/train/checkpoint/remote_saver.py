"""Remote saver: checkpoints of a detached run, which its master takes.

The client saves the first one. All others have the same arrays, so the master makes
their files like that one's, and no task needs Orbax or the model for it.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self, final

import jax

from jgraph.client.cluster import Cluster
from jgraph.client.connection import unique
from jgraph.client.runs.runs import wait_saved
from jgraph.client.session import Session
from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.cluster.shard_messages import shard_to
from jgraph.errors import ConfigError, JGError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.plan.program.types import value_type
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.runtime.files.manifest import directory_of
from jgraph.runtime.files.shard_files import Slice, make_proof
from jgraph.runtime.files.step_files import our_steps
from jgraph.train.checkpoint.checkpoint import absolute, stored_as
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.checkpoint.saver import Saver, Take
from jgraph.train.state.remote_arrays import total_nbytes
from jgraph.train.step.train_step import TrainStep

_LOG = logging.getLogger("jgraph.checkpoint")
_LAST_S: Final = 60.0
"""The last save may take so long; the master goes on with it."""


@final
class RemoteSaver:
    """Stands where ``Saver`` does in a run whose master saves.

    Args:
      options: where and how often.
      take: takes a snapshot of the run.
      step: updates applied before the run.
      cluster: where it runs.

    Raises:
      CheckpointError: the directory has steps that are not before this run's.
      CheckpointWriterError: another process writes there.
    """

    def __init__(
        self, options: Checkpoints, take: Take, step: int, cluster: Cluster
    ) -> None:
        with Saver(options, take, step) as first:
            first.finish()
            self.directory = first.directory
        self._step = step
        self._cluster = cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leaves it to the master."""

    def note(self, step: int) -> None:
        """Learns how far the run is."""
        self._step = step

    def save_halted(self, go_on: Callable[[], bool]) -> None:
        """Lets loops go on: it is the master that saves."""
        go_on()

    def wait(self) -> None:
        """Waits for nothing: see ``Saver.wait``."""

    def save(self) -> None:
        """Waits until the master has saved a run whose loops have ended."""
        self.finish()

    def go_back(self, step: int) -> None:
        """Goes on from ``step``."""
        self._step = step

    def finish(self) -> None:
        """Waits until the master has saved what came out in the end."""
        why = "its log says why"
        try:
            wait_saved(self._cluster, str(self.directory), _LAST_S)
        except JGError as error:
            why = error.message
        if our_steps(self.directory)[-1:] < [self._step]:
            _LOG.warning("the master has not saved step %d: %s", self._step, why)


def wait_saved_by_master(cluster: Cluster, directory: Path) -> None:
    """Waits until the master of a run has saved it, if it does; says why it did not."""
    try:
        wait_saved(cluster, str(directory), _LAST_S)
    except JGError as error:
        _LOG.warning("the master has not saved the run: %s", error.message)


def why_unsaved(options: Checkpoints, step: TrainStep) -> str:
    """Returns why a master cannot save this; empty: it can."""
    if options.best is not None:
        return f"best={options.best!r:.60} needs a client that evaluates; leave it out"
    if not isinstance(options.keep, int):
        return (
            f"keep={options.keep!r:.60} is a policy; give the number of steps to keep"
        )
    if step.tables:
        return "the rows of hash tables are sorted by the client; save with run.save(…)"
    if any(v.spec.sharding and v.spec.sharding.axis for v in step.variables):
        return "a variable is cut along another axis than the first; cut its rows"
    return ""


def check_remote_saving(options: Checkpoints, step: TrainStep) -> None:
    """Refuses what a master cannot save.

    Raises:
      ConfigError: says why.
    """
    if why := why_unsaved(options, step):
        raise ConfigError(f"the master of a detached run saves its checkpoints: {why}")


def saves_order(
    step: TrainStep, session: Session, cluster: Cluster, options: Checkpoints
) -> tuple[pb.RunSaves, Program]:
    """Returns what the master is to save; the program for it, to be registered.

    Args:
      step: of the run; its variables have values.
      session: knows where the variables are.
      cluster: where it runs.
      options: where and how often.
    """
    directory = absolute(options.directory)
    driver = [*map(TaskName, cluster.tasks("ps")), *step.owners][0]
    program, snapshot = session.snapshots.repeatable(step.variables, driver)
    shards: defaultdict[str, list[Any]] = defaultdict(list)
    numbers = stored_as(step.unflatten(list(range(len(step.names)))))
    for path, number in jax.tree_util.tree_flatten_with_path(numbers)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        variable = step.variables[number]
        whole = Slice.whole(directory_of(name), value_type(variable.spec.aval))
        for shard in snapshot.shards(variable, whole):
            shards[shard.task].append(shard_to(shard))
    assert isinstance(options.keep, int)  # checked
    saves = pb.RunSaves(
        directory=str(directory),
        proof=make_proof(directory),
        every=options.every,
        halt_s=bulk_timeout_s(total_nbytes(step.variables)),
        keep=options.keep,
        snapshot=unique("snapshot"),
        driver=driver,
        container=next(iter(snapshot.copies.values())).spec.container,
        tasks=[pb.TaskShards(task=t, shards=files) for t, files in shards.items()],
    )
    return saves, program
