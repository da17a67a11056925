"""Decoder of chunks of bytes to frames: the way back from ``jgraph.rpc.wire.codec``.

The decoder refuses before it allocates. Tensors are filled chunk by chunk in the memory
that their receiver gets; those in shared memory are there already.
"""

import itertools
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from jgraph.errors import JGError, MalformedMessageError, MessageTooLargeError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.shared_memory.mappings import Bytes
from jgraph.rpc.shared_memory.shared_memory import ReceiveMemory
from jgraph.rpc.transport import Frame, Tensor
from jgraph.rpc.wire.codec import (
    LARGE_HEADER_BYTES,
    LENGTH,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    TOGETHER_BYTES,
    Buffer,
    aligned_empty,
    check_type,
    too_large,
)


class Decoder:
    """Turns the chunks of one direction of a stream back into frames.

    Args:
      max_frame_bytes: larger frames are refused when their header is read, before
        memory is taken for them.
      take: gives the memory for a tensor of so many bytes.
      admit: whether to take the tensors of a frame, so many bytes; asked when its
        header is read, if it has some or its header was announced. If not, they are
        thrown away as they arrive, and the frame has none. None: always.
      announced: told the length of each large header before memory is taken for it;
        what it raises is final.

    Attributes:
      shared: the memory of the sender, where tensors may lie that are not in the
        stream; None until it is agreed on.
      shared_bytes: bytes of the tensors that were there.
      fed_bytes: that it was given.

    Example:
      >>> from jgraph.rpc.wire.codec import encode, pack
      >>> from jgraph.rpc.frames import frame
      >>> decoder = Decoder()
      >>> data = b"".join(pack(encode(frame(call=pb.Call(method="Hello"))).pieces))
      >>> decoder.feed(data[:3]), [f.header.call.method for f in decoder.feed(data[3:])]
      ([], ['Hello'])
    """

    def __init__(
        self,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        take: Callable[[int], Bytes] = aligned_empty,
        admit: Callable[[pb.Frame, int], bool] | None = None,
        announced: Callable[[int], None] | None = None,
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._take = take
        self._admit = admit
        self._announced = announced
        self._head = bytearray()
        self._need = LENGTH.size
        self._body: _Body | _Refused | None = None
        self._failure: JGError | None = None
        self.shared: ReceiveMemory | None = None
        self.shared_bytes = self.fed_bytes = 0

    def feed(self, chunk: Buffer) -> list[Frame]:
        """Takes the next bytes; returns the frames that they complete.

        Raises:
          MalformedMessageError: the bytes are not frames. Final: so is every later
            call.
          MessageTooLargeError: a frame over the limit. Final as well.
        """
        if self._failure is not None:
            raise self._failure
        self.fed_bytes += len(chunk)
        try:
            return self._feed(memoryview(chunk))
        except JGError as error:
            self._failure, self._body, self._head = error, None, bytearray()
            raise

    def room(self, least: int) -> memoryview | None:
        """Returns memory for the rest of a tensor, if that has so many bytes or more.

        Bytes may be put there from its beginning on; ``feed`` then gets that part.
        """
        body = self._body
        if type(body) is _Body and len(body.room) >= least:
            return body.room
        return None

    def finish(self) -> None:
        """Says that no bytes follow.

        Raises:
          MalformedMessageError: the bytes so far end inside a frame.
        """
        if self._failure is None and (self._head or self._body is not None):
            raise MalformedMessageError("the stream ended in the middle of a frame")

    def _feed(self, view: memoryview) -> list[Frame]:
        frames = []
        while len(view):
            if self._body is None:
                view = self._feed_head(view)
            else:
                view = self._body.fill(view)
            if self._body is not None and self._body.is_complete:
                frames.append(self._body.frame())
                self._body = None
        return frames

    def _feed_head(self, view: memoryview) -> memoryview:
        if not self._head and len(view) >= LENGTH.size:  # nearly always it is whole
            end = LENGTH.size + self._header_bytes(view)
            if len(view) >= end:
                self._body = self._parse(bytes(view[LENGTH.size : end]))
                return view[end:]
            self._head += view
            self._need = end
            return view[len(view) :]
        part = view[: self._need - len(self._head)]
        self._head += part
        if len(self._head) == self._need == LENGTH.size:
            self._need += self._header_bytes(self._head)
        if len(self._head) == self._need:
            self._body = self._parse(bytes(self._head[LENGTH.size :]))
            self._head, self._need = bytearray(), LENGTH.size
        return view[len(part) :]

    def _header_bytes(self, head: Buffer | bytearray) -> int:
        length: int = LENGTH.unpack_from(head)[0]
        if length > MAX_HEADER_BYTES:
            raise MalformedMessageError(
                f"these bytes are not a jgraph message: a header of {length:,} "
                f"bytes is announced, the limit is {MAX_HEADER_BYTES:,}"
            )
        if length > LARGE_HEADER_BYTES and self._announced is not None:
            self._announced(length)
        return length

    def _parse(self, text: bytes) -> "_Body | _Refused":
        try:
            header = pb.Frame.FromString(text)
        except DecodeError as error:
            raise MalformedMessageError(
                "these bytes are not a jgraph message: the header does not parse"
            ) from error
        if header.WhichOneof("body") is None:
            raise MalformedMessageError(
                "a frame without a body, or of a kind that this version does not know"
            )
        types = [check_type(t, "tensor", i) for i, t in enumerate(header.tensors)]
        tensor_bytes = sum([size for _, size, _ in types])
        nbytes = LENGTH.size + len(text) + tensor_bytes
        if nbytes > self._max_frame_bytes:
            raise MessageTooLargeError(
                too_large("frame", nbytes, self._max_frame_bytes)
            )
        slots = [
            (*kind, self._outside(type_, kind[1]))
            for type_, kind in zip(header.tensors, types, strict=True)
        ]
        if slots:
            header.ClearField("tensors")
        counts = tensor_bytes or len(text) > LARGE_HEADER_BYTES
        if counts and self._admit and not self._admit(header, tensor_bytes):
            return _Refused(header, sum([s[1] for s in slots if s[3] is None]))
        return _Body(header, slots, self._take)

    def _outside(self, type_: pb.TensorType, nbytes: int) -> Bytes | None:
        """Returns the bytes of a tensor that is not in the stream."""
        if not type_.HasField("shared"):
            return None
        if self.shared is None:
            raise MalformedMessageError(
                "a tensor in shared memory, which was not agreed on for this stream"
            )
        self.shared_bytes += nbytes
        return self.shared.array(type_.shared, nbytes)


_Slot: TypeAlias = tuple[np.dtype[Any], int, tuple[int, ...], Bytes | None]
"""A tensor to come: dtype, bytes, shape; its bytes, if it is in shared memory."""

_RUN_BYTES: Final = 64 << 10
"""Of tensors in one memory: who keeps one of them keeps all."""


class _Body:
    """A frame whose header is known and whose tensors are being filled.

    Neighbours that are small lie in one memory, as they do in the stream.
    """

    __slots__ = ("_header", "_slots", "_take", "_tensors", "is_complete", "room")

    def __init__(
        self, header: pb.Frame, slots: list[_Slot], take: Callable[[int], Bytes]
    ) -> None:
        self._take = take
        self._header = header
        self._slots = slots
        self._tensors: list[Tensor] = []
        self.room = memoryview(b"")
        self.is_complete = False
        self._next()

    def frame(self) -> Frame:
        for i, (dtype, _, _, _) in enumerate(self._slots):
            if dtype.kind == "b" and self._tensors[i].view(np.uint8).max(initial=0) > 1:
                raise MalformedMessageError(f"tensor {i} is bool with a byte over 1")
        return Frame(self._header, tuple(self._tensors))

    def fill(self, view: memoryview) -> memoryview:
        n = min(len(view), len(self.room))
        if view.obj is not self.room.obj:  # else they were put there
            self.room[:n] = view[:n]
        self.room = self.room[n:]
        self._next()
        return view[n:]

    def _next(self) -> None:
        """Takes memory for the next tensors that have bytes, if their turn has come."""
        while not len(self.room):
            first = len(self._tensors)
            if first == len(self._slots):
                self.is_complete = True
                return
            dtype, nbytes, shape, data = self._slots[first]
            if data is None and nbytes <= TOGETHER_BYTES:
                self._next_together(first)
                continue
            buffer = self._take(nbytes) if data is None else data
            self._tensors.append(buffer.view(dtype).reshape(shape))
            if data is None:
                self.room = buffer.data

    def _next_together(self, first: int) -> None:
        """Takes memory for a tensor and those that follow it there."""
        starts: list[int] = []
        end = 0
        for dtype, nbytes, _, data in itertools.islice(self._slots, first, None):
            is_apart = data is not None or nbytes > TOGETHER_BYTES
            # JAX and numpy are slow with numbers that begin in the middle of a word.
            if is_apart or end + nbytes > _RUN_BYTES or end % dtype.itemsize:
                break
            starts.append(end)
            end += nbytes
        buffer = self._take(end)
        slots = itertools.islice(self._slots, first, None)
        self._tensors += [
            np.ndarray(shape, dtype, buffer, start)
            for (dtype, _, shape, _), start in zip(slots, starts, strict=False)
        ]
        self.room = buffer.data


class _Refused:
    """A frame whose tensors, so many bytes in the stream, are thrown away."""

    __slots__ = ("_header", "_remaining")

    def __init__(self, header: pb.Frame, nbytes: int) -> None:
        self._header = header
        self._remaining = nbytes

    @property
    def is_complete(self) -> bool:
        return not self._remaining

    def frame(self) -> Frame:
        return Frame(self._header, ())

    def fill(self, view: memoryview) -> memoryview:
        n = min(len(view), self._remaining)
        self._remaining -= n
        return view[n:]
