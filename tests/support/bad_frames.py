"""Frames as bytes, also such as only an attacker writes."""

import struct

from jgraph.errors import JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, kind_of
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.codec import encode, pack


def raw(header: pb.Frame, body: bytes = b"") -> bytes:
    text = header.SerializeToString()
    return struct.pack("<I", len(text)) + text + body


def typed(dtype: str, shape: list[int], body: bytes = b"") -> bytes:
    """A frame of one tensor of this type, as only an attacker writes it."""
    type_ = pb.TensorType(dtype=dtype, shape=shape)
    return raw(pb.Frame(empty=pb.Empty(), tensors=[type_]), body)


def data(*frames: Frame, first: int = 1) -> bytes:
    """The bytes of frames, numbered as on an Exchange."""
    encoded = (encode(f, sequence=n) for n, f in enumerate(frames, first))
    return b"".join(pack(piece for e in encoded for piece in e.pieces))


def error_in(frames: list[Frame]) -> JGError:
    assert kind_of(frames[-1]) == "status"
    return from_status(body_of(frames[-1]))
