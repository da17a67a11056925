"""A port that nobody listens on."""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST = 10240


def free_port() -> int:
    """Returns a port that a process may listen on that begins some time later.

    It is one that the system gives nobody who asks for any: what is started meanwhile
    would have it else, or a connection of it.
    """
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    draw = random.SystemRandom()  # the tests' seed is the same in each process of them
    while True:
        port = draw.randrange(_LEAST, max(end, _LEAST + 1000))
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
