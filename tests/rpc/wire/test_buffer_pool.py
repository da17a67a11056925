"""Receive buffers serve again, but never while an array has them."""

import gc
import weakref

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.rpc.wire.buffer_pool import KEPT_FROM_BYTES, BufferPool
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("little_garbage")

N = 1 << 20


def address(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return int(array.ctypes.data)


@given(st.lists(st.tuples(st.integers(1, 3 * N), st.booleans()), max_size=30))
def test_arrays_in_use_never_overlap(actions: list[tuple[int, bool]]) -> None:
    buffers = BufferPool(limit=4 * N)
    used: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
    for nbytes, drops in actions:
        if drops and used:
            del used[nbytes % len(used)]
        array = buffers.take(nbytes)
        assert array.size == nbytes
        assert array.size < 1024 or address(array) % 64 == 0
        used.append(array)
        ends = sorted((address(a), address(a) + a.size) for a in used)
        flat = [end for pair in ends for end in pair]
        assert flat == sorted(flat)
        assert buffers.kept_bytes <= 4 * N
        del array


@pytest.mark.parametrize("nbytes", [N, N - 1, N - 50_000])
def test_buffer_of_about_that_size_serves_again(nbytes: int) -> None:
    buffers = BufferPool()
    first = buffers.take(N)
    where = address(first)
    part = first.view(np.float32)[5:7]
    del first
    assert address(buffers.take(N)) != where
    del part
    assert where in {address(a) for a in [buffers.take(nbytes) for _ in range(3)]}


def test_buffer_is_not_taken_back_while_a_jax_array_has_it() -> None:
    buffers = BufferPool()
    array = buffers.take(N)
    array[:] = 5
    where = address(array)
    on_device = jax.device_put(array)
    assert on_device.unsafe_buffer_pointer() == where
    del array
    gc.collect()
    assert address(buffers.take(N)) != where
    assert int(on_device.min()) == 5
    del on_device
    gc.collect()
    taken = []

    def is_back() -> bool:
        """A thread of XLA that computed with it may let go of it a moment later."""
        taken.append(buffers.take(N))  # and held, or it would come again and again
        return address(taken[-1]) == where

    wait_until(is_back)


def test_no_more_is_kept_than_the_limit() -> None:
    buffers = BufferPool(limit=3 * N)
    arrays = [buffers.take(N) for _ in range(8)]
    del arrays
    buffers.take(N)
    assert 0 < buffers.kept_bytes <= 3 * N


def test_small_memory_is_left_to_the_allocator() -> None:
    buffers = BufferPool()
    buffers.take(KEPT_FROM_BYTES - 1)
    buffers.take(KEPT_FROM_BYTES)
    buffers.take(N)
    assert buffers.kept_bytes == KEPT_FROM_BYTES


def test_buffer_over_the_limit_goes_with_its_last_array() -> None:
    buffers = BufferPool(limit=N)
    array = buffers.take(2 * N)
    memory = weakref.ref(array.base)
    del array
    assert memory() is None
