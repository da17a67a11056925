"""Size levels of row executables: few sizes, none much larger than needed.

A segment of rows is exported once for any number of them
(``jgraph.plan.lowering.by_count``) and compiled for a few: each size is about half of
the one before.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jgraph.plan.program.nodes import SegmentNode, ValueId, ValueType
from jgraph.plan.program.program import Partition, row_type

LEAST_ROWS = 32
"""No size is below: fewer rows take no less time."""


def rows_at(level: int, most: int) -> int:
    """Returns how many rows a value of at most ``most`` is padded to at a level.

    An eighth more than a power of two of the whole: ids that are spread evenly over two
    shards are about half of all in each, sometimes a few more.

    Example:
      >>> [rows_at(level, 1000) for level in range(4)]
      [1000, 563, 282, 141]
    """
    return most if level == 0 else min(most, -(-9 * most // (8 << level)))


def at_level(type_: ValueType, level: int) -> ValueType:
    """Returns the type of what an executable takes at a level."""
    if not (type_.ragged and level):
        return type_
    return replace(type_, shape=(rows_at(level, type_.shape[0]), *type_.shape[1:]))


def level_of(
    partition: Partition, node: SegmentNode, values: Mapping[ValueId, Any]
) -> int:
    """Returns the highest level at which all rows that a segment takes have room.

    Args:
      partition: of the node.
      node: the segment.
      values: of this step.
    """
    rows = (*node.row_updates, *node.row_reads)
    counts = [(len(values[r.ids]), row_type(partition, r)) for r in rows]
    counts += [(len(values[v]), t) for v, t in _ragged(partition, node)]
    largest = max((t.shape[0] for _, t in counts if t.ragged), default=0)
    level = 0
    while rows_at(level + 1, largest) >= LEAST_ROWS and all(
        count <= rows_at(level + 1, t.shape[0]) for count, t in counts if t.ragged
    ):
        level += 1
    return level


def _ragged(partition: Partition, node: SegmentNode) -> list[tuple[ValueId, ValueType]]:
    types = [(v, partition.values[v]) for v in node.inputs]
    return [(v, type_) for v, type_ in types if type_.ragged]
