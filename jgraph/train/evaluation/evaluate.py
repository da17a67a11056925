"""Evaluation and prediction in this process, with a model's current values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import jax
import numpy as np
from flax.errors import FlaxError

from jgraph.errors import ConfigError, DataError, JGError
from jgraph.train.data.data import Dataset
from jgraph.train.model.adapters import Adapter, Metric
from jgraph.train.model.metrics import as_float64, named_metrics
from jgraph.train.model.stateful_metrics import StatefulMetrics
from jgraph.train.model.trees import Tree

BATCH_SIZE: Final = 256
"""Examples that are evaluated at a time, unless told otherwise."""

_SEEN = "__seen__"


@final
class Evaluator:
    """Compiled evaluation of one model; compiles again only for new batch shapes."""

    def __init__(
        self,
        adapter: Adapter,
        metrics: Mapping[str, Metric],
        stateful: StatefulMetrics | None = None,
    ) -> None:
        self._stateful = stateful
        functions = (
            dict(metrics) if stateful is None else {**metrics, _SEEN: stateful.values}
        )

        def step(params: Tree, state: Tree, batch: Any, metric_state: Tree) -> Any:
            row = adapter.evaluate(params, state, batch, functions)
            if stateful is not None:
                metric_state = stateful.update(metric_state, row.pop(_SEEN))
            return named_metrics(row), metric_state

        self._step = jax.jit(step)
        self._predict = jax.jit(adapter.predict, static_argnums=3)

    def check(self, tree: Tree, data: Dataset) -> None:
        """Finds out whether it can evaluate on data, before anything is trained.

        Args:
          tree: types of the model's values.
          data: to be evaluated on.

        Raises:
          ConfigError: as ``evaluate``. What a metric raises comes out as it is.
        """
        own = data.fed is not None
        size = data.batch_size(None) if own else min(BATCH_SIZE, len(data))
        state = None if self._stateful is None else self._stateful.empty
        row, _ = jax.eval_shape(
            self._step, tree["params"], tree["state"], data.avals(size), state
        )
        if row or self._stateful is None:
            check_metrics(row)

    def evaluate(self, tree: Tree, data: Dataset, batch_size: int) -> dict[str, float]:
        """Returns each metric as its mean over all examples.

        Batches count by their examples, the smaller last one too. Metrics that are
        updated batch by batch count as they do.

        Raises:
          ConfigError: a metric is not a scalar, or there is nothing to evaluate.
        """
        rows, weights = [], []
        metric_state = None if self._stateful is None else self._stateful.empty
        for count, batch in data.batches(batch_size):
            row, metric_state = self._step(
                tree["params"], tree["state"], batch, metric_state
            )
            rows.append(row)
            weights.append(count)
        rows = jax.device_get(rows)
        more = {} if self._stateful is None else self._stateful.compute(metric_state)
        if not (more and not rows[0]):
            check_metrics(rows[0])
        return {**weighted(rows, weights), **more}

    def predict(
        self,
        tree: Tree,
        data: Dataset,
        batch_size: int,
        fn: Callable[..., Any] | None,
        trained_on: Dataset | None = None,
    ) -> Any:
        """Returns the model's outputs for all examples, as numpy arrays.

        Raises:
          DataError: the model, or ``fn``, does not take such inputs, or does not
            return a row for each example.
        """
        with _naming_inputs(data, batch_size, trained_on):
            outputs = [
                _of_examples(
                    jax.device_get(
                        self._predict(tree["params"], tree["state"], batch, fn)
                    ),
                    count,
                )
                for count, batch in data.batches(batch_size)
            ]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)


def _of_examples(outputs: Any, count: int) -> Any:
    """Returns the outputs of so many examples, if they are that."""
    for keys, output in jax.tree_util.tree_flatten_with_path(outputs)[0]:
        if np.shape(output)[:1] != (count,):
            what = f"output{jax.tree_util.keystr(keys)}"
            raise DataError(
                f"the {what} of trainer.predict has shape {np.shape(output)} for "
                f"{count} examples; return one row for each example, along axis 0. One "
                "example is given as x[None]. A mean over examples is what "
                "trainer.evaluate gives: Trainer(…, metrics={'name': fn})",
                shape=list(np.shape(output)),
            )
    return outputs


@contextmanager
def _naming_inputs(
    data: Dataset, batch_size: int, trained_on: Dataset | None
) -> Iterator[None]:
    """Describes the inputs where the model, or a user's function, cannot take them."""
    try:
        yield
    except (TypeError, ValueError, FlaxError) as error:
        if isinstance(error, JGError):
            raise
        first = str(error).partition("\n")[0].rstrip(".")
        hint = (
            "" if trained_on is None else f" It was trained on {trained_on.describe()}."
        )
        raise DataError(
            "the model cannot predict from "
            f"{data.describe(min(batch_size, len(data)))}: {type(error).__name__}: "
            f"{first}.{hint} Give trainer.predict(x) examples as the model takes them, "
            "along axis 0, or a function of the model and x: trainer.predict(x, fn=…)"
        ) from error


def check_metrics(values: Mapping[str, Any]) -> None:
    """Refuses metrics that have no mean.

    Args:
      values: of one batch, or their types.

    Raises:
      ConfigError: one is not a real scalar, or there is none.
    """
    if not values:
        raise ConfigError(
            "there is nothing to evaluate: this loss is for training only; give "
            "Trainer(…, metrics={'accuracy': fn})"
        )
    for name, value in values.items():
        if value.shape:
            raise ConfigError(
                f"metric '{name}' has shape {tuple(value.shape)}; return the mean over "
                "the batch, a scalar"
            )
        if value.dtype.kind == "c":
            raise ConfigError(
                f"metric '{name}' is {value.dtype}; return a real number, such as its "
                "absolute value"
            )


def weighted(
    rows: Sequence[Mapping[str, Any]], weights: Sequence[int]
) -> dict[str, float]:
    """Returns the mean of each metric over batches of so many examples.

    Example:
      >>> weighted([{"loss": 1.0}, {"loss": 4.0}], [2, 1])
      {'loss': 2.0}
    """
    return {
        name: float(
            np.average([as_float64(row[name]) for row in rows], weights=weights)
        )
        for name in rows[0]
    }
