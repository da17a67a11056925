"""Owners of dense parameters in synchronous training: the ps, or the workers.

Tables of rows stay on ps: of these a step needs few rows. Dense parameters travel
whole, and are cut over the workers where ``SyncPS(dense="workers")`` says so.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jgraph.client.cluster import Cluster
from jgraph.client.placement.auto import measured
from jgraph.errors import ConfigError
from jgraph.graph.sharding import array_nbytes
from jgraph.plan.placement.spread import spread
from jgraph.train.data.data import Dataset, naming_data
from jgraph.train.model.adapters import Adapter
from jgraph.train.model.trees import path_of
from jgraph.train.step.arrange import Owners
from jgraph.train.step.host_parts import least_on_host
from jgraph.train.strategies.options import SyncPS
from jgraph.train.tables.row_step import Sparse
from jgraph.train.tables.row_tables import find_row_tables
from jgraph.view.units import bytes_text, ms_text

Tables: TypeAlias = tuple[frozenset[str], int]
"""Names of parameters of which rows travel, and the bytes of all other parameters."""


def choose_owners(
    cluster: Cluster, strategy: SyncPS, tables: Callable[[], Tables]
) -> tuple[Owners | None, str]:
    """Returns who holds the dense variables of a run, and why.

    Args:
      cluster: where it trains.
      strategy: says what the user wants.
      tables: finds the parameters of which rows travel, and the bytes of all others.

    Returns:
      The owners; None: the ps hold them, as all others. And a line for the plan, which
      is empty where nothing was to be decided.

    Raises:
      ConfigError: a table has no ps to be on.
    """
    if strategy.dense == "ps":
        return None, ""
    if strategy.elastic is not None:
        return None, "dense='auto': on ps, as workers join and leave (elastic=)"
    ps, workers = cluster.tasks("ps"), cluster.tasks("worker")
    names, nbytes = tables()
    if names and not ps:
        raise ConfigError(
            f"{', '.join(sorted(names))}: of such a table rows travel, and it needs a "
            f"ps, which the cluster does not have; start one with jg.LocalCluster("
            f"ps=1, workers={len(workers)}), or let it travel whole: "
            "jg.Trainer(…, sparse='off')"
        )
    owners = owned_by(cluster, strategy, names)
    if strategy.dense in ("workers", "xla"):
        return owners, ""
    if not ps:
        return owners, "dense='auto': on the workers, as there is no ps"
    model = strategy.cost_model or measured(cluster)
    model.check(cluster.tasks())
    by_ps = model.exchange_s(nbytes, ps, workers)
    least = least_on_host(strategy.gradient_dtype)
    by_workers = model.exchange_s(nbytes, workers, workers, least)
    there, other = ("workers", "ps") if by_workers <= by_ps else ("ps", "workers")
    why = (
        f"dense='auto': {bytes_text(nbytes)} on {there}, as the busiest link is busy "
        f"for {ms_text(min(by_ps, by_workers))} of a step then, and for "
        f"{ms_text(max(by_ps, by_workers))} if the {other} hold them"
    )
    return (owners if there == "workers" else None), why


def owned_by(cluster: Cluster, strategy: SyncPS, tables: frozenset[str]) -> Owners:
    """Returns the workers as owners of all but these tables."""
    workers = tuple(cluster.tasks("worker"))
    place = partial(spread, tasks=workers, placement=strategy.placement)
    return Owners(workers, place, tables)


def tables_in(adapter: Adapter, data: Dataset | None, sparse: Sparse) -> Tables:
    """Returns the names of the parameters of which only rows are used.

    And the bytes of all others.

    Args:
      adapter: the model and its loss.
      data: what it is trained on; None: that is not known yet.
      sparse: as for ``Trainer``.

    Raises:
      ConfigError: nobody can tell without the data.
    """
    flat = jax.tree_util.tree_flatten_with_path(adapter.params)[0]
    sizes = {
        "/".join(("params", *path_of(path))): array_nbytes(leaf.shape, leaf.dtype)
        for path, leaf in flat
    }
    names = frozenset(table.rows for table in adapter.tables)
    if sparse != "off":
        names |= _looked_up(adapter, data, sparse, list(sizes))
    return names, sum(n for name, n in sizes.items() if name not in names)


def _looked_up(
    adapter: Adapter, data: Dataset | None, sparse: Sparse, names: list[str]
) -> frozenset[str]:
    if data is None:
        raise ConfigError(
            "dense= among the workers leaves tables of rows on the ps, and which those "
            "are shows when the loss is traced on data; call trainer.plan(data) first"
        )
    number = jax.ShapeDtypeStruct((), jnp.int32)
    batch_size = data.batch_size(None)
    with naming_data(data, batch_size):
        found = find_row_tables(
            *(adapter.loss, adapter.params, adapter.state, data.avals(batch_size)),
            *((number, number), names),
            small=sparse == "lazy",
        )
    return frozenset(table.name for table in found.tables)
