"""Frames to bytes and back, whatever the chunks; bad bytes are refused."""

import struct
import tracemalloc
from contextlib import suppress
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from jgraph.errors import JGError, MalformedMessageError, MessageTooLargeError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame, Tensor
from jgraph.rpc.wire.codec import (
    CHUNK_BYTES,
    DTYPES,
    TOGETHER_BYTES,
    aligned_empty,
    encode,
    pack,
)
from jgraph.rpc.wire.decoder import Decoder
from tests.support.bad_frames import raw, typed

arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: hnp.arrays(
        np.int8,
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0),
        elements=st.integers(0, 1),
    ).map(lambda a: a.astype(DTYPES[name]))
)
frames = st.builds(
    lambda step_id, tensors: frame(
        start_step=pb.StartStep(handle="h", step_id=step_id), tensors=tensors
    ),
    st.integers(0, 2**64 - 1),
    st.lists(arrays, max_size=4),
)


def to_bytes(*many: Frame) -> bytes:
    return b"".join(pack(piece for f in many for piece in encode(f).pieces))


def decode(*chunks: bytes, max_frame_bytes: int = 1 << 20) -> list[Frame]:
    decoder = Decoder(max_frame_bytes=max_frame_bytes)
    done = [f for chunk in chunks for f in decoder.feed(chunk)]
    decoder.finish()
    return done


def same(ours: Tensor, theirs: Tensor) -> bool:
    return (ours.dtype, ours.shape, ours.tobytes()) == (
        theirs.dtype,
        theirs.shape,
        theirs.tobytes(),
    )


@given(st.lists(frames, max_size=4), st.integers(1, 200), st.randoms())
def test_frames_survive_any_chunks(
    sent: list[Frame], size: int, random: Random
) -> None:
    data = to_bytes(*sent)
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(size))
    chunks = [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    got = decode(*chunks)
    assert [body_of(f) for f in got] == [body_of(f) for f in sent]
    for ours, theirs in zip(sent, got, strict=True):
        assert len(ours.tensors) == len(theirs.tensors)
        assert all(map(same, ours.tensors, theirs.tensors))
        for tensor in theirs.tensors:
            assert tensor.flags.writeable
            together = tensor.nbytes <= TOGETHER_BYTES
            assert tensor.ctypes.data % 64 == 0 or together
            assert tensor.flags.aligned


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_survives_bit_by_bit(name: str) -> None:
    dtype = DTYPES[name]
    ones = np.ones((2, 3), dtype)
    (got,) = decode(to_bytes(frame(empty=pb.Empty(), tensors=[ones, ones[:, 0]])))
    assert same(got.tensors[0], ones)
    assert same(got.tensors[1], ones[:, 0])
    assert np.dtype(getattr(ml_dtypes, name, name)) == dtype


def test_big_endian_arrays_arrive_native() -> None:
    big = np.arange(5, dtype=">f8")
    (got,) = decode(to_bytes(frame(empty=pb.Empty(), tensors=[big])))
    assert got.tensors[0].dtype == np.dtype("float64")
    assert got.tensors[0].tolist() == [0, 1, 2, 3, 4]


def test_encoding_shares_the_memory_of_the_tensor() -> None:
    tensor = np.zeros(TOGETHER_BYTES, np.float32)
    _, piece = encode(frame(empty=pb.Empty(), tensors=[tensor])).pieces
    tensor[0] = 1
    assert bytes(piece[:4]) == np.float32(1).tobytes()


def test_small_neighbours_are_one_piece_and_lie_in_one_memory() -> None:
    small = [np.full(250, n, np.float32) for n in range(300)]
    large = np.ones(TOGETHER_BYTES, np.float32)
    sent = frame(empty=pb.Empty(), tensors=[*small, large, *small])
    assert [len(p) > 250_000 for p in encode(sent).pieces] == [True, False, True]
    (got,) = decode(to_bytes(sent))
    assert all(map(same, got.tensors, sent.tensors))
    memories = {id(tensor.base) for tensor in got.tensors}
    assert len(memories) == 11, "runs of 64 KiB, and one large tensor"


def test_a_tensor_that_is_kept_keeps_little_beside_it() -> None:
    sent = frame(empty=pb.Empty(), tensors=[np.ones(1000)] * 1000)
    (got,) = decode(to_bytes(sent), max_frame_bytes=16 << 20)
    bases = [tensor.base for tensor in got.tensors if tensor.base is not None]
    assert len(bases) == 1000
    assert max(base.nbytes for base in bases) <= 64 << 10


def test_numbers_of_any_size_lie_at_multiples_of_it() -> None:
    kinds = [np.uint8, np.float64, np.int16, np.bool_, np.complex128, np.float16]
    tensors: list[Any] = [np.ones(3, kind) for kind in kinds] * 2
    (got,) = decode(to_bytes(frame(empty=pb.Empty(), tensors=tensors)))
    assert all(map(same, got.tensors, tensors))
    assert all(tensor.flags.aligned for tensor in got.tensors)


def test_header_of_the_sender_is_not_changed() -> None:
    sent = frame(empty=pb.Empty(), tensors=[np.ones(3)])
    before = sent.header.SerializeToString()
    encode(sent, sequence=4)
    assert sent.header.SerializeToString() == before


def test_received_frame_can_be_sent_on() -> None:
    sent = frame(empty=pb.Empty(), tensors=[np.ones(3)])
    decoder = Decoder()
    (once,) = decoder.feed(b"".join(pack(encode(sent, sequence=9).pieces)))
    assert once.header.sequence == 9
    (twice,) = decode(b"".join(pack(encode(once, sequence=2).pieces)))
    assert twice.header.sequence == 2
    assert len(twice.tensors) == 1


def test_small_frames_share_a_chunk_and_large_ones_are_cut() -> None:
    small = encode(frame(empty=pb.Empty())).pieces
    assert len(list(pack([*small] * 1000))) == 1
    large = encode(frame(empty=pb.Empty(), tensors=[np.zeros(3 << 20, np.uint8)]))
    sizes = [len(chunk) for chunk in pack(large.pieces)]
    full = (3 << 20) // CHUNK_BYTES
    assert sizes == [CHUNK_BYTES] * full + [large.nbytes - (3 << 20)]


@pytest.mark.bad_input_row(8)
@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (np.array([object()]), "dtype 'object'"),
        (np.array(["text"]), "dtype '<U4'"),
        (np.zeros(2, [("a", "i4")]), "which cannot be sent"),
        (np.zeros(2, "datetime64[s]"), "datetime64"),
        (np.zeros([1] * 33), "33 dimensions"),
    ],
)
def test_unsendable_tensor_is_named(tensor: Tensor, said: str) -> None:
    with pytest.raises(MalformedMessageError, match=said) as caught:
        encode(frame(empty=pb.Empty(), tensors=[np.ones(1), tensor]))
    assert "tensor 1" in caught.value.message


def test_frame_over_the_limit_is_refused_by_the_sender() -> None:
    with pytest.raises(MessageTooLargeError, match="over the limit of 1,000 bytes"):
        encode(frame(empty=pb.Empty(), tensors=[np.zeros(1000)]), max_frame_bytes=1000)


@pytest.mark.bad_input_row(7, 8)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"random bytes instead of a message", "not a jgraph message: a header of"),
        (struct.pack("<I", 3) + b"\xff\xff\xff", "the header does not parse"),
        (raw(pb.Frame()), "a frame without a body"),
        (typed("float32", [2, -1]), r"tensor 0 has shape \[2, -1\], not allowed"),
        (typed("float32", [-1, 1 << 40]), "not allowed"),
        (typed("int8", [1 << 62, 1 << 62]), "not allowed"),
        (typed("int8", [0, 1 << 62, 1 << 62]), "not allowed"),
        (typed("int8", [1] * 65), "65 dimensions; at most 32"),
        (typed("O", [1]), "dtype 'O', which is not allowed"),
        (typed("V16", [1]), "dtype 'V16'"),
        (typed("<U8", [1]), "dtype '<U8'"),
        (typed("float128", [1]), "dtype 'float128'"),
        (typed("bool", [1], b"\x02"), "tensor 0 is bool with a byte over 1"),
    ],
)
def test_bad_bytes_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(MalformedMessageError, match=said):
        decode(data)


def test_header_of_4_gib_is_refused_at_its_length() -> None:
    with pytest.raises(MalformedMessageError, match="4,294,967,295"):
        decode(b"\xff\xff\xff\xff")


@pytest.mark.bad_input_row(7)
def test_frame_over_the_limit_is_refused_before_memory_is_taken() -> None:
    data = typed("float64", [1 << 40])
    tracemalloc.start()
    with pytest.raises(MessageTooLargeError, match="over the limit"):
        decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_tensor_without_memory_for_it_is_refused() -> None:
    with pytest.raises(MessageTooLargeError, match="no memory"):
        aligned_empty(1 << 60)


@pytest.mark.parametrize("cut", [1, 3, 7, 20, 60])
def test_end_inside_a_frame_is_said(cut: int) -> None:
    data = to_bytes(frame(empty=pb.Empty(), tensors=[np.zeros(10)]))
    with pytest.raises(MalformedMessageError, match="middle of a frame"):
        decode(data[:cut])


def test_decoder_does_not_recover_from_bad_bytes() -> None:
    decoder = Decoder()
    with pytest.raises(MalformedMessageError):
        decoder.feed(b"\xff" * 10)
    with pytest.raises(MalformedMessageError):
        decoder.feed(to_bytes(frame(empty=pb.Empty())))


@given(st.binary(max_size=300), st.integers(1, 50))
def test_random_bytes_give_only_our_errors(data: bytes, size: int) -> None:
    with suppress(JGError):
        decode(*(data[i : i + size] for i in range(0, len(data), size)))


@given(frames, st.data())
def test_mutated_frames_give_only_our_errors(sent: Frame, data: st.DataObject) -> None:
    text = bytearray(to_bytes(sent))
    for _ in range(data.draw(st.integers(1, 5))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    with suppress(JGError):
        decode(bytes(text))
