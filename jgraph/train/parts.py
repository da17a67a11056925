"""Training state of a Trainer: step, runner and evaluator, built on first use."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import flax.linen as nn

from jgraph.client.cluster import Cluster
from jgraph.client.state.holdings import ClusterResources
from jgraph.client.wait_for_tasks import incarnations_of
from jgraph.clock import Clock
from jgraph.errors import ClusterError, ConfigError, JGError, TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.loading import uncollected
from jgraph.train.data.data import Dataset, check_alike, naming_data
from jgraph.train.evaluation.evaluate import Evaluator
from jgraph.train.evaluation.evaluator_task import EvaluatorTask, make_evaluator_task
from jgraph.train.hash_tables.hash_step import refuse_tables
from jgraph.train.model.adapters import Adapter, Metric, Model, adapt
from jgraph.train.model.losses import Loss
from jgraph.train.model.optimizer import Optimizer
from jgraph.train.model.stateful_metrics import StatefulMetrics
from jgraph.train.model.trees import Tree
from jgraph.train.privacy.accounting import Spending
from jgraph.train.state.placement import new_container
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Runner
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.async_runner import AsyncRunner
from jgraph.train.strategies.federated import Federated
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.local_sgd import LocalSGD
from jgraph.train.strategies.owners import tables_in
from jgraph.train.strategies.strategies import (
    Strategy,
    arrangement_on,
    gradient_dtype_of,
    make_runner,
    privacy_of,
    private_update_of,
)
from jgraph.train.strategies.sync_runner import SyncRunner
from jgraph.train.tables.row_step import Sparse

Built: TypeAlias = tuple[TrainStep, Runner, Evaluator]
Rebuilt: TypeAlias = tuple[Built, EvaluatorTask | None]
RemoteRunner: TypeAlias = AsyncRunner | SyncRunner


@final
@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """What a Trainer was given, checked; see ``Trainer``."""

    model: Model
    loss: Loss
    tx: Optimizer
    cluster: Cluster | None
    strategy: Strategy
    metrics: Mapping[str, Metric]
    observed: StatefulMetrics | None
    seed: int
    variables: Tree
    sparse: Sparse
    check_finite: bool
    wrt: Any
    clock: Clock


@final
class TrainerBuild:
    """The step, its runner and what evaluates, made on first use.

    Args:
      config: what to make them of.
      is_busy: says whether a run goes on.
    """

    def __init__(self, config: TrainerConfig, is_busy: Callable[[], bool]) -> None:
        self._config = config
        privacy = privacy_of(config.strategy)
        self.spending = None if privacy is None else Spending(privacy)
        """The account of what its data has given away; None: nobody keeps one."""
        self.holdings = ClusterResources(config.cluster, is_busy)
        """What is on the cluster, and goes with this."""
        weakref.finalize(self, self.holdings.drop_soon).atexit = False
        self._parts: Built | None = None
        self.trained_on: Dataset | None = None
        """The data of the newest training."""
        self._closed = False
        self._incarnations: Mapping[TaskName, str] = {}
        self.evaluator_task: EvaluatorTask | None = None
        """Evaluates on the cluster, once made; None: no task is there for it."""

    @property
    def are_made(self) -> bool:
        """Whether they exist by now."""
        return self._parts is not None

    @property
    def cluster(self) -> Cluster | None:
        """Where the variables are; None: in this process."""
        return self._config.cluster

    def build(self, data: Dataset | None = None) -> Built:
        """Returns the parts, made of this data if they have to be.

        Raises:
          ConfigError: a linen model has no parameters yet, and there is no data; or
            the Trainer was closed.
        """
        if self._parts is None:
            self._check_open()
            parts, evaluator_task = self._make(data)
            self._take(parts, evaluator_task)
            return parts
        return self._parts

    def _make(
        self,
        data: Dataset | None,
        container: str = "",
        tables: Sequence[str] | None = None,
    ) -> Rebuilt:
        config = self._config
        is_linen = isinstance(config.model, nn.Module)
        if is_linen and config.variables is None and data is None:
            raise ConfigError(
                "this linen model has no parameters yet; give "
                "Trainer(…, variables=model.init(key, x)) or call fit first"
            )
        adapter = adapt(
            config.model,
            config.loss,
            seed=config.seed,
            variables=config.variables,
            data=None if data is None else data.of_examples,
            wrt=config.wrt,
        )
        step = self._step(adapter, container, data, tables)
        runner = make_runner(
            *(step, config.cluster, config.strategy, config.clock), config.seed
        )
        evaluator_task = None  # metrics with a state of their own are evaluated here
        if config.observed is None:
            evaluator_task = make_evaluator_task(
                step, config.metrics, config.cluster, config.sparse
            )
        evaluator = Evaluator(adapter, config.metrics, config.observed)
        return (step, runner, evaluator), evaluator_task

    @uncollected()
    def prepare(self, dataset: Dataset, batch_size: int) -> Built:
        """Returns the parts, ready to train on batches of this data.

        Raises:
          ConfigError: the Trainer was closed.
          DataError: data of another kind than before, or fewer examples than a batch.
        """
        self._check_open()
        self.check_alike(dataset)
        parts = self.build(dataset)
        # Refuses a batch size that is too large.
        dataset.plan(batch_size, self._config.seed)
        with naming_data(dataset.of_examples, batch_size):
            parts[1].prepare(dataset, batch_size)
        self.trained_on = dataset
        return parts

    def _take(self, parts: Built, evaluator_task: EvaluatorTask | None) -> None:
        self._parts, self.evaluator_task = parts, evaluator_task
        beside = () if evaluator_task is None else (evaluator_task.close,)
        self.holdings.hold(*beside, parts[1].state.close)
        if self._config.cluster is not None:
            self._incarnations = incarnations_of(self._config.cluster)

    def restarted(self) -> list[TaskName]:
        """Returns the tasks that were started again since the parts were made."""
        if self._parts is None or self._config.cluster is None:
            return []
        now = incarnations_of(self._config.cluster)
        return [
            task
            for task, one in self._incarnations.items()
            if now.get(task, one) != one
        ]

    def carry_over(self) -> None:
        """Makes all anew if tasks were started again that held no variables.

        Raises:
          TaskLostError: they did hold some.
        """
        if not (tasks := self.restarted()):
            return
        old = self.build()[1]
        try:
            values, position = old.state.values(), old.position()
        except JGError as error:
            who = ", ".join(tasks)
            raise TaskLostError(
                f"{who} {'was' if len(tasks) == 1 else 'were'} started again since "
                "this Trainer trained, and what was there is lost; go on from a "
                "checkpoint with trainer.restore(…), or make a new jg.Trainer(…)",
                tasks=tasks,
            ) from error
        self.renew(lambda parts: parts[1].state.load(values, position))

    def renew(self, fill: Callable[[Built], object]) -> Built:
        """Makes all anew, after tasks were started again, in the container of before.

        So who serves the model finds it again. Nobody sees the new parts before they
        are filled: they have no initial values to see.

        Args:
          fill: gives the variables their values.
        """
        container = self.build()[0].container
        self._drop(self._parts, self.evaluator_task)
        parts, evaluator_task = self._make(self.trained_on, container)
        try:
            fill(parts)
        except BaseException:
            self._drop(parts, evaluator_task)
            raise
        self._take(parts, evaluator_task)
        return parts

    def adopt(
        self,
        container: str,
        tables: Sequence[str] | None,
        fill: Callable[[RemoteState], None],
    ) -> RemoteRunner:
        """Makes the parts of a run that another client began; returns its runner.

        Args:
          container: of the variables.
          tables: those on ps, where the workers hold all else; None: ps hold all.
          fill: lets the client have them.

        Raises:
          ConfigError: they were made already, or need data to be made.
        """
        if self._parts is not None:
            raise ConfigError(
                "this Trainer has variables of its own; attach with a new jg.Trainer(…)"
            )
        parts, evaluator_task = self._make(None, container, tables)
        runner = parts[1]
        assert isinstance(runner, AsyncRunner | SyncRunner)  # who asks has checked
        fill(runner.state)
        self._take(parts, evaluator_task)
        return runner

    def _drop(self, parts: Built | None, evaluator_task: EvaluatorTask | None) -> None:
        # Of a task that is gone nothing is left to drop, nor of a closed client.
        with suppress(ClusterError, ConfigError):
            if evaluator_task is not None:
                evaluator_task.close()
            if parts is not None:
                parts[1].state.close()

    def check_alike(self, dataset: Dataset) -> None:
        """Refuses data of another kind than that which was trained on.

        Raises:
          DataError: says how they differ.
        """
        if self.trained_on is not None:
            check_alike(self.trained_on, dataset, "what the Trainer was trained on")

    def close(self) -> None:
        """Drops their variables; nothing is prepared any more."""
        self._closed = True
        self.holdings.let_go()
        self._drop(self._parts, self.evaluator_task)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Trainer was closed; make a new jg.Trainer(…)")

    def _step(
        self,
        adapter: Adapter,
        container: str,
        data: Dataset | None,
        known: Sequence[str] | None,
    ) -> TrainStep:
        config = self._config
        tx, local, sparse = config.tx, None, config.sparse
        if self.spending is not None:
            why = "with privacy= each example's gradient is of all parameters"
            refuse_tables(adapter.tables, _travels_by_rows(why))
            sparse = "off"
        if isinstance(config.strategy, LocalSGD | Federated):
            local = config.strategy.rule(config.tx)
            tx = config.strategy.outer_optimizer
            if why := local.why_whole:
                refuse_tables(adapter.tables, _travels_by_rows(why))
            if local.epochs or local.is_streamed:
                sparse = "off"
        tables = partial(tables_in, adapter, data, sparse)
        if config.cluster is not None:
            container = container or new_container()
        return TrainStep(
            adapter,
            tx,
            check_finite=config.check_finite,
            sparse=config.sparse,
            alone=isinstance(config.strategy, Local),
            gradient_dtype=gradient_dtype_of(config.strategy),
            arrangement=arrangement_on(config.cluster, config.strategy, tables, known),
            container=container,
            local=local,
            private=private_update_of(config.strategy, config.cluster),
        )


def _travels_by_rows(why_not: str) -> str:
    return (
        f"of which only rows travel, and {why_not}; use strategy=jg.SyncPS() or "
        "jg.AsyncPS()"
    )
