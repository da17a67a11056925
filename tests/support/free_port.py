"""A port that nobody listens on."""

import socket


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return min(int(free.getsockname()[1]), 65000)
