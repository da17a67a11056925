"""Byte budget of a hash-table shard, converted to rows."""

from bisect import bisect_right

from jgraph.errors import ConfigError
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.runtime.store.hash_index import HashIndex
from jgraph.runtime.store.hash_policy import CountSketch
from jgraph.runtime.store.hash_rows import np_dtype

_MOST_ROWS = 2**31 - 1


def rows_within(spec: HashSpec) -> int:
    """Returns how many rows the budget of a shard is good for.

    Counted is all that the shard keeps: the columns, the keys, the slots of the index
    (also while it grows), and what the policies remember.

    Raises:
      ConfigError: not even one.
    """
    least = nbytes_for(spec, 1)
    if spec.capacity_bytes < least:
        name = f" '{spec.name}'" if spec.name else ""
        raise ConfigError(
            f"hash table{name} has {spec.capacity_bytes} bytes for a shard, "
            f"and one row with its optimizer state takes {least}; raise capacity_bytes",
            table=spec.name,
            needed_bytes=least,
        )
    sizes = range(2, _MOST_ROWS)
    return 1 + bisect_right(
        sizes, spec.capacity_bytes, key=lambda rows: nbytes_for(spec, rows)
    )


def nbytes_for(spec: HashSpec, rows: int) -> int:
    """Returns the bytes that a shard of ``rows`` rows keeps, also while it grows."""
    values = sum(np_dtype(c).itemsize * max(c.width, 1) for c in spec.columns)
    remembered = 8 + 4 * (spec.eviction == "lfu")
    sketch = 0
    if spec.admission.sightings > 1:
        sketch = CountSketch.nbytes_for(sketch_width(rows))
    return rows * (values + remembered) + HashIndex.nbytes_for(rows) + sketch


def sketch_width(rows: int) -> int:
    """Returns the width of the sketch that counts keys for so many rows."""
    return 1 << (rows - 1).bit_length()
