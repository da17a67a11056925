"""Memory that two sides map: who may have it, when it is free, what is refused."""

import asyncio
import fcntl
import gc
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import jax
import numpy as np
import pytest

from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.shared_memory.memory_blocks import PAGE_BYTES, Budget
from jgraph.rpc.shared_memory.memory_files import NONCE_BYTES, MemoryFile, map_foreign
from jgraph.rpc.shared_memory.shared_memory import (
    FIRST_SLOT,
    SLOTS,
    ReceiveMemory,
    SendMemory,
    available_memory,
)
from jgraph.rpc.shared_memory.slabs import Slabs
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("little_garbage")
N = 100_000
NONCE = bytes(range(NONCE_BYTES))


def open_files() -> int:
    """How many memory files this process has open or mapped."""
    gc.collect()  # of what other tests left
    return Path("/proc/self/maps").read_text().count("/memfd:jgraph") + sum(
        "/memfd:jgraph" in os.readlink(link)
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    )


@contextmanager
def pair(limit: int = 1 << 20) -> Iterator[tuple[SendMemory, ReceiveMemory]]:
    sender = SendMemory(Slabs(Budget(limit), slab_bytes=limit))
    yield sender, ReceiveMemory(sender.announcement())
    sender.close()


def tensor(nbytes: int = N) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(nbytes, np.uint8)


def send(sender: SendMemory, value: int = 1) -> pb.SharedBlock:
    lent = sender.lend(tensor())
    assert lent is not None
    lent[1].room[:] = value
    return lent[0]


def test_receiver_reads_what_was_written_and_may_write() -> None:
    with pair() as (sender, receiver):
        array = receiver.array(send(sender, 7), N).view(np.float32)
        assert array.view(np.uint8).tolist() == [7] * N
        assert array.ctypes.data % 64 == 0
        array[:] = 3


def test_block_comes_back_when_the_last_view_is_gone() -> None:
    with pair() as (sender, receiver):
        first = send(sender)
        array = receiver.array(first, N)
        part = array.view(np.float32).reshape(-1, 100)[3:5].T
        del array
        assert sender.collect() == 0
        assert send(sender).offset != first.offset
        del part
        assert sender.collect() == 1
        assert send(sender).offset == first.offset


def test_block_is_not_reused_while_a_jax_array_has_it() -> None:
    with pair() as (sender, receiver):
        first = send(sender, 5)
        array = receiver.array(first, N)
        on_device = jax.device_put(array)
        aliases = on_device.unsafe_buffer_pointer() == array.ctypes.data
        del array
        gc.collect()
        assert aliases
        assert sender.collect() == 0
        send(sender, 6)
        assert int(on_device.max()) == 5
        del on_device
        gc.collect()
        wait_until(sender.collect)  # a thread of XLA may not be done with it


def test_pages_of_a_receiver_outlive_the_sender() -> None:
    with pair() as (sender, receiver):
        array = receiver.array(send(sender, 9), N)
        sender.close()
        del sender
        gc.collect()
        assert array.min() == 9
        with pytest.raises(MalformedMessageError, match="cannot be opened"):
            receiver.array(pb.SharedBlock(fd=10**6, offset=PAGE_BYTES), 1)


def test_nothing_is_left_open_when_both_sides_are_gone() -> None:
    before = open_files()
    with pair() as (sender, receiver):
        array = receiver.array(send(sender), N)
        assert open_files() > before
    del sender, receiver, array
    assert open_files() == before


def test_full_memory_lends_nothing_until_a_block_comes_back() -> None:
    with pair(limit=2 * N) as (sender, receiver):
        array = receiver.array(send(sender), N)
        assert sender.lend(tensor()) is None
        del array
        assert sender.lend(tensor()) is not None


def test_full_memory_is_collected_from_all_who_were_lent_of_it() -> None:
    slabs = Slabs(Budget(2 * N), slab_bytes=2 * N)
    idle, busy = SendMemory(slabs), SendMemory(slabs)
    array = ReceiveMemory(idle.announcement()).array(send(idle), N)
    assert busy.lend(tensor()) is None
    del array
    assert busy.lend(tensor()) is not None
    idle.close()
    busy.close()


def test_many_files_are_not_needed_and_slots_are_bounded() -> None:
    with pair(limit=1 << 30) as (sender, _):
        before = open_files()
        assert all(sender.lend(tensor(1)) for _ in range(SLOTS))
        assert sender.lend(tensor(1)) is None
        assert open_files() <= before + 3


SLAB = pb.SharedBlock(offset=PAGE_BYTES)
HOSTILE = {
    "before the first block": (0, 0, N, "at 0 of shared memory"),
    "not aligned": (PAGE_BYTES + 8, 0, N, "a tensor of"),
    "past the end": (PAGE_BYTES, 0, (1 << 20) + 1, "a tensor of"),
    "far past the end": ((1 << 64) - 64, 0, N, "a tensor of"),
    "larger than an address": (PAGE_BYTES, 0, 1 << 63, "a tensor of"),
    "slot past the end": (PAGE_BYTES, SLOTS, N, "slot"),
    "largest slot": (PAGE_BYTES, (1 << 32) - 1, N, "slot"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_handle_outside_the_memory_is_refused(case: str) -> None:
    offset, slot, nbytes, said = HOSTILE[case]
    with pair() as (sender, receiver):
        handle = send(sender)
        handle.offset, handle.slot = offset, slot
        with pytest.raises(MalformedMessageError, match=said):
            receiver.array(handle, nbytes)


def make_memfd(*, seals: int, nbytes: int = PAGE_BYTES, name: str = "jgraph") -> int:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, NONCE[:nbytes], 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
BAD_FILES: dict[str, tuple[Callable[[], int], str]] = {
    "can shrink": (lambda: make_memfd(seals=fcntl.F_SEAL_GROW), "not sealed"),
    "can grow": (lambda: make_memfd(seals=fcntl.F_SEAL_SHRINK), "not sealed"),
    "too small": (lambda: make_memfd(seals=BOTH, nbytes=8), "too small"),
    "empty": (lambda: make_memfd(seals=BOTH, nbytes=0), "too small"),
    "other name": (lambda: make_memfd(seals=BOTH, name="x"), "not shared memory"),
    "a device": (lambda: os.open("/dev/null", os.O_RDWR), "not shared memory"),
    "a pipe": (lambda: os.dup(os.pipe()[0]), "not shared memory"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_file_that_is_not_shared_memory_is_refused(case: str) -> None:
    make, said = BAD_FILES[case]
    fd = make()
    with pytest.raises(MalformedMessageError, match=said):
        map_foreign(os.getpid(), fd, NONCE)
    os.close(fd)


@pytest.mark.parametrize(
    ("pid", "fd"),
    [(2**40, 3), (-1, 3), (0, 3), (1, 0), (os.getpid(), 2**32 - 1)],
    ids=["too large", "negative", "zero", "of another user", "no such file"],
)
def test_process_or_file_out_of_reach_is_said(pid: int, fd: int) -> None:
    with pytest.raises(MalformedMessageError, match=re.escape(f"/proc/{pid}/fd/{fd}")):
        map_foreign(pid, fd, NONCE)


@pytest.mark.parametrize("nonce", [b"", b"\0" * NONCE_BYTES, NONCE[:-1], NONCE + b"x"])
def test_other_nonce_is_refused(nonce: bytes) -> None:
    file = MemoryFile(PAGE_BYTES, NONCE)
    assert map_foreign(os.getpid(), file.fd, NONCE).size == PAGE_BYTES
    with pytest.raises(MalformedMessageError, match="another nonce"):
        map_foreign(os.getpid(), file.fd, nonce)
    file.close()


def test_slab_of_another_sender_is_refused() -> None:
    with pair() as (sender, _), pair() as (_, of_other):
        handle = send(sender)
        with pytest.raises(MalformedMessageError, match="another nonce"):
            of_other.array(handle, N)


@contextmanager
def no_file_left() -> Iterator[None]:
    """All files are open that this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
    taken = [os.dup(0)]
    while taken[-1] <= most:
        taken.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_a_receiver_that_can_open_no_file_takes_what_it_is_sent() -> None:
    """Also of memory that it has not seen before, and more than once."""
    with pair():  # it has mapped memory before
        pass
    senders = [SendMemory(Slabs(Budget(1 << 20), slab_bytes=1 << 20)) for _ in range(3)]
    handles = [send(sender, value) for value, sender in enumerate(senders)]
    before = open_files()
    with no_file_left():
        receivers = [ReceiveMemory(sender.announcement()) for sender in senders]
        taken = [one.array(h, N) for one, h in zip(receivers, handles, strict=True)]
    assert [int(array[N - 1]) for array in taken] == [0, 1, 2]
    assert open_files() == before + 2 * len(senders), "mapped, and not open"
    for sender in senders:
        sender.close()


def test_memory_file_cannot_be_resized() -> None:
    file = MemoryFile(PAGE_BYTES, NONCE)
    for size in (0, 2 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(file.fd, size)
    file.close()


@pytest.mark.parametrize(("limit", "value"), [("NOFILE", 3), ("FSIZE", 4096)])
def test_sender_that_gets_no_file_lends_nothing(limit: str, value: int) -> None:
    """Out of file descriptors, or of room: the tensor goes through the stream."""
    import resource

    kind = getattr(resource, f"RLIMIT_{limit}")
    sender = SendMemory(Slabs(Budget(1 << 20)))
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        assert sender.lend(tensor()) is None
    finally:
        resource.setrlimit(kind, (soft, hard))
    assert sender.lend(tensor()) is not None
    sender.close()


def test_control_memory_has_a_byte_per_slot() -> None:
    assert FIRST_SLOT >= NONCE_BYTES
    assert (FIRST_SLOT + SLOTS) % PAGE_BYTES == 0
    assert available_memory() > 0


def test_what_is_free_is_given_back_to_the_system() -> None:
    slabs = Slabs(Budget(1 << 20), slab_bytes=1 << 20)
    sender = SendMemory(slabs)
    receiver = ReceiveMemory(sender.announcement())
    array = receiver.array(send(sender), N)
    assert asyncio.run(slabs.give_back(least=PAGE_BYTES)) > 0
    assert array.tolist() == [1] * N, "what is lent stays"
    before = _resident()
    del array
    assert asyncio.run(slabs.give_back(least=PAGE_BYTES)) >= N
    assert before - _resident() >= N // PAGE_BYTES
    again = receiver.array(send(sender, 7), N)
    assert again.tolist() == [7] * N
    sender.close()


def test_memory_is_lent_to_nobody_while_it_is_given_back_whoever_waits_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on, whole = Event(), Event(), MemoryFile.give_back

    def slow(file: MemoryFile, start: int, nbytes: int) -> None:
        begun.set()
        goes_on.wait()
        whole(file, start, nbytes)

    monkeypatch.setattr(MemoryFile, "give_back", slow)
    slabs = Slabs(Budget(1 << 21), slab_bytes=1 << 20)
    sender = SendMemory(slabs)
    receiver = ReceiveMemory(sender.announcement())
    receiver.array(send(sender), N)  # and is gone

    async def main() -> None:
        giving = asyncio.create_task(slabs.give_back(least=PAGE_BYTES))
        await asyncio.to_thread(begun.wait)
        giving.cancel()
        await asyncio.wait([giving])
        array = receiver.array(send(sender, 7), N)
        goes_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert array.tolist() == [7] * N

    asyncio.run(main())
    sender.close()


def _resident() -> int:
    """Pages of memory files that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[2])
