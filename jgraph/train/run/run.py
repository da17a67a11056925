"""Run: a handle on training with its metrics, its results and a way to stop it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from jgraph.cluster.loop_messages import Rescaled
from jgraph.cluster.signals import wait_signalled
from jgraph.coordination.run.recovery import Recovery
from jgraph.coordination.step.step_metrics import LOCAL_STEPS
from jgraph.counts import check_flags
from jgraph.errors import ConfigError, DeadlineError, hints
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.ir import TaskName
from jgraph.runtime.data.batches import Array
from jgraph.train.data.data import Data
from jgraph.train.data.source import Source
from jgraph.train.live.live_model import LiveModel, LiveSource
from jgraph.train.model.metrics import NOT_FINITE
from jgraph.train.run.history import History
from jgraph.train.run.members import RunMembers
from jgraph.train.run.plot import Plot
from jgraph.train.run.profile import Profile
from jgraph.train.run.report import Report
from jgraph.train.run.rounds import Rounds, with_epsilon, with_not_finite, with_steps
from jgraph.train.state.runner import Events, Position, Staleness
from jgraph.view import markup

if TYPE_CHECKING:
    import pandas


@final
@dataclass(frozen=True, slots=True)
class Predictor:
    """A trained model as a pure function, for whoever takes it elsewhere.

    Attributes:
      predict: as ``Adapter.predict``.
      params: its first argument.
      state: its second.
      tables: hash tables that the model has.
    """

    predict: Callable[..., Any]
    params: Any
    state: Any
    tables: Sequence[str]


class Result(Protocol):
    """What a run asks of the Trainer that made it, about values it gives."""

    def model_of(self, values: Sequence[Any] | None) -> Any:
        """Returns the trained model of these variable values; None: those of now."""

    def predictor_of(self, values: Sequence[Any] | None) -> Predictor:
        """Returns the trained model of these variable values; None: those of now."""

    def save_values(
        self,
        path: str | Path,
        values: Sequence[Any] | None,
        position: Position,
        *,
        overwrite: bool,
    ) -> Path:
        """Writes a checkpoint of these variable values; None: those of now."""

    def load_values(self, values: Sequence[Any], position: Position) -> None:
        """Gives all variables, and the position in the data, these values."""

    def current_staleness(self) -> Staleness:
        """Returns how old the gradients of the run have been."""

    def current_members(self) -> RunMembers:
        """Returns who takes part in the run, and who did."""

    def current_rounds(self) -> Rounds:
        """Returns who took part in each round, if some were invited."""

    def current_events(self) -> Events:
        """Returns what has happened in hash tables so far."""

    def current_position(self) -> Position:
        """Returns where in the data the training is now."""

    def hyperparams(self, values: Sequence[Any] | None = None) -> dict[str, float]:
        """Returns those of these variable values; None: those of now."""

    def set_hyperparams(self, values: Mapping[str, Any]) -> None:
        """Sets some of now."""

    def evaluate_values(
        self,
        values: Sequence[Any] | None,
        data: Data | Source,
        batch_size: int,
    ) -> dict[str, float]:
        """Evaluates the model of these variable values; None: those of now."""

    def serve(
        self,
        name: str,
        example: Any,
        fn: Callable[..., Any] | None,
        options: Mapping[str, Any],
    ) -> LiveModel:
        """Answers requests with the model of now, all the time."""

    def live_source(self) -> LiveSource:
        """Returns the model as it is trained, to be served by others."""


@final
@dataclass(slots=True)
class _Outcome:
    state: str = "running"
    values: Sequence[Any] | None = None
    position: Position = None
    error: BaseException | None = None
    report: Report | None = None


@final
class Run:
    """A live handle on training; ``Trainer.fit`` makes it.

    While the run goes on, everything here is as of now; afterwards it is what came
    out, also when the Trainer has trained on or its cluster is closed. Of a model of
    more than 1 GiB, optimizer state included, the values stay on the cluster, and the
    run has those of now as long as that is up.
    """

    def __init__(self, result: Result, history: History, stop: threading.Event) -> None:
        self._result = result
        self._history = history
        self._stop = stop
        self._done = threading.Event()
        self._thread: int | None = None
        self._outcome = _Outcome()
        self._recoveries: list[Recovery] = []
        self._rescales: list[Rescaled] = []

    @property
    def state(self) -> str:
        """``running``, ``done``, ``stopped`` or ``failed``."""
        return self._outcome.state

    @property
    def steps(self) -> int:
        """Updates applied, those of earlier runs of the Trainer included."""
        return self._history.steps

    @property
    def epsilon(self) -> float | None:
        """What all training of the data has spent, for the ``delta`` of ``Privacy``.

        That is of all updates, those of earlier runs and of the checkpoint that was
        restored too. It is as of the newest report that has one: computing it takes
        longer than an update. ``metrics("epsilon")`` has how it grew. None: the
        strategy has no ``privacy=``, or nothing was reported yet.
        """
        if "epsilon" not in self._history.names:
            return None
        return self._history.last("epsilon")

    @property
    def metric_names(self) -> list[str]:
        """What ``metrics`` can be asked for."""
        return self._history.names

    def metrics(self, name: str) -> dict[str, Array]:
        """Returns one metric over the run, as arrays of equal length.

        Of steps that were done again, because a task was lost, it has the later values.

        Args:
          name: ``loss``, a metric that the loss returned, ``eval_…``: a metric
            evaluated on ``eval_data``, or ``table_…``: how hash tables stood, once a
            second: ``table_rows``, ``table_evicted`` and all else that ``events``
            counts, over all of them.

        Returns:
          ``step`` (updates applied), ``value``, ``seconds`` since the run began, and
          for training metrics ``replica``.

        Raises:
          ConfigError: no metric of that name.
        """
        return self._history.metrics(name)

    def to_frame(self) -> "pandas.DataFrame":
        """Returns all metrics as a table of pandas: a row per step.

        Columns are ``step``, ``seconds`` since the run began, ``replica``, and the
        metrics. An evaluation is in the row of its step, and NaN elsewhere.

        Raises:
          ConfigError: pandas is not installed.
        """
        return self._history.to_frame()

    def dropped(self) -> dict[TaskName, int]:
        """Returns how many gradients of each worker came too late to count.

        With ``SyncPS`` these are contributions after the first that were wanted. With
        ``AsyncPS(max_staleness=k)`` they would have been older than that: their worker
        was away while others went on, and they were computed anew. Else there are none.
        """
        return self._history.dropped()

    def repeated(self) -> int:
        """Returns how many batches may have been trained on twice.

        Those that were dealt again after a worker was lost, and those that were under
        way when the checkpoint was saved that the training goes on from: two of each
        worker at most, and none in synchronous training. All runs of the Trainer
        count, and those before its checkpoint.

        It is a lower bound where the master, which is a worker, dies together with a ps
        that it does not reach: nobody can tell then whether its last step was applied.
        """
        has_ended = self._done.is_set()
        position = (
            self._outcome.position if has_ended else self._result.current_position()
        )
        return 0 if position is None else int(position.get("again", 0))

    def recoveries(self) -> list[Recovery]:
        """Returns each time that the run lost a ps, or one was told to end.

        The run went back to a checkpoint then, or went on with copies of what the ps
        held (``durability=``), which repeats no step.

        Example:
          ``[(r.lost, r.step, r.back_to) for r in run.recoveries()]`` is
          ``[(("/job:ps/task:0",), 730, 500)]``: 230 steps were done again.
        """
        return list(self._recoveries)

    def rescales(self) -> list[Rescaled]:
        """Returns each time that variables moved to more ps, or to fewer, or could not.

        Each says how many ps there were ``before`` and are (``ps``), how many
        ``nbytes`` were copied, how long it took, and for how long of that no loop ran
        (``took_s``, ``paused_s``, in seconds). One that was given up says ``why``, and
        ``ps`` is what there were to be. No step was lost or done again.

        Example:
          ``[str(r) for r in run.rescales()]`` is ``["2 to 3 ps: 312 MiB moved in 1.9 s,
          training paused for 0.21 s"]``.
        """
        return list(self._rescales)

    def staleness(self) -> Staleness:
        """Returns how old gradients were: worker -> ps -> staleness -> updates.

        The staleness of an update is the number of others that were applied on its ps
        since it read there; with ``prefetch=1`` that of its own worker's step before is
        one of them. Empty unless the strategy is ``AsyncPS``.

        Example:
          ``run.staleness()["/job:worker/task:1"]["/job:ps/task:0"]`` is
          ``{0: 5, 1: 95}`` if 95 of 100 updates came after one other.
        """
        has_ended = self._done.is_set()
        return (
            self._history.staleness if has_ended else self._result.current_staleness()
        )

    def members(self) -> RunMembers:
        """Returns the workers of the run: since when, and their shares of the batches.

        Those that have left, or are lost, are there as well. Empty in this process.

        Example:
          ``[(m.task, m.state, m.share) for m in run.members()]``.
        """
        has_ended = self._done.is_set()
        return self._history.members if has_ended else self._result.current_members()

    def rounds(self) -> Rounds:
        """Returns the rounds of a federated run: who took part, and who was dropped.

        A row for each, with the steps of its members, their bytes on the way as
        planned, how long the first contribution waited for the last, and with
        ``privacy=`` epsilon so far. Where they wait for nobody (``max_staleness=``)
        each has one client, in the order of when the clients were done; ``staleness``
        says how old they were. Empty unless the strategy is ``Federated``.

        Example:
          ``[(r.number, len(r.members), dict(r.dropped)) for r in run.rounds()]``.
        """
        # First: of whom the steps are is known by then.
        steps = self.metrics(LOCAL_STEPS) if LOCAL_STEPS in self.metric_names else {}
        has_ended = self._done.is_set()
        rounds = self._history.rounds if has_ended else self._result.current_rounds()
        if steps and rounds.alone is not None:
            lists = [steps[key].tolist() for key in ("step", "replica", "value")]
            return rounds.alone.rounds(*lists)
        if "epsilon" in self.metric_names:
            rounds = with_epsilon(rounds, self._by_step("epsilon"))
        if NOT_FINITE in self.metric_names:
            rounds = with_not_finite(rounds, self._by_step(NOT_FINITE))
        if LOCAL_STEPS in self.metric_names:
            rounds = with_steps(rounds, self._by_step(LOCAL_STEPS))
        return rounds

    def _by_step(self, name: str) -> dict[int, float]:
        """Returns a metric by the number of updates that it is of."""
        found = self.metrics(name)
        return dict(zip(found["step"].tolist(), found["value"].tolist(), strict=True))

    def events(self) -> Events:
        """Returns what happened to the ids of hash tables: a row per table and ps.

        Each says how many ids got a row (``admitted``), how many rows were given up for
        others (``evicted``) or for their age (``expired``), how many ids the policy
        (``declined``) or the budget (``refused``) kept out, and what is held now. Of a
        run that ended as its cluster did: what was asked last, once a second.

        Example:
          ``sum(event.evicted for event in run.events())``.
        """
        has_ended = self._done.is_set()
        return self._history.events if has_ended else self._result.current_events()

    def profile(self) -> Profile:
        """Returns where a step's time goes, for each replica.

        Parts, in the order of a step: ``wait`` for acknowledgements of earlier steps,
        ``input`` (the next batch), ``pull`` (until the variables are there),
        ``compute``, ``push`` (giving the gradients away), and ``other`` (Python, and
        starting the step).
        """
        return self._history.profile()

    def plot(self, *names: str) -> Plot:
        """Returns curves over steps, which a notebook shows inline.

        Args:
          names: metrics, a panel each. None of them: the loss with its evaluation, and
            the other evaluations beside it.

        Raises:
          ConfigError: no such metric, one whose values are no numbers, or no matplotlib
            (``pip install 'jgraph[demo]'``).

        Example:
          ``run.plot()`` as the last line of a cell, or
          ``run.plot("loss").save("loss.png")``.
        """
        return self._history.plot(*names)

    def curves(self, path: str | Path) -> Path:
        """Writes ``run.plot()`` to a file, e.g. a PNG, and returns its path."""
        return self.plot().save(path)

    @short_traceback
    def model(self) -> Any:
        """Returns the trained model.

        For ``nnx`` a new model object; for ``linen`` what the loss takes first:
        ``params``, or all variables if the model has other collections.

        Raises:
          TooLargeError: a parameter is too large for this process.
        """
        return self._result.model_of(self._outcome.values)

    @short_traceback
    def hyperparams(self) -> dict[str, float]:
        """Returns the hyperparameters that ``optax.inject_hyperparams`` keeps, by name.

        Example:
          ``run.hyperparams()["learning_rate"]`` is ``0.001``.
        """
        return self._result.hyperparams(self._outcome.values)

    @short_traceback
    def set_hyperparams(self, **values: float) -> None:
        """Sets hyperparameters that ``optax.inject_hyperparams`` keeps, while it runs.

        Each update is with the old value or the new one, on all tasks, and those that
        begin when this has returned are with the new one. Checkpoints have it; a run
        that goes back to an older one has the value of that.

        Args:
          **values: numbers by name. Of an optimizer in parts the name alone is that of
            each; ``**{"generator/learning_rate": 1e-4}`` is that of one.

        Raises:
          ConfigError: there is no such one, a schedule sets it, it is no number, or the
            run is over.

        Example:
          ``callbacks=lambda run, report: run.set_hyperparams(learning_rate=0.1 /
          report.step)``.
        """
        if self._done.is_set():
            raise ConfigError(
                "the run is over; trainer.set_hyperparams(…) sets them for the next one"
            )
        self._result.set_hyperparams(values)

    def predictor(self) -> Predictor:
        """Returns the trained model as a function; ``jg.export`` takes it."""
        return self._result.predictor_of(self._outcome.values)

    def live_source(self) -> LiveSource:
        """Returns the model as it is trained; ``jg.export(rows="ps")`` takes it."""
        return self._result.live_source()

    @short_traceback
    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes an Orbax checkpoint, and returns its absolute path.

        Args:
          path: a directory that does not exist yet.
          overwrite: replace a checkpoint of jgraph that is there.

        Raises:
          CheckpointError: the directory exists, or cannot be written.
        """
        check_flags(overwrite=overwrite)
        # The position first: what is trained meanwhile comes again, none is left out.
        has_ended = self._outcome.values is not None
        position = (
            self._outcome.position if has_ended else self._result.current_position()
        )
        values = self._outcome.values
        return self._result.save_values(path, values, position, overwrite=overwrite)

    @short_traceback
    @hints.naming_arguments(hints.EVALUATE_ARGUMENTS)
    def evaluate(self, data: Data | Source, batch_size: int = 256) -> dict[str, float]:
        """Returns the loss and the Trainer's metrics on ``data``; see Trainer."""
        return self._result.evaluate_values(self._outcome.values, data, batch_size)

    @short_traceback
    def serve(
        self,
        name: str,
        example: Any,
        *,
        fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> LiveModel:
        """Answers requests with the model while it is trained; see ``LiveModel``.

        Dense parameters are copied every ``refresh_s``. Rows of tables that the model
        only looks up are asked for at each request, from the parameter servers that
        train them: an update that was applied is in the next answer. Each answer has
        the parameters ``jgraph_step``, ``jgraph_age_ms``, and ``jgraph_rows``:
        ``"live"`` or ``"cache"``. When the run has ended it goes on with what came out.

        Args:
          name: what the model is called: ``/v2/models/NAME/infer``.
          example: a batch as the model takes it; as for ``jg.export``.
          fn: called in place of the model, as in ``Trainer.predict``; a dict that it
            returns names the outputs.
          **options: ``refresh_s`` (1.0): seconds between copies. ``on_loss``: what
            becomes of requests while a parameter server is away: ``"stale"`` answers
            with what is known of it, ``"error"`` refuses with 503 and ``JG-132``.
            ``cache_rows`` (100,000): rows of each table that are kept for that.
            ``max_share`` (0.5): the part of their time for which lookups of this model
            may keep parameter servers busy; more requests are put together.
            ``max_rows`` (64): of one execution. ``rtol`` (1e-5): as for ``jg.export``.
            All others are those of ``jg.ModelServer``: ``http_port``, ``grpc_port``, ….

        Raises:
          ArtifactError: the model cannot be served so; says why.
          ConfigError: an option means nothing.
          ClusterError: a parameter server does not answer.
        """
        return self._result.serve(name, example, fn, options)

    if not TYPE_CHECKING:
        __getattr__ = hints.hinting(hints.RUN)

    def stop(self) -> None:
        """Asks the run to end after the current step; ``wait`` waits for it."""
        self._stop.set()

    @short_traceback
    def wait(self, timeout_s: float | None = None) -> "Run":
        """Waits for the end of the run; raises what ended it, if an error did.

        Raises:
          DeadlineError: the run still goes on after ``timeout_s``.
          ConfigError: a callback of the run waits for it.
        """
        if self._thread == threading.get_ident() and not self._done.is_set():
            raise ConfigError(
                "a callback is a part of its run, which goes on when the callback is "
                "over: run.wait() would wait for itself; leave it out. run.stop() ends "
                "the run after the current step"
            )
        if not wait_signalled(self._done, timeout_s):  # Ctrl-C is one
            raise DeadlineError(
                f"the run is at step {self.steps} and still going on after "
                f"{timeout_s:g} s; wait longer, or end it with run.stop()"
            )
        if self._outcome.error is not None:
            raise self._outcome.error
        return self

    @property
    def error(self) -> BaseException | None:
        """What ends the run, or has ended it; None if no error does."""
        return self._outcome.error

    @property
    def last_report(self) -> Report | None:
        """How the run stood when it last reported."""
        return self._outcome.report

    def begin(self) -> None:
        """Takes note of the thread that calls callbacks. Called by the Trainer."""
        self._thread = threading.get_ident()

    def report(self, report: Report) -> None:
        """Takes note of how the run stands. Called by the Trainer."""
        self._outcome.report = report

    def fails(self, error: BaseException) -> None:
        """Takes note of an error before hooks are told. Called by the Trainer."""
        self._outcome.error = error

    def recovered(self, recovery: Recovery) -> None:
        """Takes note that the run went back. Called by the Trainer."""
        self._recoveries.append(recovery)

    def rescaled(self, rescaled: Rescaled) -> None:
        """Takes note that variables have moved, or not. Called by the Trainer."""
        self._rescales.append(rescaled)

    def go_back(self, values: Sequence[Any], position: Position) -> None:
        """Makes a state that it had what came out; called after the last step."""
        self._result.load_values(values, position)

    def finish(
        self,
        state: str,
        values: Sequence[Any] | None,
        position: Position = None,
        error: BaseException | None = None,
    ) -> None:
        """Ends the run, once. Called by the Trainer."""
        report = self._outcome.report
        self._outcome = _Outcome(state, values, position, error, report)
        self._done.set()

    def _facts(self) -> dict[str, str]:
        facts = {"state": self.state, "step": str(self.steps)}
        report = self._outcome.report
        if report is not None:
            facts["step"] = f"{self.steps}/{report.steps}"
            facts["time"] = f"{report.seconds:.1f} s"
            facts.update({k: f"{v:.4f}" for k, v in report.metrics.items()})
        if self._done.is_set() and self.repeated():
            facts["batches dealt again"] = str(self.repeated())
        if self._recoveries:
            facts["recovered"] = str(len(self._recoveries))
        if moved := [one.ps for one in self._rescales if not one.why]:
            facts["parameter servers"] = str(moved[-1])
        for name in self._history.names:
            if name.startswith("eval_"):
                facts[name] = f"{self._history.last(name):.4f}"
            elif name == "epsilon":
                facts[name] = f"{self._history.last(name):.3f}"
            elif name in {"table_rows", "table_evicted"}:
                facts[name] = f"{self._history.last(name):,.0f}"
        return facts

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self._facts().items())
        return f"Run({facts})"

    def _repr_html_(self) -> str:
        return markup.facts("jgraph run", self._facts())
