"""Transport conformance: posted frames; see ``transport_conformance``."""

import numpy as np

from jgraph.errors import MalformedMessageError
from jgraph.rpc.transport import Tensor
from jgraph.rpc.wire.codec import DTYPES
from jgraph.testing.transport_harness import (
    PS,
    WORKER,
    MakeTransport,
    call,
    expect,
    fail,
    numbers,
    started,
    step,
)


async def frames_arrive_in_order(make: MakeTransport) -> None:
    """Frames of one sender keep their order and say who sent them."""
    async with started(make) as (_, at_ps, worker, _, _):
        for i in range(300):
            worker.post(PS, step(i))
        got = await at_ps.wait_frames(300)
        expect(numbers(got) == list(range(300)), numbers(got))
        expect({src for src, _ in at_ps.frames} == {WORKER}, "wrong sender")


async def both_directions_flow_at_once(make: MakeTransport) -> None:
    """2,000 small frames each way, neither waits for the other."""
    async with started(make) as (ps, at_ps, worker, at_worker, _):
        for i in range(2000):
            worker.post(PS, step(i, np.full(3, i % 100, np.float32)))
            ps.post(WORKER, step(i, np.full(5, i % 100, np.int8)))
        for recorder in (at_ps, at_worker):
            got = await recorder.wait_frames(2000)
            expect(numbers(got) == list(range(2000)), "order lost")
            tensors = [f.tensors[0] for f in got]
            expect(all((t == i % 100).all() for i, t in enumerate(tensors)), "mixed up")


async def large_tensors_arrive(make: MakeTransport) -> None:
    """8 MB beside 3 bytes, between small frames, equal to the bit."""
    large = np.random.default_rng(0).standard_normal((1000, 1000))
    small = np.array([1, 2, 3], np.uint8)
    async with started(make) as (_, at_ps, worker, _, _):
        worker.post(PS, step(0))
        worker.post(PS, step(1, small, large, small))
        worker.post(PS, step(2, large.T))
        got = await at_ps.wait_frames(3)
        expect(numbers(got) == [0, 1, 2], numbers(got))
        for sent, received in zip((small, large, small), got[1].tensors, strict=True):
            np.testing.assert_array_equal(sent, received)
        np.testing.assert_array_equal(large.T, got[2].tensors[0])


async def every_dtype_and_layout_survives(make: MakeTransport) -> None:
    """All dtypes; 0-d, empty, transposed, strided and big-endian arrays."""
    bits = np.arange(24).reshape(2, 3, 4) % 2
    arrays = [bits.astype(dtype) for dtype in DTYPES.values()]
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    layouts: list[Tensor] = [
        np.full((), 7, np.float32),
        np.zeros((0, 5)),
        base.T,
        base[::2, ::-3],
    ]
    swapped: list[Tensor] = [
        base.astype(">f4"),
        np.arange(3, dtype=">i8"),
        np.zeros((), ">c8"),
    ]
    sent = [*arrays, *layouts, *swapped]
    async with started(make) as (_, at_ps, worker, _, _):
        worker.post(PS, step(0, *sent))
        (got,) = await at_ps.wait_frames(1)
        for theirs, ours in zip(got.tensors, sent, strict=True):
            native = ours.astype(ours.dtype.newbyteorder("="))
            expect(theirs.dtype == native.dtype, f"{ours.dtype} came as {theirs.dtype}")
            expect(theirs.shape == ours.shape, f"{ours.shape} came as {theirs.shape}")
            expect(theirs.tobytes() == native.tobytes(), f"{ours.dtype} changed")


async def received_tensors_are_aligned_and_owned(make: MakeTransport) -> None:
    """The receiver may write, and no one else sees it."""
    sent = [np.ones(n, np.float32) for n in (1, 7, 100_000)]
    async with started(make) as (ps, at_ps, worker, at_worker, address):
        worker.post(PS, step(0, *sent))
        ps.post(WORKER, step(0, *sent))
        (posted,), (also,) = await at_ps.wait_frames(1), await at_worker.wait_frames(1)
        (echo,) = await call(worker, address, "Echo", step(0, *sent))
        for tensor in (*posted.tensors, *also.tensors, *echo.tensors):
            aligned = tensor.nbytes < 1024 or tensor.ctypes.data % 64 == 0
            expect(aligned, "not aligned to 64 bytes")
            expect(bool((tensor == 1).all()), "another receiver wrote into this one")
            tensor[:] = 5
        expect(all(bool((t == 1).all()) for t in sent), "the sender's array changed")


async def unsendable_tensor_is_refused_at_post(make: MakeTransport) -> None:
    """The sender gets the error itself; later frames are not affected."""
    async with started(make) as (_, at_ps, worker, _, _):
        try:
            worker.post(PS, step(0, np.array([object()])))
        except MalformedMessageError:
            pass
        else:
            fail("an array of objects was accepted")
        worker.post(PS, step(1))
        expect(numbers(await at_ps.wait_frames(1)) == [1], "frame after it is missing")
