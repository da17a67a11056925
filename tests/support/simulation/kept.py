"""What is kept a second time of a simulated ps: on another one, or on a disk."""

from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from jgraph.coordination.run.same_version import HeldBack
from jgraph.plan.program.replay import NodeRan, Record

History: TypeAlias = list[tuple[int, ...]]
DUE: Final = frozenset({1, 2})
"""The nodes of an update; the second one makes the first one's part whole."""


def as_arrays(history: History) -> list[np.ndarray[Any, Any]]:
    """Returns the arrays of a record of all updates."""
    return [np.array(batches) for batches in history]


@dataclass
class Kept:
    """A copy of the updates of one ps.

    Attributes:
      life: of the variables.
      history: the updates that it has.
    """

    life: int
    history: History
    held_back: HeldBack[Record] = field(default_factory=HeldBack)

    def came(self, record: Record) -> None:
        """Takes the next record."""
        what = record.what
        if isinstance(what, NodeRan):
            self._apply(self.held_back.update(record, record.version, what.node, DUE))
        else:
            self._apply(self.held_back.begin(record, record.version))

    def end(self, version: int) -> History:
        """Returns what it has when it ends at a version."""
        self._apply(self.held_back.end(version))
        return self.history

    def _apply(self, records: list[Record]) -> None:
        for record in records:
            batches = [tuple(array.tolist()) for array in record.arrays]
            if not isinstance(record.what, NodeRan):
                self.history = batches
            elif record.what.node == max(DUE):
                self.history += batches
