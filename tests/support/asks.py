"""Streams of calls, byte by byte, as no client of ours sends them."""

from collections.abc import Iterable
from typing import TypeAlias

import grpc
import numpy as np

from jgraph.errors import JGError
from jgraph.rpc.calls.caller import ASKS_METHOD
from jgraph.rpc.dial import CHANNEL_OPTIONS
from jgraph.rpc.frames import body_of, frame, hello, kind_of
from jgraph.rpc.resumable.admission_control import (
    Admission,
    Admit,
    Announced,
    RequestBudget,
)
from jgraph.rpc.shared_memory.mappings import Bytes
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import aligned_empty, encode, pack, prepare
from jgraph.rpc.wire.decoder import Decoder

Asks: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


def told(message: Frame) -> bytes:
    return b"".join(pack(encode(message).pieces))


async def send(address: Address, chunks: Iterable[bytes]) -> list[Frame]:
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        return await send_over(channel, chunks)


async def send_over(channel: grpc.aio.Channel, chunks: Iterable[bytes]) -> list[Frame]:
    stream = channel.stream_stream(ASKS_METHOD, None, None)(iter(chunks), timeout=20)
    decoder = Decoder()
    return [f async for chunk in stream for f in decoder.feed(chunk)]


def error_in(frames: list[Frame]) -> JGError:
    last = frames[-1]
    assert (kind_of(last), last.header.sequence) == ("status", 0)
    return from_status(body_of(last))


HELLO = told(frame(hello=hello(None, incarnation=5)))
LIMIT = 3 << 20
LARGE = np.ones(2 << 20, np.uint8)


class Memory:
    """Counts what a decoder takes."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, nbytes: int) -> Bytes:
        self.taken += nbytes
        return aligned_empty(nbytes)


def ask(number: int, request: Frame, method: str = "Echo") -> bytes:
    return b"".join(prepare(request).encoded(sequence=number, method=method).pieces)


def intake(room: RequestBudget, memory: Memory | None = None) -> Admission:
    def decoder(admit: Admit, announced: Announced) -> Decoder:
        take = (memory or Memory()).take
        return Decoder(take=take, admit=admit, announced=announced)

    return Admission(room, decoder)
