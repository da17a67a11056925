"""Resources of a Trainer or a session on a cluster, and their release."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias, final

from jgraph.client.connection import Connection
from jgraph.cluster.event_loop import event_loop
from jgraph.errors import JGError

Drop: TypeAlias = Callable[[], None]


@final
class ClusterResources:
    """Drops what somebody holds on a cluster when they go, or their client.

    Args:
      cluster: where it is; None: nothing is anywhere.
      is_busy: says whether a run goes on.
    """

    def __init__(
        self, cluster: Connection | None, is_busy: Callable[[], bool] = lambda: False
    ) -> None:
        self._cluster = cluster
        self._is_busy = is_busy
        self._drops: tuple[Drop, ...] = ()

    def hold(self, *drops: Drop) -> None:
        """Takes the place of what was held; ``drops`` drop it."""
        self._drops = drops
        if self._cluster is not None:
            self._cluster.at_close[id(self)] = self.drop_unless_busy

    def let_go(self) -> None:
        """Drops nothing any more: a run needs it that outlives its client."""
        self._drops = ()
        if self._cluster is not None:
            self._cluster.at_close.pop(id(self), None)

    def drop(self) -> None:
        """Drops what is held.

        Raises:
          JGError: the cluster does not answer.
        """
        drops = self._drops
        self.let_go()
        for drop in drops:
            drop()

    def drop_unless_busy(self) -> None:
        """Drops it as the client ends; a run that goes on ends with its client."""
        if not self._is_busy():
            self.drop()

    def drop_soon(self) -> None:
        """Drops it in a thread of its own: garbage is collected in any."""
        if self._drops:
            event_loop().call_soon_threadsafe(self._begin_to_drop)

    def _begin_to_drop(self) -> None:
        with suppress(RuntimeError):  # the process ends, and its clients drop all
            asyncio.get_running_loop().run_in_executor(None, self._drop_anyhow)

    def _drop_anyhow(self) -> None:
        with suppress(JGError):  # of a cluster that is gone nothing is left to drop
            self.drop()
