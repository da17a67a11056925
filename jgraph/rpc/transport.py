"""Transport interface: frames, handlers, and three ways to send a message.

A transport moves ``Frame``s: a small header (a protobuf message) and tensors. Tasks
talk in three ways:

* ``post``: one-way frames between tasks, over one long-lived stream per pair of tasks;
  order is kept per (sender, receiver); used on the path of a step.
* ``ask``: one request frame in, one reply frame out, with a deadline; used for
  everything else (registering programs, feeds and fetches, …), but for
* ``call``, where a stream of reply frames comes out (the reports of a loop).

The in-process and the gRPC transport pass one conformance suite
(``jgraph.testing.transport_conformance``).
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import numpy as np

from jgraph.errors import JGError
from jgraph.graph.device import TaskName
from jgraph.rpc.statistics import TransportStatistics

Tensor: TypeAlias = np.ndarray[Any, Any]
Address: TypeAlias = str
"""``host:port``."""


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """A header and its tensors.

    ``header`` is a protobuf message of ``protos/jgraph.proto``; ``tensors`` are C-order
    numpy arrays, sent as raw little-endian bytes. Received tensors of
    1 KiB and more are 64-byte aligned, so that JAX takes them without a copy; all
    belong to the receiver.
    """

    header: Any
    tensors: tuple[Tensor, ...] = ()


class Handler(Protocol):
    """What a task does with what arrives. Called on the transport's event loop."""

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        """Takes a posted frame; must not block."""

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Learns that ``peer`` cannot be reached or went away."""

    def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        """Answers a call with one or more frames, or raises a JGError."""


class Transport(Protocol):
    """Moves frames for one task (or for a client, which is never posted to)."""

    async def start(self, handler: Handler) -> Address:
        """Begins to accept frames and calls; returns the bound ``host:port``."""

    def set_peers(self, peers: dict[TaskName, Address]) -> None:
        """Tells where other tasks are; connections are made on first use."""

    def post(self, dst: TaskName, frame: Frame) -> None:
        """Queues a frame for ``dst``; never blocks. A failure is ``peer_lost``.

        So is a peer that does not take what is queued for it (``NotTakingError``).
        """

    def when_sent(self, dst: TaskName, callback: Callable[[], None]) -> None:
        """Calls back once nothing that was posted to ``dst`` is on its way any more.

        It is there then, but for a few bytes, or has left where nothing is
        acknowledged; or the link has ended. Never before this returns.
        """

    def withdraw(self, handle: str, step_id: int) -> int:
        """Drops the posted values of a step that have not begun to leave.

        Returns:
          How many frames.
        """

    def call(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> AsyncIterator[Frame]:
        """Calls ``method`` at an address; yields the reply frames.

        Raises:
          ClusterUnreachableError: nothing of ours listens there.
          DeadlineError: no end of the reply within ``timeout_s``.
          JGError: whatever the other side raised.
        """

    async def ask(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> Frame:
        """Calls ``method`` at an address; returns its only reply.

        Raises: as ``call``, and InternalError: there was no reply.
        """

    async def join(
        self, parts: Sequence[np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any] | None:
        """Returns arrays one after the other without a copy, where that can be.

        Such an array is read-only. None: whoever asks makes a copy.
        """

    async def give_back_memory(self) -> None:
        """Gives memory to the system that was needed for large frames, and is free."""

    def statistics(self) -> TransportStatistics:
        """Returns what was sent and received so far."""

    async def close(self) -> None:
        """Stops accepting, ends streams, and releases the port."""
