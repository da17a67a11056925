"""A network that is slow and loses packets: of IP, between hosts of namespaces.

Each host's cable is a TUN device whose other end is a file of this process, which
passes every packet on, later or never. What TCP makes of that is the kernel's business.
"""

import fcntl
import os
import random
import select
import socket
import struct
import threading
from collections import deque
from typing import Final, final

from jgraph.clock import SystemClock

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET: Final = 1 << 16


@final
class LossyLine:
    """What is on its way: it arrives in its order, late, or never. Pure.

    Attributes:
      delay_s: what is sent from now on arrives so much later.
      loss: which part of it never does.
      lost: how many packets did not.

    Example:
      >>> line = LossyLine(seed=1)
      >>> line.delay_s = 0.3
      >>> line.send(b"hello", now=1.0)
      >>> line.arrived(now=1.2), line.arrived(now=1.3)
      ([], [b'hello'])
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._under_way: deque[tuple[float, bytes]] = deque()
        self.delay_s = 0.0
        self.loss = 0.0
        self.lost = 0

    def send(self, packet: bytes, now: float) -> None:
        """Takes a packet."""
        if self._random.random() < self.loss:
            self.lost += 1
            return
        # Not before those that were sent when it was slower.
        latest = self._under_way[-1][0] if self._under_way else now
        self._under_way.append((max(now + self.delay_s, latest), packet))

    def arrived(self, now: float) -> list[bytes]:
        """Returns what has arrived since."""
        there: list[bytes] = []
        while self._under_way and self._under_way[0][0] <= now:
            there.append(self._under_way.popleft()[1])
        return there

    def next_in_s(self, now: float) -> float | None:
        """Returns when the next one arrives; None: none is under way."""
        return max(0.0, self._under_way[0][0] - now) if self._under_way else None


@final
class LossyNetwork:
    """Passes packets between TUN devices; a thread does.

    Args:
      seed: decides what is lost.

    Attributes:
      line: what is on its way.
    """

    def __init__(self, seed: int) -> None:
        self.line = LossyLine(seed)
        self._files: dict[bytes, int] = {}
        self._end, self._ended = os.pipe()
        self._thread = threading.Thread(target=self._run, name="lossy", daemon=True)

    def add(self, device: str, address: str) -> None:
        """Makes a device; packets for an address go there. Before ``start``.

        Raises:
          OSError: this machine gives us none.
        """
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._files[socket.inet_aton(address)] = file
        request = struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(file, _TUNSETIFF, request)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends it; the devices are gone."""
        os.close(self._ended)
        if self._thread.is_alive():
            self._thread.join()
        for file in [self._end, *self._files.values()]:
            os.close(file)

    def _run(self) -> None:
        clock, files = SystemClock(), [self._end, *self._files.values()]
        while True:
            wait_s = self.line.next_in_s(clock.now())
            ready, _, _ = select.select(files, [], [], wait_s)
            if self._end in ready:
                return
            for file in ready:
                self.line.send(os.read(file, _MAX_PACKET), clock.now())
            for packet in self.line.arrived(clock.now()):
                self._deliver(packet)

    def _deliver(self, packet: bytes) -> None:
        to = self._files.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if to is not None:  # else of IPv6, or to all
            os.write(to, packet)
