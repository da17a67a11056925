"""An embedding for ids from an unbounded space, as a layer of a Flax model."""

from dataclasses import asdict
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgraph.counts import is_count
from jgraph.errors import ConfigError
from jgraph.graph.rows.find_keys import find_keys
from jgraph.graph.rows.hash_keys import Keys, as_pairs, join_keys, split_keys
from jgraph.graph.rows.hash_spec import Admission, Eviction, Initial, TableOptions
from jgraph.runtime.store.hash_policy import rows_within
from jgraph.train.hash_tables.hash_step import ModelTable
from jgraph.view import markup


class KnownKeys(nnx.Variable[jax.Array]):
    """The keys that a table has rows for, as ``find_keys`` takes them."""


@final
class HashTable(nnx.Module):
    """A row per id, for any int64 ids, made when an id is first seen.

    The parameter servers keep the rows, by the hash of the id, within one budget of
    memory. The policies given here decide which ids get a row and which lose it,
    together with its optimizer state. The layer object itself has only the rows that it
    was given, and all other ids share one more row, the first: an exported model does
    the same.
    ``jg.NO_KEY``, -2**63, is no id and never gets a row: it pads, for example, a bag
    that is not full. The values that it reads mean nothing.
    ``jg.Trainer`` trains it on a cluster: each ps has a shard of the rows, a step moves
    only the rows of its ids, and ``run.model()`` has all rows.

    In a linen model: ``nnx.bridge.to_linen(jg.HashTable, 16, 1 << 30, skip_rng=True)``.

    Args:
      dim: values per row.
      capacity_bytes: memory over all shards, for rows, optimizer state and index.
      initializer: values of a new row; a number is that number.
      admission: which ids get a row; all of them if unset.
      eviction: which ids go when the memory is spent: ``"lru"``, those not seen for
        longest, ``"lfu"``, those seen in the fewest steps, or ``"ttl"``, those not seen
        for ``ttl`` updates, spent or not. None goes that was looked up since the last
        update of its shard; new ids for which there is no room are not trained. With
        several asynchronous workers an id may go between a worker's lookup and its
        gradient, which is then dropped. ``run.events()`` counts both.
      ttl: with ``"ttl"`` only.
      dtype: of the rows.

    Raises:
      ConfigError: options that cannot be, or a budget under one row.

    Example:
      >>> table = HashTable(dim=4, capacity_bytes=1 << 30)
      >>> ids = split_keys(np.array([[12345678901234, -5]]))
      >>> table(ids).shape
      (1, 2, 4)

    The sums over bags of ids, the last of which is not full:

      >>> from jgraph import NO_KEY
      >>> bags = np.array([[7, 9], [7, NO_KEY]])
      >>> there = jnp.asarray(bags != NO_KEY)
      >>> jnp.where(there[..., None], table(split_keys(bags)), 0).sum(axis=1).shape
      (2, 4)
    """

    def __init__(
        self,
        dim: int,
        capacity_bytes: int,
        *,
        initializer: Initial | float = 0.0,
        admission: Admission | None = None,
        eviction: Eviction = "lru",
        ttl: int = 0,
        dtype: Any = jnp.float32,
    ) -> None:
        for name, value, least, what in (
            ("dim", dim, 1, "a row has 1 value or more"),
            ("capacity_bytes", capacity_bytes, 1, "give whole bytes, such as 1 << 30"),
            ("ttl", ttl, 0, "give whole updates, with eviction='ttl' only"),
        ):
            if not is_count(value, least):
                raise ConfigError(f"a hash table has {name}={value!r:.40}; {what}")
        if not isinstance(initializer, Initial):
            initializer = _number(initializer)
        if not isinstance(admission, Admission | None):
            raise ConfigError(
                f"a hash table has admission={admission!r:.40}; give "
                "jg.Admission(sightings=2), or nothing"
            )
        self.options = TableOptions(
            dim=int(dim),
            capacity_bytes=int(capacity_bytes),
            initial=initializer,
            admission=admission or Admission(),
            eviction=eviction,
            ttl=int(ttl),
            dtype=_float_name(dtype),
        )
        rows_within(self.options.shard("", (), 1))
        self.rows = nnx.Param(jnp.zeros((1, dim), dtype))
        self._know(jnp.zeros((1, 2), jnp.uint32))

    def _know(self, pairs: Any) -> None:
        # The options go with the keys, wherever a model's state is taken apart.
        self.known = KnownKeys(pairs, options=self.options)

    def __call__(self, ids: Any) -> jax.Array:
        """Returns the rows of these ids.

        Args:
          ids: signed integers of any shape, or pairs ``uint32[..., 2]`` that
            ``split_keys`` made of 64-bit ones.

        Returns:
          ``[..., dim]``.

        Raises:
          GraphError: ids that are not whole numbers.
        """
        places = find_keys(self.known[...], as_pairs(ids), options=self.options)
        # Of a single id JAX would write another gather, also under vmap.
        rows: jax.Array = self.rows[...]
        vectors = rows.at[jnp.atleast_1d(places)].get(mode="promise_in_bounds")
        return vectors.reshape(*places.shape, rows.shape[-1])

    def with_rows(self, keys: Keys, rows: Any) -> "HashTable":
        """Returns a table of these rows; ids without one read zeros.

        Args:
          keys: int64[n], each once.
          rows: ``[n, dim]``.

        Raises:
          ConfigError: others.

        Example:
          >>> table = HashTable(dim=2, capacity_bytes=1 << 20)
          >>> full = table.with_rows(np.array([7, -5]), [[1.0, 1.0], [2.0, 2.0]])
          >>> full(jnp.array([-5, 6])).tolist()
          [[2.0, 2.0], [0.0, 0.0]]
        """
        # Pairs are in order of their high half, as unsigned numbers.
        numbers = join_keys(split_keys(keys))
        values = np.asarray(rows, self.rows.dtype)
        count = len(np.unique(numbers))
        if numbers.shape != (count,) or values.shape != (count, self.options.dim):
            raise ConfigError(
                f"a hash table is given {count} different keys of the shape "
                f"{numbers.shape} and rows of {values.shape}; give int64[n], each once,"
                f" and a row of {self.options.dim} values for each"
            )
        order = np.argsort(numbers.view(np.uint64))
        values, pairs = values[order], split_keys(numbers[order])
        table: HashTable = nnx.clone(self)
        table.rows = nnx.Param(jnp.pad(values, ((1, 0), (0, 0))))
        table._know(jnp.pad(pairs, ((1, 0), (0, 0))))
        return table

    def keys(self) -> Keys:
        """Returns int64[n]: the ids of the rows here, from row 1 on."""
        return join_keys(np.asarray(self.known[1:]))

    def _repr_html_(self) -> str:
        counts = {"rows here": len(self.known[...]) - 1}
        return markup.facts("HashTable", {**asdict(self.options), **counts})


def _number(initializer: Any) -> Initial:
    """Returns what makes rows of one number.

    Raises:
      ConfigError: it is none.
    """
    try:
        return Initial(scale=float(initializer))
    except (TypeError, ValueError):
        raise ConfigError(
            f"a hash table has initializer={initializer!r:.60}; its rows are made on "
            "parameter servers, without code of yours: give a number, or "
            "jg.Initial('normal', 0.05)"
        ) from None


def _float_name(dtype: Any) -> str:
    """Returns the name of a dtype.

    Raises:
      ConfigError: it is none, or has no gradients.
    """
    try:
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return str(jnp.dtype(dtype))
    except TypeError:
        pass
    raise ConfigError(
        f"a hash table has dtype={dtype!r:.40}; give one of floating point, such as "
        "jnp.float32"
    )


def nnx_tables(model: nnx.Module) -> list[ModelTable]:
    """Returns the hash tables of an nnx model, by the names of their variables."""
    key_states = nnx.to_flat_state(nnx.state(model, KnownKeys))
    return [
        _table(path, ("state",), variable.get_metadata()["options"])
        for path, variable in key_states
    ]


def linen_tables(variables: Any) -> list[ModelTable]:
    """Returns the hash tables among the variables of a linen model.

    ``nnx.bridge.to_linen`` keeps an nnx variable with its metadata, in a collection
    that is called after its class.
    """
    boxes = jax.tree_util.tree_flatten_with_path(
        variables.get(KnownKeys.__name__, {}), is_leaf=lambda x: hasattr(x, "metadata")
    )[0]
    where = "state", KnownKeys.__name__
    return [
        _table([key.key for key in keys], where, box.metadata["options"])
        for keys, box in boxes
        if hasattr(box, "metadata")
    ]


def _table(path: Any, where: tuple[str, ...], options: TableOptions) -> ModelTable:
    names = [str(key) for key in path]
    return ModelTable(
        "/".join(["params", *names[:-1], "rows"]), "/".join([*where, *names]), options
    )
