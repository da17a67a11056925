"""Encoder of frames to chunks of bytes, as ``protos/jgraph.proto`` describes them.

The bytes of one direction of a stream are frames one after the other:
``u32 header length | header | tensor bytes``. They travel in chunks of 1 MiB, so
a frame may span chunks and small frames share one. ``jgraph.rpc.wire.decoder`` is the
way back.
"""

import functools
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from jgraph.errors import MalformedMessageError, MessageTooLargeError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Frame, Tensor

CHUNK_BYTES: Final = 1 << 20
"""Measured in tasks, which keep freed memory: 512 KiB costs 5 to 10 % more CPU, 2 MiB
as much as this. In a process that gives it back, this costs 14 % more than 512 KiB."""
MAX_HEADER_BYTES: Final = 16 << 20
LARGE_HEADER_BYTES: Final = 64 << 10
"""A larger header of a call counts in the bound of what a task holds."""
MAX_FRAME_BYTES: Final = 4 << 30
MAX_NDIM: Final = 32
HANDLE_BYTES: Final = 32
"""More than the place of a tensor in shared memory takes in a header."""
NUMBER_BYTES: Final = 128
"""What the number of a frame and a method take in a header at most."""
ALIGNMENT: Final = 64
"""JAX takes a numpy array on the CPU without a copy when it begins at a multiple."""

Buffer: TypeAlias = bytes | memoryview
Kind: TypeAlias = tuple[np.dtype[Any], int, tuple[int, ...]]
"""Of a tensor: dtype, bytes, shape."""

LENGTH = struct.Struct("<I")
_NOTHING: Mapping[int, pb.SharedBlock] = {}
_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("uint64", "float16", "float32", "float64", "complex64", "complex128"),
)


def _allowed_dtypes() -> dict[str, np.dtype[Any]]:
    dtypes = {name: np.dtype(name) for name in _NUMPY_NAMES}
    for name in ml_dtypes.__all__:
        kind = getattr(ml_dtypes, name)
        if isinstance(kind, type) and issubclass(kind, np.generic):
            dtypes[name] = np.dtype(kind)
    return dtypes


DTYPES: Final = _allowed_dtypes()
"""Every dtype that may travel, by its name on the wire."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}  # dtype.name is slow
TOGETHER_BYTES: Final = 8 << 10
"""Neighbours of at most this size are copied together, and received together."""
_SMALL_BYTES: Final = 1024
"""JAX copies a smaller array in less time than it takes to align it."""


class Encoded(NamedTuple):
    """A frame ready to be sent: its bytes in pieces, large tensors not copied."""

    pieces: tuple[Buffer, ...]
    nbytes: int


class Prepared(NamedTuple):
    """A frame that was checked and can be sent; its tensors are not copied.

    ``nbytes`` counts header and tensors, wherever they will travel; ``values_of`` is
    the step whose values they are, None if they are something else.
    """

    header: bytes
    types: bytes
    arrays: tuple[Tensor, ...]
    nbytes: int
    values_of: tuple[str, int] | None

    @property
    def header_bytes(self) -> int:
        """The length of the header, or a little more."""
        return len(self.header) + len(self.types) + NUMBER_BYTES

    @property
    def has_large_header(self) -> bool:
        """Whether its header counts where it arrives."""
        return self.header_bytes > LARGE_HEADER_BYTES

    def encoded(
        self,
        shared: Mapping[int, pb.SharedBlock] = _NOTHING,
        *,
        sequence: int = 0,
        method: str = "",
        every_reply: bool = False,
    ) -> Encoded:
        """Returns the bytes for the stream.

        Args:
          shared: where the tensors are that do not go there, by their index.
          sequence: number of the frame on its stream; 0 for none.
          method: what is called, on a stream of calls.
          every_reply: all replies are wanted there, not only the last.
        """
        types = _placed(self.types, shared) if shared else self.types
        # Serialized messages of one type, put together, parse as their union.
        envelope = pb.Frame(sequence=sequence, method=method, every_reply=every_reply)
        text = self.header + types + envelope.SerializeToString()
        arrays = self.arrays
        if shared:
            arrays = tuple([a for at, a in enumerate(arrays) if at not in shared])
        pieces = _pieces(LENGTH.pack(len(text)) + text, arrays)
        return Encoded(pieces, sum(map(len, pieces)))


def _pieces(head: bytes, arrays: Sequence[Tensor]) -> tuple[Buffer, ...]:
    """Returns the bytes of a frame: neighbours that are small in one piece."""
    pieces: list[Buffer] = []
    together = [head]
    for array in arrays:
        # A copy of few bytes takes a fifth of the time of a view of them.
        if array.nbytes <= TOGETHER_BYTES:
            together.append(array.tobytes())
            continue
        if together:
            pieces.append(b"".join(together))
            together = []
        pieces.append(flat_bytes(array).data)
    if together:
        pieces.append(b"".join(together))
    return tuple(pieces)


def _placed(types: bytes, shared: Mapping[int, pb.SharedBlock]) -> bytes:
    """Returns the types of tensors with where some of them are."""
    frame = pb.Frame.FromString(types)
    for at, block in shared.items():
        frame.tensors[at].shared.CopyFrom(block)
    return frame.SerializeToString()


def prepare(frame: Frame, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> Prepared:
    """Checks a frame, and makes all ready but its number and its tensors' place.

    The arrays must not change until they are sent. Arrays that are not C-contiguous
    little-endian are copied.

    Args:
      frame: header and tensors; the header is not changed.
      max_frame_bytes: the limit of the receiver.

    Raises:
      MalformedMessageError: a tensor of a dtype or rank that cannot travel.
      MessageTooLargeError: more than ``max_frame_bytes``.
    """
    arrays = tuple([_sendable(i, t) for i, t in enumerate(frame.tensors)])
    types = _types_of(tuple([(a.dtype, a.shape) for a in arrays]))
    header = frame.header
    if header.tensors or header.sequence or header.method or header.every_reply:
        header = pb.Frame()
        header.CopyFrom(frame.header)
        for field in ("tensors", "sequence", "method", "every_reply"):
            header.ClearField(field)
    text = header.SerializeToString()
    header_bytes = len(text) + len(types) + NUMBER_BYTES
    if header_bytes + HANDLE_BYTES * len(arrays) > MAX_HEADER_BYTES:
        raise MessageTooLargeError(too_large("header", header_bytes, MAX_HEADER_BYTES))
    nbytes = LENGTH.size + header_bytes + sum([a.nbytes for a in arrays])
    if nbytes > max_frame_bytes:
        raise MessageTooLargeError(too_large("frame", nbytes, max_frame_bytes))
    return Prepared(text, types, arrays, nbytes, values_of(frame))


@functools.lru_cache(4096)
def _types_of(kinds: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]) -> bytes:
    """Returns the part of a header that says what the tensors are."""
    # The same for each step of a program, and slow to make anew.
    named = [pb.TensorType(dtype=_NAMES[dtype], shape=shape) for dtype, shape in kinds]
    return pb.Frame(tensors=named).SerializeToString()


def values_of(frame: Frame) -> tuple[str, int] | None:
    """Returns the step of which a frame carries values alone; None if there is none."""
    if frame.header.WhichOneof("body") != "values":
        return None
    values = frame.header.values
    step = values.handle, values.step_id
    start = values.start
    begins_another = values.HasField("start") and step != (start.handle, start.step_id)
    is_alone = not (begins_another or values.HasField("done") or values.more)
    return step if is_alone else None


def encode(
    frame: Frame, *, sequence: int = 0, max_frame_bytes: int = MAX_FRAME_BYTES
) -> Encoded:
    """Returns the bytes of a frame, all for the stream; see ``prepare``.

    Example:
      >>> from jgraph.rpc.frames import frame
      >>> encode(frame(empty=pb.Empty(), tensors=[np.zeros((2, 3), "float32")])).nbytes
      46
    """
    prepared = prepare(frame, max_frame_bytes=max_frame_bytes)
    return prepared.encoded(sequence=sequence)


def flat_bytes(array: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Returns the bytes of a C-order array, not copied."""
    # numpy gives no memoryview of ml_dtypes or of empty arrays, hence uint8 in 1-d.
    return array.reshape(-1).view(np.uint8)


def too_large(what: str, nbytes: int, limit: int) -> str:
    """Returns the message about something over its limit."""
    return (
        f"a {what} of {nbytes:,} bytes is over the limit of {limit:,} bytes; let less "
        "travel at once: a smaller batch, or jg.fixed_size_partitioner for a variable"
    )


def _sendable(index: int, tensor: Tensor) -> Tensor:
    array = np.asarray(tensor)
    if array.flags.c_contiguous and array.dtype in _NAMES and array.ndim <= MAX_NDIM:
        return array  # nearly always
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype not in _NAMES:
        raise MalformedMessageError(
            f"tensor {index} has dtype '{array.dtype}', which cannot be sent; allowed "
            f"are booleans and the number types of numpy and ml_dtypes"
        )
    if array.ndim > MAX_NDIM:
        raise MalformedMessageError(
            f"tensor {index} has {array.ndim} dimensions; at most {MAX_NDIM} can be "
            f"sent"
        )
    return np.asarray(array, order="C")


class Packer:
    """Cuts pieces into chunks; small ones share a chunk.

    Each byte is copied once: gRPC takes only ``bytes``.

    Example:
      >>> packer = Packer(4)
      >>> list(packer.add(b"ab")), list(packer.add(b"cde")), packer.rest()
      ([], [b'abcd'], b'e')
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._parts: list[Buffer] = []
        self._room = chunk_bytes

    def add(self, piece: Buffer) -> Iterable[bytes]:
        """Gives the chunks that the piece fills; cut when they are asked for."""
        if len(piece) >= self._room:  # of bytes, or of a view of bytes
            return self._filled(memoryview(piece))
        self._parts.append(piece)
        self._room -= len(piece)
        return ()

    def _filled(self, view: memoryview) -> Iterator[bytes]:
        while view:
            part = view[: self._room]
            view = view[len(part) :]
            self._parts.append(part)
            self._room -= len(part)
            if not self._room:
                yield self.rest()

    def rest(self) -> bytes:
        """Returns the last chunk, which is not full; it may be empty."""
        chunk = b"".join(self._parts)
        self._parts, self._room = [], self._chunk_bytes
        return chunk


def pack(pieces: Iterable[Buffer], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yields chunks of ``chunk_bytes`` (the last may be shorter) with all the pieces.

    Example:
      >>> list(pack([b"ab", b"cde", b"f"], 4))
      [b'abcd', b'ef']
    """
    packer = Packer(chunk_bytes)
    for piece in pieces:
        yield from packer.add(piece)
    if rest := packer.rest():
        yield rest


def aligned_empty(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Returns fresh memory; from 1 KiB on it begins at a multiple of 64 bytes."""
    if nbytes < _SMALL_BYTES:
        return np.empty(nbytes, np.uint8)
    try:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise MessageTooLargeError(
            f"no memory for a tensor of {nbytes:,} bytes on the receiving task"
        ) from error
    offset = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[offset : offset + nbytes]


def aligned_copy(tensor: Tensor) -> Tensor:
    """Returns a writable, aligned, C-order copy of native byte order."""
    array = _sendable(0, tensor)
    buffer = aligned_empty(array.nbytes)
    buffer[:] = flat_bytes(array)
    return buffer.view(array.dtype).reshape(array.shape)


def check_type(type_: pb.TensorType, *where: object) -> Kind:
    """Returns (dtype, bytes, shape) of a tensor's type; allocates nothing.

    Args:
      type_: the type.
      *where: words for what has it, for the message.

    Raises:
      MalformedMessageError: the dtype is not allowed or the shape cannot be.
    """
    try:
        return _kind_of(type_.dtype, tuple(type_.shape))
    except ValueError as error:
        what = " ".join(map(str, where))
        raise MalformedMessageError(f"{what} has {error}") from None


@functools.lru_cache(4096)
def _kind_of(name: str, shape: tuple[int, ...]) -> Kind:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ValueError(
            f"dtype '{name[:40]}', which is not allowed; allowed are booleans and the "
            "number types of numpy and ml_dtypes"
        )
    if len(shape) > MAX_NDIM:
        raise ValueError(f"{len(shape)} dimensions; at most {MAX_NDIM} are allowed")
    # Without the zeros: numpy refuses (0, 2**62, 2**62) although it has no bytes.
    extent = math.prod(max(n, 1) for n in shape) * dtype.itemsize
    if any(n < 0 for n in shape) or extent >= 1 << 63:
        raise ValueError(f"shape {list(shape)}, not allowed")
    return dtype, math.prod(shape) * dtype.itemsize, shape
