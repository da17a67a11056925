"""Transport statistics: counters, and the frozen record made of them."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

from jgraph.graph.device import TaskName


@final
@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """Frames and bytes posted to and received from one task.

    ``bytes_…`` went through the stream or a socket beside it, ``shared_bytes_…``
    through shared memory. ``way`` is how frames leave now: through ``"shared memory"``,
    a ``"local socket"``, a ``"data socket (records)"``, ``"(tls)"`` or ``"(plain)"``,
    or the ``"gRPC stream"``; empty where there is no connection.
    """

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    shared_bytes_sent: int = 0
    shared_bytes_received: int = 0
    way: str = field(default="", kw_only=True)


@final
@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """What a transport did since its start.

    ``repeats_dropped`` counts frames that came twice and were ignored;
    ``reserved_bytes`` is the shared memory that is kept for sending.
    """

    peers: Mapping[TaskName, PeerStatistics]
    calls_made: int
    calls_served: int
    repeats_dropped: int
    reserved_bytes: int = 0


class Counters:
    """Mutable counters behind ``TransportStatistics``.

    Example:
      >>> counters = Counters()
      >>> counters.sent(TaskName("/job:ps/task:0"), frames=1, nbytes=64)
      >>> counters.snapshot().peers["/job:ps/task:0"].bytes_sent
      64
    """

    def __init__(self) -> None:
        self._peers: defaultdict[TaskName, list[int]] = defaultdict(lambda: [0] * 6)
        self._ways: dict[TaskName, str] = {}
        self.calls_made = 0
        self.calls_served = 0

    def sent(
        self, peer: TaskName, *, frames: int = 0, nbytes: int = 0, shared: int = 0
    ) -> None:
        """Counts what was written to ``peer``."""
        row = self._peers[peer]
        row[0] += frames
        row[1] += nbytes
        row[4] += shared

    def leads(self, peer: TaskName, way: str) -> None:
        """Notes how frames leave for ``peer`` from now on; empty: not at all."""
        if way:
            self._ways[peer] = way
        else:
            self._ways.pop(peer, None)

    def received(
        self, peer: TaskName, *, frames: int = 0, nbytes: int = 0, shared: int = 0
    ) -> None:
        """Counts what came from ``peer``."""
        row = self._peers[peer]
        row[2] += frames
        row[3] += nbytes
        row[5] += shared

    def snapshot(
        self, repeats_dropped: int = 0, reserved_bytes: int = 0
    ) -> TransportStatistics:
        """Returns the counts of this moment."""
        peers = {
            peer: PeerStatistics(*self._peers[peer], way=self._ways.get(peer, ""))
            for peer in {**self._peers, **self._ways}
        }
        return TransportStatistics(
            MappingProxyType(peers),
            self.calls_made,
            self.calls_served,
            repeats_dropped,
            reserved_bytes,
        )
