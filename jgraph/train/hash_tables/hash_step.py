"""Hash tables of a model: their variables, shard specifications and columns."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import ConfigError
from jgraph.graph.rows.hash_spec import Column, HashSpec, Initial, TableOptions
from jgraph.runtime.store.hash_policy import rows_within
from jgraph.train.model.trees import Tree


@final
@dataclass(frozen=True, slots=True)
class ModelTable:
    """A hash table of a model.

    Attributes:
      rows: name of its parameter, ``params/ads/rows``.
      known: name of the state that says which keys have rows, ``state/ads/known``.
      options: what its user asked for.
    """

    rows: str
    known: str
    options: TableOptions

    def spec(self, slots: Sequence[Column], shards: int) -> HashSpec:
        """Returns what each of ``shards`` shards is.

        Raises:
          ConfigError: the budget is smaller than one row with its optimizer state.
        """
        spec = self.options.shard(self.rows, tuple(slots), shards)
        rows_within(spec)
        return spec


@final
@dataclass(frozen=True, slots=True)
class TableShards:
    """How a hash table is cut.

    Attributes:
      spec: of any of its shards, without the number of the shard.
      count: how many there are.
    """

    spec: HashSpec
    count: int


def table_specs(
    tables: Sequence[ModelTable],
    init: Callable[[Tree], Tree],
    params: Tree,
    groups: Mapping[str, str],
    shards: Callable[[int], int],
) -> dict[str, TableShards]:
    """Returns how each hash table is cut, by the table's parameter.

    Args:
      tables: of the model.
      init: of the optimizer.
      params: the parameters, or their shapes and dtypes.
      groups: per variable, in order, the parameter that it belongs to.
      shards: given the budget of a table, in how many it is cut; 0: nothing holds it.

    Raises:
      ConfigError: a table is not trained; see ``slot_columns`` and
        ``ModelTable.spec``.
    """
    parameters = [name for name in groups if name.startswith("params/")]
    opt = [name for name in groups if name.startswith("opt/")]
    specs = {}
    for table in tables:
        if table.rows not in parameters:
            raise ConfigError(
                f"wrt leaves out {table.rows.partition('/')[2]}, which is of a hash "
                "table: its rows are made as they are trained; let wrt select it, and "
                "freeze it with optax.multi_transform and optax.set_to_zero"
            )
        mine = {n: name for n, name in enumerate(opt) if groups[name] == table.rows}
        number = parameters.index(table.rows)
        if count := shards(table.options.capacity_bytes):
            slots = slot_columns(init, params, number, mine, table.options.initial)
            specs[table.rows] = TableShards(table.spec(slots, count), count)
    return specs


def slot_columns(
    init: Callable[[Tree], Tree],
    params: Tree,
    number: int,
    names: Mapping[int, str],
    initial: Initial,
) -> list[Column]:
    """Returns the columns that an optimizer keeps for one hash table.

    Args:
      init: of the optimizer.
      params: the parameters, or their shapes and dtypes.
      number: which of their leaves is the table.
      names: of those leaves of the optimizer's state that belong to it, by number.
      initial: values of the table's new rows.

    Raises:
      ConfigError: state that has no row for each of the table's, or begins neither with
        one number nor with the row itself.

    Example:
      >>> import optax
      >>> params = {"t": jnp.zeros((1, 4))}
      >>> init = optax.sgd(0.1, momentum=0.9).init
      >>> slot_columns(init, params, 0, {0: "opt/0/trace/t"}, Initial("normal", 0.1))
      [Column(name='opt/0/trace/t', width=4, dtype='float32',
              initial=Initial(kind='constant', scale=0.0, seed=0))]
    """
    leaves, tree = jax.tree.flatten(params)
    shape, dtype = leaves[number].shape, leaves[number].dtype

    def begin(row: jax.Array) -> list[jax.Array]:
        # Only what the results need is made: the other parameters mostly not.
        parameters = [jnp.zeros(x.shape, x.dtype) for x in leaves]
        parameters[number] = row
        state = jax.tree.leaves(init(jax.tree.unflatten(tree, parameters)))
        return [state[n] for n in names]

    marks = [
        jnp.arange(1, 1 + shape[1], dtype=dtype).reshape(1, -1) / k for k in (2, 4)
    ]
    results = [jax.jit(begin)(mark) for mark in marks]
    return [
        _column(name, marks, values, initial)
        for name, values in zip(names.values(), zip(*results, strict=True), strict=True)
    ]


def _column(
    name: str, marks: Sequence[Any], values: Sequence[Any], initial: Initial
) -> Column:
    dtype = values[0].dtype
    if values[0].shape != marks[0].shape:
        raise ConfigError(
            f"the optimizer keeps {name} of shape {values[0].shape} for one row of a "
            f"hash table, which is {marks[0].shape}; use one whose state "
            "has the shape of the parameter, such as optax.adagrad or optax.adam"
        )
    arrays = [np.asarray(value, np.float64) for value in values]
    copies = [np.asarray(mark.astype(dtype), np.float64) for mark in marks]
    if all(map(np.array_equal, arrays, copies)):
        begins = initial
    elif np.array_equal(arrays[0], arrays[1]) and np.ptp(arrays[0]) == 0:
        begins = Initial(scale=float(arrays[0].flat[0]))
    else:
        raise ConfigError(
            f"the optimizer begins {name} with values that are neither one number nor "
            "the row itself, and a hash table makes rows on its own; use another "
            "optimizer, such as optax.adagrad or optax.adam"
        )
    return Column(name, values[0].shape[1], jnp.dtype(dtype).name, begins)


def refuse_tables(tables: Sequence[ModelTable], why: str) -> None:
    """Refuses hash tables where there can be none.

    Args:
      tables: of the model.
      why: what they are, and what to write instead; it follows "is a hash table, ".

    Raises:
      ConfigError: there are some; names the first.
    """
    if tables:
        raise ConfigError(f"{tables[0].rows} is a hash table, {why}")


def check_lookups(
    tables: Sequence[ModelTable], by_keys: Collection[str], dense: Mapping[str, str]
) -> None:
    """Refuses a loss that uses hash tables otherwise than by looking rows up.

    Args:
      tables: of the model.
      by_keys: names of those of which rows travel, by their keys.
      dense: why others travel whole, by name.

    Raises:
      ConfigError: names the table and says why.
    """
    for table in tables:
        if table.rows not in by_keys:
            why = dense.get(table.rows, "the loss does not call it")
            raise ConfigError(
                f"the hash table of {table.rows} cannot be trained: {why}; look rows "
                "up by table(ids) only, outside of loops, with ids that follow from "
                "the batch"
            )
