"""Names of many steps in a message: a column of program handles, and one of step ids.

Thousands of steps cost a tenth of what as many messages of one step do.
"""

from collections.abc import Sequence

from jgraph.coordination.sync.aggregation import Step
from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb


def columns_of(steps: Sequence[Step]) -> pb.Steps:
    """Returns steps as columns.

    Example:
      >>> steps_of(columns_of([("a", 1), ("b", 7)]))
      (('a', 1), ('b', 7))
    """
    return pb.Steps(handles=[h for h, _ in steps], step_ids=[n for _, n in steps])


def steps_of(columns: pb.Steps) -> tuple[Step, ...]:
    """Returns the steps of columns.

    Raises:
      MalformedMessageError: they have different lengths.
    """
    check_lengths(columns.handles, columns.step_ids)
    return tuple(zip(columns.handles, columns.step_ids, strict=True))


def check_lengths(one: Sequence[object], other: Sequence[object]) -> None:
    """Refuses columns of a message that have different lengths.

    Raises:
      MalformedMessageError: they do.
    """
    if len(one) != len(other):
        raise MalformedMessageError(
            f"a message about steps has columns of {len(one)} and {len(other)} values"
        )
