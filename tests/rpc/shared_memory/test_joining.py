"""Arrays that came through shared memory as parts are mapped as one, and not copied."""

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.rpc.shared_memory.joining import Joins
from jgraph.rpc.shared_memory.lending import fill
from jgraph.rpc.shared_memory.memory_blocks import PAGE_BYTES, Budget
from jgraph.rpc.shared_memory.shared_memory import ReceiveMemory, SendMemory
from jgraph.rpc.shared_memory.slabs import Slabs

pytestmark = pytest.mark.usefixtures("little_garbage")

Array = np.ndarray[Any, Any]
ROWS = PAGE_BYTES // 16  # of four numbers, in a page


class Peer:
    """A task whose arrays arrive here."""

    def __init__(self) -> None:
        self.memory = SendMemory(Slabs(Budget(1 << 22), slab_bytes=1 << 16))
        self._receiver = ReceiveMemory(self.memory.announcement())

    def send(self, array: Array) -> Array:
        array.flags.writeable = False
        lent = self.memory.lend(array)
        assert lent is not None
        asyncio.run(fill(lent[1], array.reshape(-1).view(np.uint8)))
        arrived = self._receiver.array(lent[0], array.nbytes)
        return arrived.view(array.dtype).reshape(array.shape)


def numbers(rows: int, first: int = 0) -> Array:
    made = np.arange(first, first + 4 * rows, dtype=np.float32).reshape(rows, 4)
    made.flags.writeable = False
    return made


def of_own(nbytes: int = 1 << 22) -> tuple[Slabs, Joins]:
    slabs = Slabs(Budget(nbytes), slab_bytes=1 << 16)
    return slabs, Joins(slabs)


def joined(joins: Joins, *parts: Array) -> Array:
    whole = asyncio.run(joins.join(parts))
    assert whole is not None
    return whole


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_parts_of_others_and_the_own_one_are_one_array() -> None:
    one, other, (slabs, joins) = Peer(), Peer(), of_own()
    parts = [numbers(2 * ROWS), numbers(ROWS, 10_000), numbers(ROWS + 3, 50_000)]
    came = one.send(parts[0]), parts[1], other.send(parts[2])
    whole = joined(joins, *came)
    assert np.array_equal(whole, np.concatenate(parts))
    with pytest.raises(ValueError, match="read-only"):
        whole[0] = 1
    assert slabs.taken == 1 << 16, "the own part alone was copied"
    del whole
    assert joins.collect() == 1


def test_the_same_pages_are_mapped_and_nothing_is_copied() -> None:
    peer, (slabs, joins) = Peer(), of_own()
    first, second = peer.send(numbers(ROWS)), peer.send(numbers(ROWS, 10_000))
    whole = joined(joins, first, second)
    assert slabs.taken == 0
    for loan in peer.memory._loans.values():
        loan.room.view(np.float32)[:] = 7  # which no sender does
    assert (whole.min(), whole.max()) == (7, 7)


def test_a_block_is_not_used_again_while_a_joined_array_is_there() -> None:
    peer, (slabs, joins) = Peer(), of_own()
    own = numbers(ROWS, 10_000)
    whole = joined(joins, peer.send(numbers(ROWS)), own)
    some_rows = whole[3:5]
    del whole
    gc.collect()
    assert (peer.memory.collect(), joins.collect()) == (0, 0)
    assert peer.send(numbers(ROWS, 90_000))[0, 0] == 90_000
    assert some_rows[0, 0] == 12, "nobody wrote over it"
    del some_rows
    assert (peer.memory.collect(), joins.collect()) == (2, 1)
    assert slabs.taken == 1 << 16


def test_the_own_part_is_copied_once_for_all_who_are_sent_it() -> None:
    peer, (slabs, joins) = Peer(), of_own()
    link, own = SendMemory(slabs), numbers(ROWS, 10_000)
    whole = joined(joins, peer.send(numbers(ROWS)), own)
    lent = link.lend(own)
    assert lent is not None
    assert lent[1].is_filled
    del whole
    assert joins.collect() == 1
    other = slabs.take(own.nbytes)
    assert other is not None
    assert other.block != lent[1].block, "who was sent it still has it"
    link.close()


@pytest.mark.parametrize("case", ["no page", "another type", "no rows in order"])
def test_what_does_not_end_at_pages_is_left_to_a_copy(case: str) -> None:
    peer, (_, joins) = Peer(), of_own()
    parts = {
        "no page": [numbers(ROWS + 1), numbers(ROWS)],
        "another type": [numbers(ROWS), numbers(ROWS).view(np.int32)],
        "no rows in order": [numbers(2 * ROWS)[::2], numbers(ROWS)],
    }[case]
    assert asyncio.run(joins.join([peer.send(parts[1]), *parts])) is None
    assert asyncio.run(joins.join(parts)) is None


def test_without_room_there_is_no_array_and_nothing_is_kept() -> None:
    slabs, joins = of_own(nbytes=2 * PAGE_BYTES)
    parts = [numbers(ROWS), numbers(2 * ROWS)]
    assert asyncio.run(joins.join(parts)) is None
    assert joins.collect() == 1
    assert asyncio.run(joins.join([numbers(ROWS), numbers(ROWS)])) is not None
    assert slabs.taken <= 2 * PAGE_BYTES


def test_an_array_outlives_its_senders_and_the_memory_of_its_task() -> None:
    peer, (slabs, joins) = Peer(), of_own()
    whole = joined(joins, peer.send(numbers(ROWS)), numbers(ROWS, 10_000))
    peer.memory.close()
    slabs.close()
    del peer
    gc.collect()
    assert (whole[0, 1], whole[ROWS, 0]) == (1, 10_000)
    del whole
    assert joins.collect() == 1  # of memory that is closed


def test_two_hundred_joins_leave_no_memory_mapping_or_file_behind() -> None:
    peer, (slabs, joins) = Peer(), of_own()

    def some_joins(count: int) -> tuple[int, int, int]:
        for n in range(count):
            came, own = peer.send(numbers(ROWS, 7 * n)), numbers(ROWS, n)
            whole = joined(joins, came, own)
            assert (whole[0, 0], whole[ROWS, 0]) == (7 * n, n)
            del came, own, whole
            peer.memory.collect()
        return slabs.taken, mappings(), len(os.listdir("/proc/self/fd"))

    before = some_joins(10)
    after = some_joins(200)
    assert after[0] == before[0]
    assert after[1] <= before[1] + 3  # the interpreter has its own
    assert after[2] <= before[2]  # what tests before left may be closed now
