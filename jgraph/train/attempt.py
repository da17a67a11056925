"""Request of a run, and what does it: the runner, its order, evaluations, snapshots."""

import logging
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

import jax

from jgraph.cluster.deadlines import CLIENT_S
from jgraph.cluster.wait_message import show_wait
from jgraph.coordination.run.supervisor import WAIT_S
from jgraph.errors import CheckpointError, ConfigError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.types import from_plain, plain_type
from jgraph.runtime.files.manifest import is_ours
from jgraph.runtime.files.step_files import our_steps, put_back
from jgraph.train.arguments import MOST_STEPS, check_detachable, check_private
from jgraph.train.checkpoint import checkpoint
from jgraph.train.checkpoint.checkpoints import Checkpoints, is_checkpoint, newest_good
from jgraph.train.checkpoint.flax_checkpoints import Imported, find, match, read
from jgraph.train.checkpoint.remote_saver import (
    RemoteSaver,
    check_remote_saving,
    wait_saved_by_master,
)
from jgraph.train.checkpoint.saver import Saver, Snapshot, Take
from jgraph.train.data.data import Data, Dataset
from jgraph.train.data.source import Source
from jgraph.train.evaluation.evaluations import Evaluation, Evaluations
from jgraph.train.evaluation.evaluator_task import as_evaluated, make_evaluations
from jgraph.train.model.trees import Tree
from jgraph.train.parts import Built, TrainerBuild, TrainerConfig
from jgraph.train.privacy.accounting import Spending
from jgraph.train.state.early_losses import EarlyWait
from jgraph.train.state.remote_arrays import RunSnapshot
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Chunk, Order, Position, Runner, position_in
from jgraph.train.strategies.strategies import (
    batches_per_update,
    check_round,
    dealt,
    examples_of,
    open_data,
    rate_of,
)


@final
@dataclass(frozen=True, slots=True)
class FitRequest:
    """What ``Trainer.fit`` was asked for."""

    data: Data | Source
    steps: int | None
    batch_size: int | None
    eval_data: Data | Source | None
    eval_every: int | None
    evaluate: Callable[..., Evaluation]
    lease_s: float | None = CLIENT_S
    """It ends when this client is gone for so long; None: it goes on."""
    checkpoint: Checkpoints | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    at_master: threading.Event = field(default_factory=threading.Event)
    """See ``Order``; also set when the run is over."""
    epochs: int | None = None
    keeps_evaluated: bool = False
    """A callback wants what is evaluated."""
    wait_s: float = WAIT_S
    """For lost tasks without which the run cannot go on."""

    @property
    def whole(self) -> bool:
        """Whether all that is evaluated is kept, until another is better."""
        options = self.checkpoint
        return self.keeps_evaluated or (
            options is not None and options.best is not None
        )

    def __post_init__(self) -> None:
        options = self.checkpoint
        if not (options is None or isinstance(options, Checkpoints)):
            raise ConfigError(
                f"checkpoint is {options!r:.60}; give jg.Checkpoints('runs/mlp', "
                "every=1000)"
            )
        if self.whole and self.eval_data is None:
            raise ConfigError(
                "the best copy is to be kept, and nothing is evaluated; give "
                "fit(eval_data=(x, y), eval_every=100)"
            )


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """What does the steps of a run, or follows them.

    Attributes:
      runner: performs the steps.
      chunks: yields what they do, to the end of the run.
      first: updates applied before.
      total: updates when all are applied.
      batch_size: examples of a batch.
      stop: set from another thread: stop after the current step.
      ends_here: the run ends with this client.
      order: which steps; None: another client ordered them.
      evaluations: evaluate the model; None: never.
      saving: saves checkpoints; None: never.
      spending: the account of what the data gives away; None: nobody keeps one.
    """

    runner: Runner
    chunks: Callable[[], Generator[Chunk, None, None]]
    first: int
    total: int
    batch_size: int
    stop: threading.Event
    ends_here: bool = True
    order: Order | None = None
    evaluations: Evaluations | None = None
    saving: Saver | RemoteSaver | None = None
    spending: Spending | None = None


_LOG = logging.getLogger("jgraph.checkpoint")
_PRIVACY_LOG = logging.getLogger("jgraph.privacy")
_DATA_LOG = logging.getLogger("jgraph.data")
_Datasets: TypeAlias = tuple[Dataset, Dataset | None]


@final
class Attempts:
    """Makes what does one run.

    Args:
      parts: of the Trainer.
      config: of the Trainer.
      request: of the run.

    Raises:
      ConfigError: a run that cannot be detached.
      DataError: data that cannot be used; names the field.
    """

    def __init__(
        self, parts: TrainerBuild, config: TrainerConfig, request: FitRequest
    ) -> None:
        self._parts = parts
        self._config = config
        self._request = request
        if request.lease_s is None:
            check_detachable(config.cluster, config.strategy)
        check_private(
            config.strategy,
            check_finite=config.check_finite,
            is_detached=request.lease_s is None,
        )
        self._datasets = self._open()
        dataset = self._datasets[0]
        if request.lease_s is None and dataset.fed is not None:
            raise ConfigError(
                "this process reads the data and sends it to the workers, and a "
                "detached run goes on without it; give arrays, or a jg.Source that "
                "the workers read"
            )
        self._batch_size = examples_of(config.strategy, dataset, request.batch_size)
        check_round(config.strategy, dataset, request.batch_size)

    def _steps(self, dataset: Dataset) -> int:
        """Returns the updates of the run; an epoch is as many as have all batches."""
        request = self._request
        if request.steps is not None or request.epochs is None:
            return request.steps or 0
        if dataset.of is not None:
            raise ConfigError(
                "Federated counts rounds, in each of which a client trains "
                f"local_epochs on its data; write steps={request.epochs} in place "
                "of epochs="
            )
        batches = dataset.batches_per_epoch(self._batch_size)
        each = batches_per_update(self._config.cluster, self._config.strategy)
        return min(max(1, request.epochs * batches // each), MOST_STEPS)

    def _open(self) -> _Datasets:
        config, request = self._config, self._request
        wait = EarlyWait(config.cluster, request.wait_s, request.stop)
        open_training = partial(
            open_data,
            *(request.data, config.cluster, config.strategy),
            batch_size=request.batch_size,
            seed=config.seed,
            finite=config.check_finite,
            known=self._parts.trained_on,
        )
        # Each by itself: an iterator is looked at once.
        dataset = wait.outlive(open_training)
        evaluated = wait.outlive(
            partial(as_evaluated, request.eval_data, config.cluster, dataset)
        )
        return dealt(config.strategy, config.cluster, dataset), evaluated

    def make(self) -> Attempt:
        """Returns what does it.

        Raises:
          CheckpointError: the directory has steps that are not before this run's.
          CheckpointWriterError: another process saves to the same directory.
        """
        request, (dataset, eval_dataset) = self._request, self._datasets
        self._parts.carry_over()
        build = self._parts.prepare(dataset, self._batch_size)
        step, runner, evaluator = build
        if eval_dataset is not None:
            types = step.unflatten([v.spec.aval for v in step.variables])
            evaluator.check(types, eval_dataset)
        if request.checkpoint is not None:
            checkpoint.check_names(step.unflatten(step.names))
        if request.lease_s is None and request.checkpoint is not None:
            check_remote_saving(request.checkpoint, step)
        first = runner.state.global_step()
        steps, spending = self._steps(dataset), self._parts.spending
        if spending is not None:
            steps = self._private_steps(spending, first, steps)

        def take(go_on: Callable[[], None] | None = None) -> Snapshot:
            # The position first: what is trained meanwhile comes again, none is left
            # out.
            position = runner.position()
            snapshot = runner.state.keep(go_on)
            tree = step.unflatten(snapshot.values)
            step_now = int(tree["global_step"])
            if spending is not None:
                where = position or self._begun(step_now)
                position = spending.noted(where, step_now)
            return Snapshot(
                step_now, tree, position, snapshot.release, snapshot.is_live
            )

        asks_client = self._config.cluster is not None and request.lease_s is not None
        order = Order(
            dataset,
            steps,
            self._batch_size,
            self._config.seed,
            request.eval_every,
            checkpoint=request.checkpoint,
            evaluates_halted=request.whole and asks_client,
            stop=request.stop,
            at_master=request.at_master,
            lease_s=request.lease_s,
            wait_s=request.wait_s,
            first=first,
            # What such a checkpoint has spent is known here, and more.
            restore=lambda path: fill_from(build, path, check_first=False),
            restore_part=partial(fill_part_from, build),
            privacy=None if spending is None else spending.opening(),
        )
        return Attempt(
            runner=runner,
            chunks=partial(_chunks, runner, order),
            first=first,
            total=first + order.steps,
            batch_size=self._batch_size,
            stop=request.stop,
            ends_here=request.lease_s is not None,
            order=order,
            evaluations=make_evaluations(
                *(self._parts.evaluator_task, request.evaluate),
                *(request.eval_data, eval_dataset),
                whole=request.whole,
            ),
            saving=self._saving(take, first),
            spending=spending,
        )

    def _begun(self, updates: int) -> Position:
        """Returns where in the data a run is after so many updates."""
        plan = self._datasets[0].plan(self._batch_size, self._config.seed)
        each = batches_per_update(self._config.cluster, self._config.strategy)
        return position_in(plan, None, updates * each)

    def _private_steps(self, spending: Spending, first: int, steps: int) -> int:
        """Returns how many updates the target of privacy allows, of these."""
        rate = rate_of(self._datasets[0], self._batch_size)
        allowed = spending.begin(rate, first, steps)
        if allowed < steps:
            _PRIVACY_LOG.warning(
                "the run ends after %d of %d updates: the next one would pass "
                "target_epsilon",
                *(allowed, steps),
            )
        return allowed

    def _saving(self, take: Take, first: int) -> Saver | RemoteSaver | None:
        """Returns what takes the checkpoints of the run; None: there are none."""
        options, cluster = self._request.checkpoint, self._config.cluster
        if options is None:
            return None
        if self._request.lease_s is None:
            assert cluster is not None  # checked
            return RemoteSaver(options, take, first, cluster)
        if cluster is None:
            return Saver(options, take, first, in_process=True)
        directory = checkpoint.absolute(options.directory)
        wait = lambda: wait_saved_by_master(cluster, directory)
        return Saver(options, take, first, wait_elsewhere=wait)


def _chunks(runner: Runner, order: Order) -> Generator[Chunk, None, None]:
    if order.dataset.note:
        _DATA_LOG.info("%s", order.dataset.note)
    with order.dataset.reading():
        yield from runner.run(order)


def fill_from(
    parts: Built,
    path: Path,
    *,
    check_first: bool = True,
    spending: Spending | None = None,
) -> Imported | None:
    """Gives variables and position the values of a checkpoint.

    Args:
      parts: of these.
      path: a checkpoint, or a directory of which the newest good step is taken: the
        newest of jgraph, if it has one, else the newest of another program.
      check_first: a checkpoint that turns out to be damaged changes nothing.
      spending: takes the account of privacy over.

    Returns:
      What went where if another program saved it.

    Raises:
      CheckpointError: no checkpoint there, or one of another model; names the leaf.
      CheckpointCorruptError: it is not what was written; names the leaf.
    """
    put_back(path)
    if not is_ours(path) and not our_steps(path) and (other := find(path)):
        if spending is not None:
            spending.restore(None, str(other))
        return _take_from(parts, other)
    step, runner, _ = parts
    like = step.unflatten(runner.state.places())
    growing = [name for table in step.tables for name in table.names]

    def read(path: Path) -> tuple[Tree, Position]:
        where = checkpoint.restore_position(path)
        if spending is not None:
            spending.restore(where, str(path))
        tree = checkpoint.restore(path, like, growing, check_first=check_first)
        return tree, where

    tree, where = read(path) if is_checkpoint(path) else newest_good(path, read)[1]
    runner.state.load(jax.tree.leaves(tree), where)
    return None


def fill_part_from(parts: Built, path: Path, tasks: Collection[TaskName]) -> int:
    """Gives variables of some tasks the values of the newest checkpoint of a directory.

    Args:
      parts: of these.
      path: of the checkpoints.
      tasks: hold nothing; what others hold stays as it is.

    Returns:
      The updates of the checkpoint.

    Raises:
      CheckpointError: there is none, or it cannot be read by parts.
    """
    if not (steps := our_steps(path)):
        raise CheckpointError(f"there is no checkpoint in {path}", path=str(path))
    step, runner, _ = parts
    like = step.unflatten(runner.state.places())
    tree = checkpoint.restore_part(path / str(steps[-1]), like, tasks)
    state = runner.state
    assert isinstance(state, RemoteState)  # whose tasks are known
    state.load_part(jax.tree.leaves(tree), tasks)
    return steps[-1]


def _take_from(parts: Built, path: Path) -> Imported:
    """Gives variables the values of a checkpoint of another program."""
    step, runner, _ = parts
    arrays = read(path)
    types = {v.name: plain_type(v.spec.aval) for v in step.variables}
    by_name, summary = match(path, arrays, types)
    values = [
        from_plain(by_name[variable.name], variable.spec.aval)
        if variable.name in by_name
        else value
        for variable, value in zip(step.variables, runner.state.values(), strict=True)
    ]
    runner.state.load(values)
    log = _LOG.warning if summary.missing else _LOG.info
    log("restored a checkpoint of another program:\n%s", summary)
    return summary


def save_to(
    parts: Built,
    path: str | Path,
    values: Sequence[Any] | None,
    position: Position,
    *,
    overwrite: bool,
    spending: Spending | None = None,
) -> Path:
    """Writes a checkpoint of these values, or of those that the variables have now.

    Raises:
      CheckpointError: the directory exists, or cannot be written.
    """
    step, runner, _ = parts
    snapshot = runner.state.keep() if values is None else RunSnapshot(values)
    try:
        tree = step.unflatten(snapshot.values)
        if spending is not None:
            position = spending.noted(position, int(tree["global_step"]))
        with show_wait(f"saving {path}"):
            return checkpoint.save(path, tree, position, overwrite=overwrite)
    finally:
        snapshot.release()
