"""Slab: one flat array in which the values of many small variables lie.

A program that updates or reads such variables together takes the array as it is. Each
variable keeps its entry, with its lock and its version, and is read and written alone
as any other; whoever uses a slab whole holds the locks of all its entries.
"""

import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from jgraph.plan.program.nodes import ValueType, packed_starts
from jgraph.plan.program.row_values import packed
from jgraph.runtime.store.tables import elements, on_cpu

Array = np.ndarray[Any, Any]


@final
class Slab:
    """Values of variables of one dtype, one after the other.

    Args:
      value: all of them, as ``packed_starts`` lays them.
      types: of each.

    Attributes:
      value: replaced by an update of all of it.
      types: of each.
      is_whole: whether it still has the values of all that it began with.
    """

    __slots__ = ("_lock", "_starts", "_views", "is_whole", "types", "value")

    def __init__(self, value: jax.Array, types: Sequence[ValueType]) -> None:
        self.value = value
        self.types = tuple(types)
        self.is_whole = True
        self._starts = packed_starts(types)
        self._views: list[weakref.ref[Any]] = []
        # Parts are read and written under the locks of their own entries.
        self._lock = threading.Lock()

    def view(self) -> Array:
        """Returns a view of all of it, which keeps its values."""
        with self._lock:
            view = view_of(self.value)
            self._views = [ref for ref in self._views if ref() is not None]
            self._views.append(weakref.ref(view))
        return view

    def part(self, place: int) -> Array:
        """Returns a view of one value, which keeps it."""
        start, shape = self._starts[place], self.types[place].shape
        # The part's base is what numpy keeps alive, so that one is kept account of.
        return self.view()[start : start + math.prod(shape)].reshape(shape)

    def put(self, value: jax.Array) -> None:
        """Replaces all values."""
        with self._lock:
            self.value, self._views = value, []

    def write(self, values: Mapping[int, Any]) -> None:
        """Replaces values, by their places; nobody sees a view of one change."""
        if len(values) == len(self.types):
            parts = [np.asarray(values[place]) for place in range(len(values))]
            self.put(jax.device_put(packed(parts, self.types)))
            return
        with self._lock:
            is_seen = any(ref() is not None for ref in self._views)
            stays = not is_seen and on_cpu(self.value)
            memory = elements(self.value) if stays else np.array(self.value)
            assert memory is not None  # no dtype of a slab is packed in bytes
            for place, value in values.items():
                start, part = self._starts[place], np.reshape(value, -1)
                memory[start : start + part.size] = part
            if not stays:
                self.value, self._views = jax.device_put(memory), []


def view_of(array: jax.Array) -> Array:
    """Returns a view of an array that does not keep it from being updated in place."""
    # Not np.asarray(array): that keeps the view in the array, and then every update
    # would find the buffer in use.
    try:
        return np.asarray(memoryview(array))
    except BufferError:  # not of numpy's own dtypes, or not on the CPU
        return np.asarray(array.addressable_data(0))
