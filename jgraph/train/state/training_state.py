"""Training state that a Trainer and its runs share: values, model, position."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from jgraph.cluster.wait_message import show_wait
from jgraph.errors import DeadlineError
from jgraph.serving.live.live_options import LiveOptions
from jgraph.train.arguments import check_counts
from jgraph.train.attempt import save_to
from jgraph.train.data.data import Data, Dataset
from jgraph.train.data.source import Source, as_source_or_dataset
from jgraph.train.evaluation.evaluations import Copy, Evaluation
from jgraph.train.live.live_model import LiveModel, LiveSource, serve_live
from jgraph.train.parts import TrainerBuild
from jgraph.train.run.members import RunMembers
from jgraph.train.run.rounds import Rounds
from jgraph.train.run.run import Predictor
from jgraph.train.state.hyperparams import Hyperparams
from jgraph.train.state.runner import Events, Position, Staleness

LIVE_OPTIONS: Final = frozenset(field.name for field in fields(LiveOptions))


@final
class TrainingState:
    """What a Trainer and its runs have together; a ``Result``.

    A run knows this and not its Trainer, so that both go when nobody knows them.

    Args:
      parts: of the Trainer.
    """

    def __init__(self, parts: TrainerBuild) -> None:
        self._parts = parts

    @property
    def names(self) -> list[str]:
        """Names of the variables."""
        return self._parts.build()[0].names

    def current_values(self) -> Sequence[Any]:
        """Returns the value of every variable now."""
        return self._parts.build()[1].state.values()

    def model_of(self, values: Sequence[Any] | None) -> Any:
        """See ``Result.model_of``."""
        step, runner, _ = self._parts.build()
        values = runner.state.values(model_only=True) if values is None else values
        tree = step.unflatten(values)
        return step.adapter.model(tree["params"], tree["state"])

    def predictor_of(self, values: Sequence[Any] | None) -> Predictor:
        """See ``Result.predictor_of``."""
        step, runner, _ = self._parts.build()
        values = runner.state.values(model_only=True) if values is None else values
        tree = step.unflatten(values)
        tables = [str(table) for table in step.adapter.tables]
        return Predictor(step.adapter.predict, tree["params"], tree["state"], tables)

    def current_staleness(self) -> Staleness:
        """See ``Result.current_staleness``."""
        return self._parts.build()[1].staleness()

    def current_members(self) -> RunMembers:
        """See ``Result.current_members``."""
        return self._parts.build()[1].members()

    def current_rounds(self) -> Rounds:
        """See ``Result.current_rounds``."""
        return self._parts.build()[1].rounds()

    def current_events(self) -> Events:
        """See ``Result.current_events``."""
        return self._parts.build()[1].state.events()

    def current_position(self) -> Position:
        """See ``Result.current_position``."""
        return self._parts.build()[1].position()

    def save_values(
        self,
        path: str | Path,
        values: Sequence[Any] | None,
        position: Position,
        *,
        overwrite: bool,
    ) -> Path:
        """See ``Result.save_values``."""
        parts = self._parts.build()
        spending = self._parts.spending
        return save_to(
            *(parts, path, values, position), overwrite=overwrite, spending=spending
        )

    def evaluate_values(
        self,
        values: Sequence[Any] | None,
        data: Data | Source | Dataset,
        batch_size: int,
    ) -> dict[str, float]:
        """See ``Result.evaluate_values``."""
        check_counts(batch_size=batch_size)
        return dict(self.evaluated(data, batch_size, values).values)

    def evaluated(
        self,
        data: Data | Source | Dataset,
        batch_size: int = 256,
        values: Sequence[Any] | None = None,
        *,
        whole: bool = False,
        go_on: Callable[[], bool] | None = None,
    ) -> Evaluation:
        """Evaluates a copy of the model: of these values; None: of those of now.

        With ``whole`` the copy has all that a checkpoint has, and is returned as well.

        Args:
          data: to evaluate on.
          batch_size: examples at a time.
          values: of all variables.
          whole: keep what is evaluated.
          go_on: lets loops go on that stand still until the copy is here; returns
            whether they did. Else what is of one moment is what one task has.

        Raises:
          DeadlineError: they did not, so that the copy is of no one moment.
        """
        dataset = as_source_or_dataset(data)
        self._parts.check_alike(dataset)
        step, runner, evaluator = self._parts.build(dataset)
        with show_wait("evaluating"):
            # The position first: what is trained meanwhile comes again, none is left
            # out.
            position = runner.position() if whole else None
            if values is None:
                halted = go_on is not None
                values = runner.state.values(model_only=not whole, halted=halted)
            if go_on is not None and not go_on():
                raise DeadlineError("the run went on while it was to be copied")
            tree = step.unflatten(values)
            metrics = evaluator.evaluate(tree, dataset, batch_size)
            if whole and self._parts.spending is not None:
                step_now = int(tree["global_step"])
                position = self._parts.spending.noted(position, step_now)
            copy = Copy(values, tree, position) if whole else None
            return Evaluation(int(tree["global_step"]), metrics, copy)

    def serve(
        self,
        name: str,
        example: Any,
        fn: Callable[..., Any] | None,
        options: Mapping[str, Any],
    ) -> LiveModel:
        """See ``Result.serve``."""
        ours = {n: options[n] for n in LIVE_OPTIONS if n in options}
        theirs = {n: value for n, value in options.items() if n not in ours}
        return serve_live(
            name,
            example,
            fn,
            LiveOptions(**ours),
            self.live_source(),
            **theirs,
        )

    def live_source(self) -> LiveSource:
        """See ``Result.live_source``."""
        parts = self._parts
        step, runner, _ = parts.build()
        return LiveSource(
            step, runner.state, parts.cluster, lambda: parts.build()[0].variables
        )

    def hyperparams(self, values: Sequence[Any] | None = None) -> dict[str, float]:
        """See ``Result.hyperparams``."""
        step, runner, _ = self._parts.build()
        names = Hyperparams(step.variables).names
        if values is None:
            found = runner.state.read([*names.values()]) if names else {}
        else:
            found = dict(zip(step.names, values, strict=True))
        return {name: np.asarray(found[full]).tolist() for name, full in names.items()}

    def set_hyperparams(self, values: Mapping[str, Any]) -> None:
        """See ``Result.set_hyperparams``."""
        step, runner, _ = self._parts.build()
        runner.state.write(Hyperparams(step.variables).values(values))

    def load_values(self, values: Sequence[Any], position: Position) -> None:
        """See ``Result.load_values``."""
        self._parts.build()[1].state.load(values, position)
