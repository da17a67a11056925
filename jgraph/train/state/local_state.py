"""Local state: the variables of a training run in this process."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from jgraph.train.state.remote_arrays import RunSnapshot
from jgraph.train.state.runner import Events, Position
from jgraph.train.step.train_step import TrainStep

# A call in C++ for each array; JAX's own function takes ten times as long.
_copy = jax.jit(jnp.copy)


@final
class LocalState:
    """The variables of a step as arrays of this process; see ``RunState``.

    Args:
      step: whose variables.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._count = step.names.index("global_step")
        # Held while buffers change hands: users may look at a run from any thread.
        self.lock = threading.Lock()
        self.arrays: list[Any] = []
        """The values; a step donates them."""
        self.position: Position = None
        """Where in the data the last run ended."""
        self.load(step.initial_values)

    def global_step(self) -> int:
        """See ``RunState.global_step``."""
        with self.lock:
            return int(self.arrays[self._count])

    def values(
        self, *, model_only: bool = False, halted: bool = False
    ) -> Sequence[Any]:
        """See ``RunState.values``; copies, because a later step reuses the buffers."""
        with self.lock:
            return [
                None if model_only and name.startswith("opt/") else _copy(value)
                for name, value in zip(self._step.names, self.arrays, strict=True)
            ]

    def keep(self, go_on: Callable[[], None] | None = None) -> RunSnapshot:
        """See ``RunState.keep``; here are no tasks."""
        return RunSnapshot(self.values())

    def places(self) -> Sequence[Any]:
        """See ``RunState.places``; here are no tasks."""
        return self._step.initial_values

    def nbytes(self) -> int:
        """See ``RunState.nbytes``; they are here."""
        return 0

    def check_model(self) -> None:
        """See ``RunState.check_model``."""

    def load(self, values: Sequence[Any], position: Position = None) -> None:
        """See ``RunState.load``."""
        # The step donates them: the caller's own arrays must stay alive.
        with self.lock:
            self.arrays = [jnp.array(v, copy=True) for v in values]
            self.position = position

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        """See ``RunState.read``."""
        with self.lock:
            places = {name: self._step.names.index(name) for name in names}
            return {name: _copy(self.arrays[at]) for name, at in places.items()}

    def write(self, values: Mapping[str, Any]) -> None:
        """See ``RunState.write``."""
        with self.lock:
            for name, value in values.items():
                self.arrays[self._step.names.index(name)] = jnp.array(value, copy=True)

    def events(self) -> Events:
        """See ``RunState.events``: here are no hash tables."""
        return ()

    def let_go(self) -> None:
        """See ``RunState.let_go``: here are no tasks."""

    def close(self) -> None:
        """See ``RunState.close``; there is nothing to give back."""
