"""Trainer: a Flax model, a loss and an optimizer, trained here or on a cluster."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.clock import SystemClock
from jgraph.cluster.deadlines import CLIENT_S
from jgraph.cluster.wait_message import hide_wait, show_wait
from jgraph.coordination.run.supervisor import WAIT_S
from jgraph.counts import check_flags
from jgraph.errors import ClusterBusyError, ConfigError, hints
from jgraph.errors.tracebacks import short_traceback
from jgraph.train.arguments import check_arguments, check_counts
from jgraph.train.attach import attach
from jgraph.train.attempt import Attempt, Attempts, FitRequest, fill_from
from jgraph.train.checkpoint import checkpoint as checkpoints
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.checkpoint.flax_checkpoints import Imported
from jgraph.train.data.data import Data, Dataset, as_dataset
from jgraph.train.data.source import Source
from jgraph.train.fit import (
    Fit,
    check_evaluation,
    check_length,
    check_wait,
    naming_ends,
    one_of,
    wait_begun,
    wait_or_stop,
)
from jgraph.train.live.live_model import LiveModel, LiveSource
from jgraph.train.model.adapters import Model
from jgraph.train.model.losses import Loss
from jgraph.train.model.optimizer import Optimizer, unwrapped
from jgraph.train.model.stateful_metrics import Metrics, split_metrics
from jgraph.train.model.trees import Tree
from jgraph.train.parts import Built, TrainerBuild, TrainerConfig
from jgraph.train.run.callbacks import check_evaluated
from jgraph.train.run.history import History
from jgraph.train.run.hooks import Callback, as_callbacks
from jgraph.train.run.progress import Display, display_of
from jgraph.train.run.run import Predictor, Run
from jgraph.train.state.runner import Position
from jgraph.train.state.training_state import TrainingState
from jgraph.train.strategies.strategies import (
    Strategy,
    choose_strategy,
    dealt,
    examples_of,
    open_data,
    replica_names,
)
from jgraph.train.tables.row_step import Sparse
from jgraph.view import markup


@final
class Trainer:
    """Trains a Flax model with an optax optimizer.

    How a loss is written:

    * ``flax.nnx``: ``loss(model, batch)`` or ``loss(model, batch, rngs)``; BatchNorm,
      dropout work as they are, ``rngs`` is an ``nnx.Rngs`` of the step.
    * ``flax.linen``: ``loss(params, batch)`` or ``loss(params, batch, rng)``. A model
      with other collections (``batch_stats``), or a first parameter called
      ``variables``, gets all of them; the loss returns what changed:
      ``return loss, {**updates, "accuracy": accuracy}``.

    A mean over a named axis, as of ``BatchNorm(axis_name=…)``, is over one worker's
    batch.

    A loss returns a scalar, or a scalar and a dict of metrics. ``batch`` has the
    structure of the data: a tuple ``(x, y)``, a dict, or one array.

    Args:
      model: an ``nnx.Module`` object or a ``linen.Module``; it is not changed. Or a
        function that makes the former; large parameters are then made on their task.
      loss: see above.
      tx: an optax transformation. It sees ``params`` as nested dicts. Or a dict of one
        for each top-level name of them, ``{"generator": tx1, "discriminator": tx2}``.
        Of an ``nnx.Optimizer`` its ``tx``.
      cluster: where to train; this process if unset.
      strategy: ``AsyncPS()`` or ``SyncPS()`` with a cluster, ``Local()`` without.
      metrics: evaluated on data by ``evaluate``: a function of (model, batch), or of
        what a linen loss takes first, or several by name; each returns the mean over
        its batch. Models are in evaluation mode (``nnx``). Or
        ``(nnx.MultiMetric(…), fn)``: ``fn`` returns what ``update`` takes, a dict; the
        process of the Trainer evaluates these.
      seed: decides the order of examples, dropout, and a linen model's initial values.
      variables: linen only: what ``model.init`` returned; if unset, it is called with
        the fields of a dict that are named as the inputs, else with the first field.
      sparse: how tables are updated: parameters of which the loss only looks up rows
        (``nn.Embed``, ``nnx.Embed``, ``jnp.take(table, ids, axis=0)``, ``table[ids]``);
        just these rows travel. ``"auto"``: the numbers are those of plain optax: an
        optimizer that changes rows without a gradient too (momentum, weight decay)
        updates all rows, on the ps, and where that is much work a warning says so.
        ``"exact"``: the same without a warning. ``"lazy"``: rows that no id names stay
        as they are, which is less work and other numbers. ``"off"``: tables travel
        whole. ``plan()`` says what was done.
      check_finite: refuse data with NaN, and end a run at the first loss or gradient
        that is not finite, before it is applied.
      wrt: nnx only: a filter of the variables to train, such as ``nnx.LoRAParam``; the
        others are frozen. Of linen, ``optax.multi_transform`` with ``set_to_zero``
        freezes parts. No gradient of a frozen parameter travels.

    Raises:
      ConfigError: not a Flax model, not such a loss, or a strategy that needs another
        cluster.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> from flax import nnx
      >>> def loss(model, batch):
      ...     x, y = batch
      ...     return jnp.mean((model(x) - y) ** 2)
      >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
      >>> trainer = Trainer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), loss, optax.adam(0.1))
      >>> run = trainer.fit((x, 3 * x), steps=200, batch_size=16, progress=False)
      >>> run.model().kernel[...].item()
      3.0
    """

    @short_traceback
    @hints.naming_arguments(hints.TRAINER_ARGUMENTS)
    def __init__(
        self,
        model: Model,
        loss: Loss,
        tx: Optimizer,
        *,
        cluster: Cluster | None = None,
        strategy: Strategy | None = None,
        metrics: Metrics | None = None,
        seed: int = 0,
        variables: Tree = None,
        sparse: Sparse = "auto",
        check_finite: bool = False,
        wrt: Any = nnx.Param,
    ) -> None:
        check_flags(check_finite=check_finite)
        tx, wrt = unwrapped(tx, wrt)
        check_arguments(model, loss, tx, cluster, seed, sparse, wrt)
        functions, observed = split_metrics(metrics)
        self._config = TrainerConfig(
            model=model,
            loss=loss,
            tx=tx,
            cluster=cluster,
            strategy=choose_strategy(strategy, cluster),
            metrics=functions,
            observed=observed,
            seed=int(seed),
            variables=variables,
            sparse=sparse,
            check_finite=check_finite,
            wrt=wrt,
            clock=SystemClock(),
        )
        self._busy = threading.Lock()
        self._parts = TrainerBuild(self._config, self._busy.locked)
        self._state = TrainingState(self._parts)
        self._ends_run = True
        """The newest run ends with this client."""
        self.run: Run | None = None
        """The newest run; None before the first ``fit``."""
        self.imported: Imported | None = None
        """What ``restore`` took from where, if another program saved it; a table."""

    @short_traceback
    @hints.naming_arguments(hints.FIT_ARGUMENTS)
    def fit(
        self,
        data: Data | Source,
        y: Data | None = None,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        eval_data: Data | Source | None = None,
        eval_every: int | None = None,
        validation_data: Data | Source | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        checkpoint: Checkpoints | None = None,
        progress: bool = True,
        block: bool = True,
        detached: bool = False,
        wait_s: float = WAIT_S,
    ) -> Run:
        """Trains for ``steps`` more updates, and returns the run.

        An interrupt (Ctrl-C, a stopped notebook cell) ends a blocking run after the
        current step, and saves it if it has checkpoints; the run is then ``stopped``
        and has what was trained. A second interrupt does not wait for that: it is
        raised, the run ends in the background, and ``trainer.run`` is that run.

        Args:
          data: arrays with examples along axis 0: ``(x, y)``, a dict, or one array; a
            ``jg.Source`` that the workers read; what gives examples by number, such as
            a torch ``Dataset``; or an iterable of batches, such as a generator or a
            ``DataLoader``. The last is taken as it comes; all else is shuffled by the
            seed, anew in each epoch. A last partial batch is left out.
          y: ``fit(x, y)`` is ``fit((x, y))``.
          steps: updates of the model, all workers together.
          epochs: in place of ``steps``: how often all batches of the data are used.
          batch_size: examples of a batch; if unset, 128, or as many as the batches of
            the data have.
          eval_data: evaluated at the end, and every ``eval_every`` steps: by a task of
            the job ``evaluator`` while the others train on, or here if there is none.
          eval_every: steps between evaluations, or more while one takes longer.
          validation_data: another name of ``eval_data``.
          callbacks: one or several: functions, called as ``callback(run, report)``
            twice a second or so, and objects with ``begin(run)`` or ``end(run)``.
          checkpoint: where to save while training; ``restore`` goes on from there. A
            run that loses a ps goes on from the newest good step by itself; see
            ``Run.recoveries``.
          progress: show live how the run stands; in a notebook also the tasks' logs.
          block: wait for the end; else train in the background, see ``Run.wait``.
          detached: go on when this process is gone, as it may be once ``fit`` with
            ``block=False`` has returned; see ``attach``. The master saves.
          wait_s: seconds that a run waits for a ps that was lost, or for a worker if
            none is left, until they are started again; then the run fails. It ends at
            once where nobody would start them.

        Raises:
          DataError: data that cannot be used; names the field.
          NonFiniteError: with ``check_finite``: names the leaf and the step.
          ClusterBusyError: this Trainer is already training.
          CheckpointWriterError: another process saves to the same directory.
        """
        check_flags(progress=progress, block=block, detached=detached)
        check_length(steps, epochs)
        counts = {"batch_size": batch_size, "eval_every": eval_every}
        check_counts(**{name: n for name, n in counts.items() if n is not None})
        # Messages are JSON, which knows no integers of NumPy.
        steps, epochs, batch_size, eval_every = (
            None if n is None else int(n)
            for n in (steps, epochs, batch_size, eval_every)
        )
        eval_data = one_of(eval_data, validation_data)
        check_evaluation(eval_data, eval_every)
        check_wait(wait_s)
        all_callbacks = as_callbacks(callbacks)
        check_evaluated(all_callbacks, eval_data, eval_every)
        data = data if y is None else (data, y)
        config, evaluate = self._config, self._state.evaluated
        request = FitRequest(
            *(data, steps, batch_size, eval_data, eval_every, evaluate),
            lease_s=None if detached else CLIENT_S,
            checkpoint=checkpoint,
            epochs=epochs,
            keeps_evaluated=any(
                getattr(c, "restore_best", False) for c in all_callbacks
            ),
            wait_s=wait_s,
        )
        make = lambda: Attempts(self._parts, config, request).make()
        run, display = self._begin(make, all_callbacks, progress=progress)
        if block:
            return wait_or_stop(run, display)
        return wait_begun(run, request.at_master) if detached else run

    def _begin(
        self,
        make: Callable[[], Attempt],
        callbacks: Sequence[Callback] = (),
        *,
        progress: bool,
    ) -> tuple[Run, Display]:
        """Begins a run, or to follow one that goes on."""
        config = self._config
        if not self._busy.acquire(blocking=False):
            raise ClusterBusyError(
                "this Trainer is already training; wait for that run (run.wait()) or "
                "end it (run.stop()) first"
            )
        with hide_wait(), ExitStack() as stack:
            stack.callback(self._busy.release)
            display = stack.enter_context(display_of(config.cluster, show=progress))
            display.say("tracing and placing")
            with naming_ends(config.cluster):
                attempt = make()
            at_end = stack.pop_all()
        self._ends_run = attempt.ends_here
        if not attempt.ends_here:
            self._parts.holdings.let_go()
        history = History(attempt.first)
        self.run = run = Run(self._state, history, attempt.stop)
        Fit(
            attempt=attempt,
            run=run,
            history=history,
            callbacks=callbacks,
            display=display,
            workers=replica_names(config.cluster, config.strategy) if progress else (),
            cluster=config.cluster,
            clock=config.clock,
        ).start(at_end.close)
        return run, display

    @short_traceback
    def plan(
        self, data: Data | Source | None = None, batch_size: int | None = None
    ) -> Any:
        """Returns what goes where when it is trained on ``data``.

        Args:
          data: as for ``fit``; if unset, the plan of the last ``fit`` is returned.
          batch_size: examples per step.

        Raises:
          ConfigError: no data was given, now or before.
        """
        if batch_size is not None:
            check_counts(batch_size=batch_size)
        if data is not None:
            with show_wait("tracing and placing"):
                config, trained_on = self._config, self._parts.trained_on
                dataset = open_data(
                    *(data, config.cluster, config.strategy),
                    batch_size=batch_size,
                    seed=config.seed,
                    known=trained_on,
                )
                examples = examples_of(config.strategy, dataset, batch_size)
                dataset = dealt(config.strategy, config.cluster, dataset)
                self._parts.prepare(dataset, examples)
        if not self._parts.are_made:
            raise ConfigError(
                "the plan depends on the shapes of a batch; give the data: "
                "trainer.plan(data, batch_size=128)"
            )
        return self._build()[1].plan()

    @short_traceback
    @hints.naming_arguments(hints.EVALUATE_ARGUMENTS)
    def evaluate(self, data: Data | Source, batch_size: int = 256) -> dict[str, float]:
        """Returns the loss and the metrics on ``data``, as means over all examples.

        Scalars that the loss returns beside its value count as metrics. A linen loss
        that takes ``rng`` or changes collections is for training only; then just the
        Trainer's metrics are returned.

        Raises:
          DataError: data that cannot be used; names the field.
          ConfigError: there is nothing to evaluate, or a metric is not a scalar.
        """
        return self._state.evaluate_values(None, data, batch_size)

    @short_traceback
    @hints.naming_arguments(hints.EVALUATE_ARGUMENTS)
    def predict(
        self, x: Data, batch_size: int = 256, *, fn: Callable[..., Any] | None = None
    ) -> Any:
        """Returns the outputs of the model in evaluation mode, as numpy arrays.

        Args:
          x: inputs, examples along axis 0.
          batch_size: examples at a time.
          fn: called as ``fn(model, x)`` or ``fn(params or variables, x)`` in place of
            the model, for models that need more arguments.

        Raises:
          DataError: the model does not take such inputs; tells theirs and those known.
        """
        check_counts(batch_size=batch_size)
        data = as_dataset(x, "x")
        step, runner, evaluator = self._build(data)
        with show_wait("predicting"):
            tree = step.unflatten(runner.state.values(model_only=True))
            trained_on = self._parts.trained_on
            known = None if trained_on is None else trained_on.of_examples
            return evaluator.predict(tree, data, batch_size, fn, known)

    @short_traceback
    def model(self) -> Any:
        """Returns the model as it is now; see ``Run.model``."""
        return self._state.model_of(None)

    def hyperparams(self) -> dict[str, float]:
        """Returns the optimizer's hyperparameters; see ``Run.hyperparams``."""
        return self._state.hyperparams()

    @short_traceback
    def set_hyperparams(self, **values: float) -> None:
        """Sets some, of a run that goes on too; see ``Run.set_hyperparams``.

        Raises:
          ConfigError: as ``Run.set_hyperparams``.
        """
        self._state.set_hyperparams(values)

    def predictor(self) -> Predictor:
        """Returns the model as it is now as a function; ``jg.export`` takes it."""
        return self._state.predictor_of(None)

    def live_source(self) -> LiveSource:
        """Returns the model as it is trained; ``jg.export(rows="ps")`` takes it."""
        return self._state.live_source()

    @short_traceback
    def serve(
        self,
        name: str,
        example: Any,
        *,
        fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> LiveModel:
        """Answers requests with the model as it is at each moment; see ``Run.serve``.

        Raises:
          JGError: as ``Run.serve``.
        """
        return self._state.serve(name, example, fn, options)

    @short_traceback
    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes an Orbax checkpoint of the state as it is now; see ``Run.save``."""
        check_flags(overwrite=overwrite)
        where = self.current_position()
        return self._state.save_values(path, None, where, overwrite=overwrite)

    @short_traceback
    def restore(self, path: str | Path) -> "Trainer":
        """Takes model, optimizer state, step number and position in the data.

        The number of tasks may differ from that at saving. A linen model needs
        ``variables=model.init(…)`` at the Trainer, or one ``fit``, before.

        Args:
          path: a checkpoint, or a directory that ``fit(checkpoint=…)`` saved to: then
            the newest step is taken that is not damaged, and damaged ones are renamed.
            Or what a Flax program saved: a ``TrainState``, or the state of an
            ``nnx.Module`` and ``nnx.Optimizer``, by Orbax or ``flax.training``. It is
            taken by names and shapes; ``trainer.imported`` is then a table of what went
            where and what is missing.

        Raises:
          CheckpointError: no checkpoint there, or one of another model; names the leaf.
          CheckpointCorruptError: it is not what was written; names the leaf.
        """
        path = checkpoints.absolute(path)
        with show_wait(f"restoring {path}"):
            if self._parts.restarted() and not self._busy.locked():
                self._parts.renew(partial(self._fill, path=path, check_first=False))
            else:
                self._fill(self._build(), path)
        return self

    def _fill(self, build: Built, path: Path, *, check_first: bool = True) -> None:
        spending = self._parts.spending
        self.imported = fill_from(
            build, path, check_first=check_first, spending=spending
        )

    @short_traceback
    def attach(self, name: str | None = None) -> Run:
        """Finds a run again by its name in ``cluster.runs()``; None: the one under way.

        Raises:
          ConfigError: no such run, or this Trainer has trained already.
        """
        make = lambda: attach(self._config, self._parts, name)
        return self._begin(make, progress=False)[0]

    def close(self) -> None:
        """Drops all that this Trainer has on its cluster; runs keep their values.

        The end of a ``with`` block and the end of the client do the same, and so does
        Python when the Trainer and its runs are garbage. A detached run keeps what it
        needs until this is called.

        Raises:
          ClusterBusyError: its run goes on, and needs all that.
        """
        if self._busy.locked():
            raise ClusterBusyError(
                "this Trainer has a run that goes on, and close() would drop the run's "
                "variables; end it first: trainer.run.stop(), then trainer.run.wait()"
            )
        self._parts.close()

    if not TYPE_CHECKING:
        __getattr__ = hints.hinting(hints.TRAINER)

    @property
    def names(self) -> list[str]:
        """Names of the variables: ``params/…``, ``opt/…``, ``state/…``, global_step."""
        return self._state.names

    def current_values(self) -> Sequence[Any]:
        """Returns the value of every variable now, in the order of ``names``."""
        return self._state.current_values()

    def current_position(self) -> Position:
        """Returns where in the data the training is now."""
        return self._state.current_position()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends a run that goes on, unless it is detached, and closes the Trainer."""
        if not self._ends_run:
            return
        if self.run is not None and self._busy.locked():
            self.run.stop()
            with suppress(Exception):  # of the run; it has it
                self.run.wait()
        self.close()

    def __dir__(self) -> list[str]:
        hidden_names = {
            "current_values",
            "current_position",
            "live_source",
            "predictor",
        }
        return [name for name in super().__dir__() if name not in hidden_names]

    def __repr__(self) -> str:
        model = _name(self._config.model)
        return f"Trainer({model}, strategy={self._config.strategy!r})"

    def _repr_html_(self) -> str:
        config = self._config
        facts: dict[str, object] = {
            "model": _name(config.model),
            "loss": _name(config.loss),
            "strategy": repr(config.strategy),
            "cluster": "this process"
            if config.cluster is None
            else repr(config.cluster),
            "metrics": ", ".join(config.metrics) or "those of the loss",
            "training now": "yes" if self._busy.locked() else "no",
        }
        return markup.facts("Trainer", facts)

    def _build(self, data: Dataset | None = None) -> Built:
        return self._parts.build(data)


def _name(argument: object) -> str:
    return str(getattr(argument, "__name__", type(argument).__name__))
