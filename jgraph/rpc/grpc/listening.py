"""Lifetime of a gRPC server, and the limits on connections that ask nothing.

gRPC tells nobody of a connection before its first stream. So its own limits are set: an
age for those without a stream, and a number for all.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import grpc

from jgraph.rpc.dial import SERVER_OPTIONS
from jgraph.rpc.open_files import file_limit, watch_files

GREETING_S: Final = 10.0
"""TLS and HTTP/2 have begun by then, or the connection is ended."""
IDLE_S: Final = 10.0
"""A connection that has had no stream for so long is ended; ours have one."""
_listening: Final[set["asyncio.Task[None]"]] = set()
"""What nobody holds any more listens on."""


def server_options(share: int = 2) -> tuple[tuple[str, int], ...]:
    """Returns the options of a server.

    Args:
      share: its connections are at most one in so many of the files of this process.
    """
    return (
        *SERVER_OPTIONS,
        ("grpc.server_handshake_timeout_ms", int(GREETING_S * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
        ("grpc.max_allowed_incoming_connections", max(file_limit() // share, 8)),
    )


async def listen(
    server: grpc.aio.Server,
    *,
    grace_s: float | None,
    then: Callable[[], None] | None = None,
) -> "asyncio.Task[None]":
    """Starts a server, which stops when the returned task is cancelled.

    ``asyncio.run`` cancels it at the latest. A server that is still running when it is
    freed hangs the process there: gRPC waits for calls that can no longer come in.

    Args:
      server: with its ports and handlers.
      grace_s: how long calls may go on when it stops; None: they end at once.
      then: closes what belongs to it, once it has stopped.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_in_one_line)
    listening = asyncio.create_task(_until_cancelled(server, grace_s, then))
    _listening.add(listening)
    listening.add_done_callback(_listening.discard)
    await server.start()
    return listening


async def stop_listening(listening: "asyncio.Task[None]") -> None:
    """Stops the server of ``listen``; waits until its port is free."""
    listening.cancel()
    await asyncio.wait([listening])


async def _until_cancelled(
    server: grpc.aio.Server, grace_s: float | None, then: Callable[[], None] | None
) -> None:
    try:
        await watch_files()
    finally:
        # The end of the loop also cancels a task of gRPC's, and with it the first try.
        with suppress(asyncio.CancelledError):
            await server.stop(grace_s)
        await server.stop(None)
        if then is not None:
            then()


def _in_one_line(record: logging.LogRecord) -> bool:
    """Says without a traceback that a stream was over when it was answered.

    gRPC ends a stream by itself, for one, whose message is too large when unpacked.
    """
    if record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError):
        record.msg = f"A stream ended before its answer was sent: {record.msg}"
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True
