"""Parameters of a model that is trained in this process, to be served."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import final

import jax.numpy as jnp

from jgraph.clock import Clock
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.serving.live.parameters import DenseCopy, FoundRows
from jgraph.serving.signature import Array
from jgraph.train.state.runner import RunState


@final
class LocalParameters:
    """Parameters that are in this process.

    Args:
      state: of the training.
      names: of its variables.
      threads: where it is read.
      clock: for ages.
    """

    def __init__(
        self, state: RunState, names: Sequence[str], threads: Executor, clock: Clock
    ) -> None:
        self._state = state
        self._names = names
        self._threads = threads
        self._clock = clock
        self._copy: DenseCopy | None = None
        self.lost: Mapping[TaskName, JGError] = {}

    @property
    def copy(self) -> DenseCopy:
        """See ``Parameters.copy``."""
        assert self._copy is not None  # refreshed before it is served
        return self._copy

    async def refresh(self) -> None:
        """See ``Parameters.refresh``."""
        loop = asyncio.get_running_loop()
        self._copy = await loop.run_in_executor(self._threads, self._read)

    def _read(self) -> DenseCopy:
        at = self._clock.now()
        values = self._state.values(model_only=True)
        named = dict(zip(self._names, values, strict=True))
        dense = {name: jnp.array(v) for name, v in named.items() if v is not None}
        return DenseCopy(dense, int(named["global_step"]), at)

    async def rows(self, wanted: Mapping[str, Array]) -> FoundRows:
        """See ``Parameters.rows``."""
        raise AssertionError("no table is looked up by rows in this process")

    def close(self) -> None:
        """See ``Parameters.close``."""
