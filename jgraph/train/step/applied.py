"""Step checks of a replica that makes all updates: splits applied from skipped."""

from dataclasses import replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.coordination.step.finite import FiniteCheck, not_finite
from jgraph.errors import JGError, NonFiniteError, RowIdError
from jgraph.graph.rows.rows import NO_ID, have_rows, id_text
from jgraph.runtime.data.batches import Array
from jgraph.train.model.checks import FINITE
from jgraph.train.state.runner import Chunk
from jgraph.train.step.train_step import TrainStep
from jgraph.train.tables.row_step import RowStep


def split(
    chunk: Chunk, check: FiniteCheck | None
) -> tuple[Chunk, NonFiniteError | None]:
    """Returns the steps before the first that was not applied, and why it was not.

    What says whether steps were applied is taken out of their metrics.

    Args:
      chunk: steps of one replica.
      check: of the graph of a step; None: each of them was applied.
    """
    if check is None:
        return chunk, None
    metrics = dict(chunk.metrics)
    finite = metrics.pop(FINITE)
    chunk = replace(chunk, metrics=metrics)
    well = finite.all(axis=1)
    if well.all():
        return chunk, None
    row = int(np.argmin(well))
    step = int(chunk.steps[row])
    error = not_finite(check.leaves, finite[row], step, "of replica 0")
    return chunk.first(row), error


@final
class IdCheck:
    """Looks for ids without a row in a batch, before a step of one replica uses it.

    Ids follow from the batch and the step's seeds alone. To look at them in the step
    itself would let each of its results wait, and choose, for what is hardly ever so.
    Where the ids are elements of the batch, as usual, NumPy finds in no time that all
    have rows; elsewhere, and to say which has none, JAX computes them.

    Args:
      by_rows: of the step; has lookups.
      batch: types of its leaves, as a tree.
    """

    def __init__(self, by_rows: RowStep, batch: Any) -> None:
        self._lookups = by_rows.lookups()
        leaves, tree = jax.tree.flatten(batch)
        bounds = by_rows.fed_ids()
        if bounds is not None and any(feed >= len(leaves) for feed in bounds):
            bounds = None  # they are the seeds of a step
        self._bounds = bounds
        number = jax.ShapeDtypeStruct((), np.int32)

        def bad_ids(step: Any, replica: Any, *leaves: Any) -> jax.Array:
            fields = jax.tree.unflatten(tree, leaves)
            return jnp.stack(by_rows.bad_ids(fields, (replica, step)))

        self._run = jax.jit(bad_ids).lower(number, number, *leaves).compile()

    def look(self, step: Any, replica: Any, *batch: Array) -> jax.Array | None:
        """Returns, without waiting for it, an id without a row of each lookup.

        None: each id has a row.
        """
        if self._bounds is not None and all(
            have_rows(batch[feed], rows) for feed, rows in self._bounds.items()
        ):
            return None
        result: jax.Array = self._run(step, replica, *batch)
        return result

    def error(self, bad_ids: jax.Array | None, step: int) -> JGError | None:
        """Returns what to say of what ``look`` saw; None: each id has a row.

        Args:
          bad_ids: what it returned.
          step: whose batch it is.
        """
        if bad_ids is None:
            return None
        found = np.asarray(bad_ids)
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


def id_check_of(step: TrainStep, batch: Any) -> IdCheck | None:
    """Returns what looks at the ids of such batches; None: there is nothing to see."""
    by_rows = step.row_step(batch)
    if by_rows is None or not by_rows.lookups():
        return None
    return IdCheck(by_rows, batch)
