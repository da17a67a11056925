"""Copies of dense parameters, taken again and again while a model is served."""

import asyncio
import logging
from concurrent.futures import Future
from typing import final

from jgraph.cluster import event_loop
from jgraph.serving.live.parameters import Parameters

_LOG = logging.getLogger("jgraph.serving")


@final
class Refreshing:
    """Refreshes parameters until it is stopped.

    Args:
      name: of the model, for people.
      parameters: what is served.
      refresh_s: between copies.
    """

    def __init__(self, name: str, parameters: Parameters, refresh_s: float) -> None:
        self._name = name
        self._parameters = parameters
        self._refresh_s = refresh_s
        self._going: Future[None] = event_loop.start(self._refresh())

    async def _refresh(self) -> None:
        while True:  # at once: code was compiled since the copy of the start
            try:
                await self._parameters.refresh()
            except Exception:  # noqa: BLE001  # a closed cluster is one of the reasons
                _LOG.exception("The parameters of %s stay as they were.", self._name)
            await asyncio.sleep(self._refresh_s)

    def stop(self) -> None:
        """Takes no more copies, and drops what is held for them on other tasks."""
        self._going.cancel()
        self._parameters.close()
