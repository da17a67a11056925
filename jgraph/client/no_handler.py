"""Transport handler of a client, which receives nothing."""

from collections.abc import AsyncIterator
from typing import final

from jgraph.errors import JGError, UnknownMethodError
from jgraph.graph.device import TaskName
from jgraph.rpc.transport import Frame


@final
class NoHandler:
    """The handler of a client, which nobody calls or posts to."""

    def frame_received(self, src: TaskName, received: Frame) -> None:
        """Never called."""

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Never called."""

    def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        """Refuses."""
        raise UnknownMethodError(f"a client has no method '{method}'")
