"""Specification of a hash table: row size, budget, admission and eviction policies.

Plain data: a table is made from it on every ps that has a shard, without code of the
user. The keys are any int64; a row belongs to its key, in whichever shard.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

from jgraph.counts import is_count, is_number, is_share
from jgraph.errors import ConfigError
from jgraph.view import markup

Kind: TypeAlias = Literal["constant", "normal", "uniform"]
Eviction: TypeAlias = Literal["lru", "lfu", "ttl"]


@final
@dataclass(frozen=True, slots=True)
class Initial:
    """How the values of a new row are made: a function of (seed, key, column).

    Attributes:
      kind: ``"constant"``: ``scale`` itself; ``"normal"``: mean 0, standard deviation
        ``scale``; ``"uniform"``: from ``-scale`` to ``scale``.
      scale: see ``kind``.
      seed: another seed gives other rows.

    Example:
      >>> Initial("normal", 0.05)
      Initial(kind='normal', scale=0.05, seed=0)
    """

    kind: Kind = "constant"
    scale: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "normal", "uniform"):
            raise ConfigError(
                f"there is no initializer '{self.kind}' for a hash table; use "
                "'constant', 'normal' or 'uniform'"
            )
        is_seed = is_count(self.seed, 1 - 2**63) and self.seed < 2**63
        if not (is_number(self.scale) and is_seed):
            raise ConfigError(
                f"an initializer of a hash table has scale={self.scale!r:.40} and "
                f"seed={self.seed!r:.40}; give a number, and a whole one below 2**63"
            )

    @property
    def mean(self) -> float:
        """Mean of the values: what keys read that have no row and get none."""
        return self.scale if self.kind == "constant" else 0.0

    def _repr_html_(self) -> str:
        return markup.data(self)


@final
@dataclass(frozen=True, slots=True)
class Column:
    """Values that each row has: the parameter, or one slot of the optimizer.

    Attributes:
      name: of the column.
      width: values per row; 0 for a single one.
      dtype: numpy or ml_dtypes name.
      initial: values of a new row. A slot with the initial values of the parameter
        starts equal to it.
    """

    name: str
    width: int
    dtype: str = "float32"
    initial: Initial = Initial()


@final
@dataclass(frozen=True, slots=True)
class Admission:
    """Which unknown keys get a row; the others read initial values and learn nothing.

    Attributes:
      sightings: a key gets a row at its n-th lookup. The count is approximate (never
        too low, sometimes too high) and decays over time.
      probability: of getting a row, at each lookup of the key.

    Example:
      >>> Admission(sightings=3)
      Admission(sightings=3, probability=1.0)
    """

    sightings: int = 1
    probability: float = 1.0

    def __post_init__(self) -> None:
        if not (is_count(self.sightings, 1) and self.sightings <= 255):
            raise ConfigError(
                f"admission after {self.sightings!r:.40} sightings; give 1 (at once) "
                "to 255"
            )
        if not (is_share(self.probability) and self.probability > 0):
            raise ConfigError(
                f"admission with probability {self.probability!r:.40}; give more than "
                "0 and at most 1"
            )

    def _repr_html_(self) -> str:
        return markup.data(self)


@final
@dataclass(frozen=True, slots=True)
class HashSpec:
    """One shard of a hash table.

    Attributes:
      name: of the table, for messages.
      columns: the parameter first, then the slots of its optimizer. They come and go
        together.
      capacity_bytes: of memory for all that this shard keeps.
      admission: which keys come in.
      eviction: which keys go when there is no room: ``"lru"``, those not looked up for
        longest; ``"lfu"``, those looked up least often; ``"ttl"``, none: keys not
        looked up in ``ttl`` versions go (within a quarter of that more), and while
        there is no room no key comes in.
      ttl: with ``"ttl"`` only, in versions of the table.

    Raises:
      ConfigError: a policy that cannot be.

    Example:
      >>> HashSpec("ads", (Column("rows", 16),), 1 << 20, eviction="lfu").ttl
      0
    """

    name: str
    columns: tuple[Column, ...]
    capacity_bytes: int
    admission: Admission = Admission()
    eviction: Eviction = "lru"
    ttl: int = 0

    def __post_init__(self) -> None:
        if self.eviction not in ("lru", "lfu", "ttl"):
            raise ConfigError(
                f"hash table '{self.name}' has eviction='{self.eviction}'; use 'lru', "
                "'lfu' or 'ttl'"
            )
        if (self.eviction == "ttl") != (self.ttl > 0):
            raise ConfigError(
                f"hash table '{self.name}' has eviction='{self.eviction}' and "
                f"ttl={self.ttl}; give ttl, more than 0, with eviction='ttl' only"
            )

    def part(self, number: int) -> "HashSpec":
        """Returns the shard of this number: its columns are variables of their own."""
        columns = tuple(
            replace(column, name=f"{column.name}/part_{number}")
            for column in self.columns
        )
        return replace(self, name=f"{self.name}/part_{number}", columns=columns)


@final
@dataclass(frozen=True, slots=True)
class TableOptions:
    """What a user asks of a hash table; all of its shards together.

    Attributes:
      dim: values per row.
      capacity_bytes: of memory, over all shards: rows, optimizer slots and index.
      initial: values of a new row.
      admission: which keys come in.
      eviction: as for ``HashSpec``.
      ttl: as for ``HashSpec``.
      dtype: of the rows.

    Example:
      >>> options = TableOptions(16, 1 << 30, Initial("normal", 0.05), eviction="lfu")
      >>> options.shard("ads", (), 2).capacity_bytes == 1 << 29
      True
    """

    dim: int
    capacity_bytes: int
    initial: Initial = Initial()
    admission: Admission = Admission()
    eviction: Eviction = "lru"
    ttl: int = 0
    dtype: str = "float32"

    def shard(self, name: str, slots: tuple[Column, ...], shards: int) -> HashSpec:
        """Returns what one of ``shards`` shards is.

        Args:
          name: of the parameter, and of the table in messages.
          slots: columns of its optimizer.
          shards: how many share the budget, in equal parts, as they do the keys.
        """
        rows = Column(name, self.dim, self.dtype, self.initial)
        return HashSpec(
            name=name,
            columns=(rows, *slots),
            capacity_bytes=self.capacity_bytes // shards,
            admission=self.admission,
            eviction=self.eviction,
            ttl=self.ttl,
        )
