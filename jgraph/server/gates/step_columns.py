"""Names of many steps in a message: columns of numbers of replicas and of step ids.

All gates of a run know the same replicas, in the same order, so numbers say who. Where
a gate does not know one, program handles travel.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from jgraph.coordination.sync.aggregation import Step
from jgraph.coordination.sync.roster import Column, Roster, Steps
from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb

_LITTLE = np.dtype("<i8")


def columns_of(roster: Roster, steps: Sequence[Step]) -> pb.Steps:
    """Returns steps as columns.

    Example:
      >>> roster = Roster(["a", "b"])
      >>> steps_of(roster, columns_of(roster, [("a", 1), ("b", 7)]))
      (('a', 1), ('b', 7))
    """
    numbered = roster.numbered(steps)
    if numbered is None:
        handles, step_ids = [h for h, _ in steps], [n for _, n in steps]
        return pb.Steps(handles=handles, step_ids=step_ids)
    numbers, ids = (c.astype(_LITTLE).tobytes() for c in numbered.columns)
    return pb.Steps(replicas=numbers, ids=ids)


def steps_of(roster: Roster, columns: pb.Steps) -> Sequence[Step]:
    """Returns the steps of columns.

    Raises:
      MalformedMessageError: they have different lengths, or nobody is so numbered.
    """
    if not (columns.replicas or columns.ids):
        check_lengths(columns.handles, columns.step_ids)
        return tuple(zip(columns.handles, columns.step_ids, strict=True))
    numbers, ids = _column(columns.replicas), _column(columns.ids)
    check_lengths(numbers, ids)
    least, most = int(min(numbers.min(), ids.min())), int(numbers.max())
    if least < 0 or most >= len(roster):
        raise MalformedMessageError(
            f"a message is about steps of replica {most}, and number {least}, of a run "
            f"with {len(roster)} replicas"
        )
    return Steps(roster, numbers, ids)


def slots_in(slots: Sequence[int]) -> bytes:
    """Returns slots as they travel."""
    return np.array(slots, _LITTLE).tobytes()


def slots_of(column: bytes) -> Sequence[int]:
    """Returns slots that came.

    Raises:
      MalformedMessageError: it is no whole number of them.

    Example:
      >>> slots_of(slots_in([4, 9])).tolist()
      [4, 9]
    """
    return array("q", _column(column).tobytes())


def _column(column: bytes) -> Column:
    if len(column) % _LITTLE.itemsize:
        raise MalformedMessageError(
            f"a message about steps has a column of {len(column)} bytes, which is no "
            "whole number of values"
        )
    return np.frombuffer(column, _LITTLE).astype(np.int64, copy=False)


def check_lengths(
    one: Sequence[object] | Column, other: Sequence[object] | Column
) -> None:
    """Refuses columns of a message that have different lengths.

    Raises:
      MalformedMessageError: they do.
    """
    if len(one) != len(other):
        raise MalformedMessageError(
            f"a message about steps has columns of {len(one)} and {len(other)} values"
        )
