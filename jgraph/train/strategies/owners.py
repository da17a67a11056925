"""Owners of dense parameters in synchronous training: the ps, or the workers.

Tables of rows stay on ps: of these a step needs few rows. Dense parameters travel
whole, and are cut over the workers where ``SyncPS(dense="workers")`` says so.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.plan.placement.spread import spread
from jgraph.train.data.data import Dataset, naming_data
from jgraph.train.model.adapters import Adapter
from jgraph.train.model.trees import path_of
from jgraph.train.step.arrange import Owners
from jgraph.train.strategies.options import SyncPS
from jgraph.train.tables.row_step import Sparse
from jgraph.train.tables.row_tables import find_row_tables


def owners_of(
    cluster: Cluster, strategy: SyncPS, tables: Callable[[], frozenset[str]]
) -> Owners | None:
    """Returns who holds the dense variables of a run; None: the ps, as all others.

    Args:
      cluster: where it trains.
      strategy: says what the user wants.
      tables: finds the parameters of which rows travel.

    Raises:
      ConfigError: a table has no ps to be on.
    """
    if strategy.dense == "ps":
        return None
    workers = tuple(cluster.tasks("worker"))
    place = partial(spread, tasks=workers, placement=strategy.placement)
    names = tables()
    if names and not cluster.tasks("ps"):
        raise ConfigError(
            f"{', '.join(sorted(names))}: of such a table rows travel, and it needs a "
            f"ps, which the cluster does not have; start one with jg.LocalCluster("
            f"ps=1, workers={len(workers)}), or let it travel whole: "
            "jg.Trainer(…, sparse='off')"
        )
    return Owners(workers, place, names)


def tables_in(adapter: Adapter, data: Dataset | None, sparse: Sparse) -> frozenset[str]:
    """Returns the names of the parameters of which only rows are used.

    Args:
      adapter: the model and its loss.
      data: what it is trained on; None: that is not known yet.
      sparse: as for ``Trainer``.

    Raises:
      ConfigError: nobody can tell without the data.
    """
    hashed = frozenset(table.rows for table in adapter.tables)
    if sparse == "off":
        return hashed
    if data is None:
        raise ConfigError(
            "SyncPS(dense='workers') leaves tables of rows on the ps, and which those "
            "are shows when the loss is traced on data; call trainer.plan(data) first"
        )
    flat = jax.tree_util.tree_flatten_with_path(adapter.params)[0]
    names = ["/".join(("params", *path_of(path))) for path, _ in flat]
    number = jax.ShapeDtypeStruct((), jnp.int32)
    batch_size = data.batch_size(None)
    with naming_data(data, batch_size):
        found = find_row_tables(
            *(adapter.loss, adapter.params, adapter.state, data.avals(batch_size)),
            *((number, number), names),
            small=sparse == "lazy",
        )
    return hashed | {table.name for table in found.tables}
