"""Step checks of a replica that makes all updates: splits applied from skipped."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.coordination.step.finite import not_finite
from jgraph.errors import JGError, RowIdError
from jgraph.graph.graph import Graph
from jgraph.graph.rows.rows import NO_ID, id_text
from jgraph.runtime.data.batches import Array
from jgraph.train.model.checks import FINITE
from jgraph.train.state.runner import Chunk
from jgraph.train.step.train_step import TrainStep
from jgraph.train.tables.row_step import RowStep


@final
@dataclass(frozen=True, slots=True)
class Checks:
    """What one replica that makes all updates checks of its steps.

    Attributes:
      names: of the metrics that say whether a step was applied.
      leaves: what the columns of ``FINITE`` stand for.
    """

    names: Sequence[str]
    leaves: Sequence[str]

    def passed(self, values: Sequence[Any]) -> bool:
        """Whether a step passed, by its values of ``names``."""
        return all(bool(np.asarray(value).all()) for value in values)

    def split(self, chunk: Chunk) -> tuple[Chunk, JGError | None]:
        """Returns the steps before the first that was not applied, and why it was not.

        Those after it were not applied either.
        """
        metrics = dict(chunk.metrics)
        checks = {name: metrics.pop(name) for name in self.names}
        chunk = replace(chunk, metrics=metrics)
        well = np.ones(len(chunk), bool)
        for values in checks.values():
            well &= values.all(axis=1)
        if well.all():
            return chunk, None
        row = int(np.argmin(well))
        step, where = int(chunk.steps[row]), "of replica 0"
        error = not_finite(self.leaves, checks[FINITE][row], step, where)
        return chunk.first(row), error


@final
class IdCheck:
    """Looks for ids without a row in a batch, before a step of one replica uses it.

    Ids follow from the batch and the step's seeds alone. To look at them in the step
    itself would let each of its results wait, and choose, for what is hardly ever so.

    Args:
      by_rows: of the step.
      batch: types of its leaves, as a tree.
    """

    def __init__(self, by_rows: RowStep, batch: Any) -> None:
        self._lookups = by_rows.lookups()
        leaves, tree = jax.tree.flatten(batch)
        number = jax.ShapeDtypeStruct((), np.int32)

        def bad_ids(step: Any, replica: Any, *leaves: Any) -> jax.Array:
            fields = jax.tree.unflatten(tree, leaves)
            return jnp.stack(by_rows.bad_ids(fields, (replica, step)))

        self._run = None
        if self._lookups:
            self._run = jax.jit(bad_ids).lower(number, number, *leaves).compile()

    def error(self, step: Any, replica: Any, *batch: Array) -> JGError | None:
        """Returns what to say of a step on this batch; None: each id has a row."""
        if self._run is None:
            return None
        found = np.asarray(self._run(step, replica, *batch))
        if (found == NO_ID).all():
            return None
        column = int(np.argmax(found != NO_ID))
        feature, table, rows = self._lookups[column]
        return RowIdError(
            f"{feature} has the id {id_text(int(found[column]))} at step {step}, and "
            f"{table} has {rows} rows, 0 to {rows - 1}; this update was not applied, "
            "and the run ends with those before it. Mend the data or enlarge the "
            "table, or let such ids have no row: jnp.take(table, ids, axis=0, "
            "mode='fill', fill_value=0)",
            feature=feature,
            id=int(found[column]),
        )


def checks_of(step: TrainStep, graph: Graph) -> Checks:
    """Returns what the graph of a step checks."""
    finite = step.finite_check(graph)
    if finite is None:
        return Checks((), ())
    return Checks((FINITE,), finite.leaves)


def id_check_of(step: TrainStep, batch: Any) -> IdCheck | None:
    """Returns what looks at the ids of such batches; None: there is nothing to see."""
    by_rows = step.row_step(batch)
    return None if by_rows is None else IdCheck(by_rows, batch)
