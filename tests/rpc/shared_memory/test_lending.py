"""Large tensors are copied into shared memory whole, and piece by piece."""

import asyncio
import os

import numpy as np
import pytest

from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.shared_memory import lending
from jgraph.rpc.shared_memory.mappings import Bytes
from jgraph.rpc.shared_memory.memory_blocks import Budget
from jgraph.rpc.shared_memory.shared_memory import ReceiveMemory, SendMemory
from jgraph.rpc.shared_memory.slabs import Slabs
from jgraph.rpc.transport import Tensor
from jgraph.rpc.wire.codec import prepare


@pytest.mark.parametrize("nbytes", [40_000, 50_001, 99_999, 100_000, 250_001])
def test_a_tensor_arrives_whole_and_others_run_between_its_pieces(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "COPY_BYTES", 50_000)
    array = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    memory = SendMemory(Slabs(Budget(1 << 20)))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def copied() -> pb.SharedBlock:
        beside = asyncio.create_task(others())
        message = prepare(frame(empty=pb.Empty(), tensors=[array]))
        (handle,) = (await lending.lend(message, memory)).values()
        beside.cancel()
        return handle

    handle = asyncio.run(copied())
    arrived = ReceiveMemory(memory.announcement()).array(handle, nbytes)
    assert np.array_equal(arrived, array)
    assert turns == max(nbytes // 50_000, 1) - 1
    memory.close()


LARGE = np.arange(250_001, dtype=np.uint8)
LARGE.flags.writeable = False


def a_pair(slabs: Slabs) -> tuple[SendMemory, ReceiveMemory]:
    memory = SendMemory(slabs)
    return memory, ReceiveMemory(memory.announcement())


async def lent(array: Tensor, memory: SendMemory) -> pb.SharedBlock:
    message = prepare(frame(empty=pb.Empty(), tensors=[array]))
    (handle,) = (await lending.lend(message, memory)).values()
    return handle


def places(*handles: pb.SharedBlock) -> set[tuple[int, int]]:
    return {(handle.fd, handle.offset) for handle in handles}


def test_what_cannot_change_is_copied_once_for_all_who_are_sent_it_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending, "COPY_BYTES", 50_000)
    copies = list[int]()

    async def copy(target: Bytes, source: Bytes) -> None:
        copies.append(source.size)
        await really(target, source)

    really = lending._copy
    monkeypatch.setattr(lending, "_copy", copy)
    slabs = Slabs(Budget(1 << 20))
    pairs = [a_pair(slabs) for _ in range(4)]

    async def main() -> list[pb.SharedBlock]:
        return await asyncio.gather(*(lent(LARGE, memory) for memory, _ in pairs))

    handles = asyncio.run(main())
    assert len(places(*handles)) == 1
    assert copies == [LARGE.nbytes]
    arrived = [
        r.array(h, LARGE.nbytes) for (_, r), h in zip(pairs, handles, strict=True)
    ]
    assert all(np.array_equal(array, LARGE) for array in arrived)
    with pytest.raises(ValueError, match="read-only"):
        arrived[0][:] = 3
    arrived.pop()
    assert [memory.collect() for memory, _ in pairs] == [0, 0, 0, 1]
    (other,) = places(asyncio.run(lent(LARGE + 1, pairs[0][0])))
    assert other not in places(*handles), "three still look at it"
    arrived.clear()
    assert [memory.collect() for memory, _ in pairs] == [1, 1, 1, 0]
    assert places(asyncio.run(lent(LARGE + 2, pairs[1][0]))) == places(*handles)


def test_what_may_have_changed_since_is_copied_for_each() -> None:
    slabs, array = Slabs(Budget(1 << 20)), np.zeros(100_000, np.uint8)
    (one, at_one), (two, at_two) = a_pair(slabs), a_pair(slabs)
    first = at_one.array(asyncio.run(lent(array, one)), array.nbytes)
    array[:] = 1
    second = at_two.array(asyncio.run(lent(array, two)), array.nbytes)
    assert (first.max(), second.min()) == (0, 1)
    first[:] = 7  # it is the receiver's


def test_who_gives_up_in_the_middle_of_copying_leaves_it_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending, "COPY_BYTES", 50_000)
    slabs = Slabs(Budget(1 << 20))
    (one, _), (two, at_two) = a_pair(slabs), a_pair(slabs)

    async def main() -> pb.SharedBlock:
        first = asyncio.create_task(lent(LARGE, one))
        await asyncio.sleep(0)
        second = asyncio.create_task(lent(LARGE, two))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    handle = asyncio.run(main())
    assert np.array_equal(at_two.array(handle, LARGE.nbytes), LARGE)


def test_a_block_that_a_lost_receiver_may_look_at_is_never_written_again() -> None:
    slabs = Slabs(Budget(1 << 20))
    (one, at_one), (two, at_two) = a_pair(slabs), a_pair(slabs)
    handles = [asyncio.run(lent(LARGE, memory)) for memory in (one, two)]
    assert len(places(*handles)) == 1
    at_lost = at_one.array(handles[0], LARGE.nbytes)
    one.close()
    again = at_two.array(handles[1], LARGE.nbytes)
    taken = slabs.taken
    del again
    assert two.collect() == 1
    assert slabs.taken < taken, "the task has no use for it any more"
    asyncio.run(lent(LARGE + 1, two))
    assert np.array_equal(at_lost, LARGE)
    two.close()
    assert slabs.taken == 0


def test_who_lives_on_reads_new_memory_where_a_file_has_the_number_of_an_old_one() -> (
    None
):
    slabs = Slabs(Budget(1 << 20))
    (one, at_one), (two, at_two) = a_pair(slabs), a_pair(slabs)

    async def main() -> None:
        to_lost, old = [await lent(LARGE, memory) for memory in (one, two)]
        at_lost = at_one.array(to_lost, LARGE.nbytes)
        assert np.array_equal(at_two.array(old, LARGE.nbytes), LARGE)
        one.close()
        two.collect()  # the slab is over
        lower = [os.dup(0)]
        while lower[-1] < old.fd:
            lower.append(os.dup(0))
        os.close(lower.pop())
        new = await lent(LARGE + 1, two)
        for fd in lower:
            os.close(fd)
        assert new.fd == old.fd
        assert np.array_equal(at_two.array(new, LARGE.nbytes), LARGE + 1)
        assert np.array_equal(at_lost, LARGE)
        assert np.array_equal(at_one.array(to_lost, LARGE.nbytes), LARGE)
        with pytest.raises(MalformedMessageError, match="and 1 was announced"):
            at_two.array(old, LARGE.nbytes)

    asyncio.run(main())
    two.close()
