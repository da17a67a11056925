"""Variable group: what one node uses together, found in the store once.

A program names its variables once, and its steps use the same ones each time: looking
each of them up, and putting their locks in order, is work of the first step.
"""

import threading
from collections.abc import Sequence
from typing import Any, final, overload

import jax
import numpy as np

from jgraph.plan.program.nodes import ValueType, packed_type, runs
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.row_values import Cut, cuts_of, packed
from jgraph.runtime.store.entry import Entry, locks_in_order
from jgraph.runtime.store.slab import Slab


@final
class VariableGroup(Sequence[StoredVariable]):
    """Variables of one node, in order; equal to itself alone.

    Args:
      variables: of the node.
      packs: lengths of runs of them, from the first on, that lie in flat arrays.

    Example:
      >>> len(VariableGroup([]))
      0
    """

    __slots__ = ("__weakref__", "_layouts", "_variables", "packs")

    def __init__(
        self, variables: Sequence[StoredVariable], packs: Sequence[int] = ()
    ) -> None:
        self._variables = tuple(variables)
        self.packs = tuple(packs)
        self._layouts: list[tuple[ValueType, tuple[Cut, ...]]] | None = None

    def layouts(self) -> list[tuple[ValueType, tuple[Cut, ...]]]:
        """Returns of each packed run the type of its array, and what lies where."""
        if self._layouts is None:
            packed, _ = runs([v.type for v in self._variables], self.packs)
            self._layouts = [(packed_type(types), cuts_of(types)) for types in packed]
        return self._layouts

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

    Args:
      entries: of the group.
      packs: lengths of its packed runs.

    Attributes:
      locks: of them, in the order in which they are taken.
      runs: those of each packed run.
      alone: the others.
    """

    __slots__ = ("alone", "locks", "runs")

    def __init__(self, entries: Sequence[Entry], packs: Sequence[int] = ()) -> None:
        super().__init__(entries)
        self.locks: Sequence[threading.Lock] = locks_in_order(entries)
        packed, self.alone = runs(entries, packs)
        self.runs = [PackedRun(run) for run in packed]


@final
class PackedRun:
    """Entries whose values a node takes as one flat array; it holds their locks.

    Args:
      entries: in order.
    """

    __slots__ = ("_slab", "entries")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        self._slab: Slab | None = None

    def slab(self) -> Slab:
        """Returns the slab of these entries alone; made if there is none."""
        slab = self._known()
        if slab is None:
            value: jax.Array = jax.device_put(self._joined())
            slab = Slab(value, [entry.stored_type for entry in self.entries])
            for place, entry in enumerate(self.entries):
                entry.lie_in(slab, place)
            self._slab = slab
        return slab

    def view(self) -> np.ndarray[Any, Any]:
        """Returns all values, flat; a view where they lie so."""
        slab = self._known()
        return self._joined() if slab is None else slab.view()

    def _known(self) -> Slab | None:
        """Returns the slab that has these values and no others, in this order."""
        if self._slab is not None and self._slab.is_whole:
            return self._slab
        slab = self.entries[0].slab
        if slab is None or not slab.is_whole or len(slab.types) != len(self.entries):
            return None
        if any(e.slab is not slab or e.place != n for n, e in enumerate(self.entries)):
            return None
        self._slab = slab
        return slab

    def _joined(self) -> np.ndarray[Any, Any]:
        types = [entry.stored_type for entry in self.entries]
        return packed([entry.view() for entry in self.entries], types)
