"""Step checks of a replica that makes all updates: splits applied from skipped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from jgraph.coordination.step.finite import not_finite
from jgraph.errors import JGError, RowIdError
from jgraph.graph.graph import Graph
from jgraph.graph.rows.rows import NO_ID, id_text
from jgraph.runtime.data.batches import Array
from jgraph.train.model.checks import BAD_IDS, FINITE
from jgraph.train.state.runner import Chunk
from jgraph.train.step.train_step import TrainStep


@final
@dataclass(frozen=True, slots=True)
class Checks:
    """What one replica that makes all updates checks of its steps.

    Attributes:
      names: of the metrics that say whether a step was applied.
      leaves: what the columns of ``FINITE`` stand for.
      lookups: those of ``BAD_IDS``: (feature, table, rows of the table).
    """

    names: Sequence[str]
    leaves: Sequence[str]
    lookups: Sequence[tuple[str, str, int]]

    def passed(self, values: Sequence[Any]) -> bool:
        """Whether a step passed, by its values of ``names``."""
        pairs = zip(self.names, values, strict=True)
        return all(bool(_is_well(name, np.asarray(v)).all()) for name, v in pairs)

    def split(self, chunk: Chunk) -> tuple[Chunk, JGError | None]:
        """Returns the steps before the first that was not applied, and why it was not.

        Those after it were not applied either.
        """
        metrics = dict(chunk.metrics)
        checks = {name: metrics.pop(name) for name in self.names}
        chunk = replace(chunk, metrics=metrics)
        well = np.ones(len(chunk), bool)
        for name, values in checks.items():
            well &= _is_well(name, values).all(axis=1)
        if well.all():
            return chunk, None
        row = int(np.argmin(well))
        error = self._error({n: v[row] for n, v in checks.items()}, chunk.steps[row])
        return chunk.first(row), error

    def _error(self, values: Mapping[str, Array], step: Any) -> JGError | None:
        ids = values.get(BAD_IDS)
        if ids is None or _is_well(BAD_IDS, ids).all():
            where = "of replica 0"
            return not_finite(self.leaves, values[FINITE], int(step), where)
        column = int(np.argmax(ids != NO_ID))
        feature, table, rows = self.lookups[column]
        return RowIdError(
            f"{feature} has the id {id_text(int(ids[column]))} at step {step}, and "
            f"{table} has {rows} rows, 0 to {rows - 1}; this update was not applied, "
            "and the run ends with those before it. Mend the data or enlarge the "
            "table, or let such ids have no row: jnp.take(table, ids, axis=0, "
            "mode='fill', fill_value=0)",
            feature=feature,
            id=int(ids[column]),
        )


def _is_well(name: str, values: Array) -> Array:
    return values if name == FINITE else values == NO_ID


def checks_of(step: TrainStep, graph: Graph, batch: Any) -> Checks:
    """Returns what the graph of a step on such batches checks."""
    finite = step.finite_check(graph)
    leaves = () if finite is None else finite.leaves
    names = [n for n in step.metric_names(graph) if n in {FINITE, BAD_IDS}]
    return Checks(names, leaves, step.lookups(batch))
