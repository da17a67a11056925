"""Relay: bytes between a caller and a task that only dials, which cannot be called."""

import asyncio
from typing import Any, Final

import grpc

from jgraph.errors import MalformedMessageError
from jgraph.rpc.dial_only.address import is_dial_only
from jgraph.rpc.dial_only.offered_streams import OfferedStream
from jgraph.rpc.transport import Address

RELAY_METHOD: Final = "/jgraph.v1.Task/Relay"
TO: Final = "jgraph-relay-to"
"""Metadata of a stream: for whom it is."""
OF: Final = "jgraph-relay-of"
"""Metadata of a stream: of which method it is."""
_EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # stubs lack it


def asked_relay(context: Any) -> tuple[Address, str]:
    """Returns for whom a stream is, and of which method.

    Raises:
      MalformedMessageError: it does not say so.
    """
    metadata = dict(context.invocation_metadata() or ())
    address, method = str(metadata.get(TO, "")), str(metadata.get(OF, ""))
    if not is_dial_only(address):
        raise MalformedMessageError(
            f"a relay leads to a task that only dials; '{address[:80]}' is none"
        )
    return address, method


async def relay(context: Any, stream: OfferedStream) -> None:
    """Passes on what either side says, until the task that only dials is done.

    Args:
      context: gRPC's, of the caller's stream.
      stream: of the task.

    Raises:
      grpc.aio.AioRpcError: the task's stream broke.
    """
    sending = asyncio.create_task(_send(context, stream))
    try:
        async for chunk in stream:
            await context.write(chunk)
    finally:
        sending.cancel()
        await asyncio.wait([sending])


async def _send(context: Any, stream: OfferedStream) -> None:
    try:
        while (chunk := await context.read()) is not _EOF:
            await stream.write(chunk)
    except (asyncio.InvalidStateError, grpc.aio.BaseError):
        stream.cancel()  # who reads it says so
