"""Size-polymorphic executables: one is compiled for each size that occurs."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import jax

from jgraph.graph.sizes import symbols_of

MAX_SIZES: Final = 64
"""Of one segment."""


@final
class SizedExecutable:
    """Code for any size of its arguments, compiled for each size when it first comes.

    The last ``MAX_SIZES`` sizes are kept.

    Args:
      jitted: the code.
      avals: types of its arguments, with names in their shapes.
      check: called with what was compiled, before it is used.
    """

    __slots__ = ("_avals", "_check", "_jitted", "_lock", "_places", "_runs")

    def __init__(
        self, jitted: Any, avals: Sequence[Any], check: Callable[[Any], None]
    ) -> None:
        self._jitted = jitted
        self._avals = avals
        self._check = check
        self._lock = threading.Lock()
        self._runs: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        # One axis for each expression tells all sizes.
        self._places = {
            text: (position, axis)
            for position, aval in enumerate(avals)
            for axis, text in enumerate(symbols_of(aval.shape))
            if text
        }

    def __call__(self, *args: Any) -> Sequence[jax.Array]:
        """Runs the code; a new size is compiled first, one after the other."""
        results: Sequence[jax.Array] = self.of(args)(*args)
        return results

    def of(self, args: Sequence[Any]) -> Any:
        """Returns the executable for arguments of these shapes."""
        sizes = tuple(args[n].shape[axis] for n, axis in self._places.values())
        with self._lock:
            run = self._runs.get(sizes)
            if run is None:
                run = self._compiled(sizes)
                self._check(run)
                self._runs[sizes] = run
                if len(self._runs) > MAX_SIZES:
                    self._runs.popitem(last=False)
            else:
                self._runs.move_to_end(sizes)
        return run

    def _compiled(self, sizes: tuple[int, ...]) -> Any:
        known = dict(zip(self._places, sizes, strict=True))
        structs = [
            jax.ShapeDtypeStruct(
                [known.get(str(size), size) for size in aval.shape], aval.dtype
            )
            for aval in self._avals
        ]
        return self._jitted.lower(*structs).compile()
