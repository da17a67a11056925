"""Named axes of one step, for models that average over ``axis_name="batch"``."""

from collections.abc import Callable
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp

from jgraph import _compat

_T = TypeVar("_T")


@final
class NamedAxes:
    """Calls functions so that each axis exists that their collectives name, of size 1.

    A mean over such an axis is that of the batch of one worker: workers exchange
    nothing within a step but parameters and gradients. Which names there are is found
    by the first call.

    Example:
      >>> axes = NamedAxes()
      >>> axes.called(lambda x: jax.lax.pmean(x, "batch"), jnp.arange(2.0)).tolist()
      [0.0, 1.0]
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    def called(self, fn: Callable[..., _T], *args: Any) -> _T:
        """Returns ``fn(*args)``, a tree of arrays."""
        while True:
            call: Callable[[], _T] = lambda: fn(*args)
            for name in self._names:
                call = _with_axis(call, name)
            try:
                return call()
            except NameError as error:
                name = _compat.unbound_axis(error)
                if not name or name in self._names:
                    raise
                self._names.append(name)


def _with_axis(call: Callable[[], _T], name: str) -> Callable[[], _T]:
    def inner() -> _T:
        mapped = jax.vmap(call, in_axes=(), axis_size=1, axis_name=name)
        one: _T = jax.tree.map(lambda x: jnp.squeeze(x, 0), mapped())
        return one

    return inner
