"""Checks inside a training step: an update that fails one is skipped."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jgraph.graph.rows.rows import NO_ID
from jgraph.train.model.trees import Tree

FINITE = "<finite>"
"""Metric of a step with ``check_finite``: bool per leaf, the loss first."""
BAD_IDS = "<bad ids>"
"""Metric of a step with ``check_ids``: int32 per lookup, an id that has no row."""


def all_well(checks: Mapping[str, jax.Array]) -> jax.Array:
    """Returns whether all checks of a step passed, bool."""
    well = [checks[FINITE].all()] if FINITE in checks else []
    if BAD_IDS in checks:
        well.append((checks[BAD_IDS] == NO_ID).all())
    return jnp.stack(well).all()


def finite(loss: jax.Array, grads: Tree) -> jax.Array:
    """Returns whether the loss and each gradient are finite, bool per leaf."""
    # The order is that of the parameters' variables: both flatten the same tree.
    leaves = [loss, *jax.tree.leaves(grads)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])
