"""Variable group: what one node uses together, found in the store once.

A program names its variables once, and its steps use the same ones each time: looking
each of them up, and putting their locks in order, is work of the first step.
"""

import threading
from collections.abc import Sequence
from typing import final, overload

from jgraph.plan.program.program import StoredVariable
from jgraph.runtime.store.entry import Entry, locks_in_order


@final
class VariableGroup(Sequence[StoredVariable]):
    """Variables of one node, in order; equal to itself alone.

    Example:
      >>> len(VariableGroup([]))
      0
    """

    __slots__ = ("__weakref__", "_variables")

    def __init__(self, variables: Sequence[StoredVariable]) -> None:
        self._variables = tuple(variables)

    def __len__(self) -> int:
        return len(self._variables)

    @overload
    def __getitem__(self, index: int) -> StoredVariable: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[StoredVariable, ...]: ...

    def __getitem__(
        self, index: int | slice
    ) -> StoredVariable | tuple[StoredVariable, ...]:
        return self._variables[index]


@final
class GroupEntries(list[Entry]):
    """The entries of a group; nobody changes the list.

    Attributes:
      locks: of them, in the order in which they are taken.
    """

    __slots__ = ("locks",)

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__(entries)
        self.locks: Sequence[threading.Lock] = locks_in_order(entries)
