"""Blocks never overlap, and what a receiver may have for ever is not lent again."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from jgraph.rpc.shared_memory.memory_blocks import (
    PAGE_BYTES,
    Block,
    BlockPool,
    Budget,
    FreeList,
    Slots,
)

SIZES = st.integers(1, 40)
# Take that many, or give the n-th taken one back.
ACTIONS = st.lists(st.tuples(st.booleans(), SIZES), max_size=80)


def disjoint(ranges: Sequence[tuple[int, int]]) -> bool:
    found = sorted(ranges)
    return all(a + n <= b for (a, n), (b, _) in pairwise(found) if n)


@given(ACTIONS)
def test_taken_ranges_are_disjoint_and_all_come_back(
    actions: list[tuple[bool, int]],
) -> None:
    free, taken = FreeList(100), list[tuple[int, int]]()
    for takes, n in actions:
        if takes:
            start = free.take(n)
            if start is not None:
                taken.append((start, n))
        elif taken:
            free.give(*taken.pop(n % len(taken)))
        assert disjoint(taken)
        assert all(start >= 0 and start + n <= 100 for start, n in taken)
        assert free.nbytes == 100 - sum(n for _, n in taken)
    for range_ in taken:
        free.give(*range_)
    assert free.take(100) == 0


def grow(pool: BlockPool, nbytes: int) -> Block | None:
    """What the shell does: take, or add a slab and take again."""
    block = pool.take(nbytes)
    if block is None and (size := pool.slab_for(nbytes)):
        pool.add_slab(size)
        block = pool.take(nbytes)
        assert block is not None
    return block


def in_slab(blocks: list[Block], slab: int) -> list[tuple[int, int]]:
    return [(b.offset, b.nbytes) for b in blocks if b.slab == slab]


@given(ACTIONS, st.integers(1, 200), st.sets(st.integers(0, 80)))
def test_lent_blocks_are_disjoint_within_the_budget(
    actions: list[tuple[bool, int]], limit: int, losses: set[int]
) -> None:
    budget = Budget(limit * PAGE_BYTES)
    pool, lent, lost = BlockPool(budget, 30 * PAGE_BYTES), list[Block](), list[Block]()
    over = set[int]()
    for turn, (takes, n) in enumerate(actions):
        if takes:
            block = grow(pool, n * PAGE_BYTES - 1)
            if block is not None:
                assert block.nbytes == n * PAGE_BYTES
                assert block.slab not in {b.slab for b in lost}
                lent.append(block)
        elif lent:
            block = lent.pop(n % len(lent))
            if turn in losses:
                lost.append(block)
            if pool.lose(block) if turn in losses else pool.release(block):
                assert block.slab in {b.slab for b in lost}
                assert block.slab not in over | {b.slab for b in lent}
                over.add(block.slab)
        assert pool.lent == set(lent)
        assert pool.slab_bytes_taken == budget.taken <= budget.limit
        for slab in {b.slab for b in lent}:
            assert disjoint(in_slab(lent, slab))
    pool.close()
    assert budget.taken == 0


@given(st.lists(SIZES, min_size=1, max_size=20))
def test_the_same_traffic_again_takes_no_new_memory(sizes: list[int]) -> None:
    pool = BlockPool(Budget(1 << 30), 64 * PAGE_BYTES)
    taken = set()
    for _ in range(5):
        blocks = [grow(pool, n * PAGE_BYTES) for n in sizes]
        taken.add(pool.slab_bytes_taken)
        for block in blocks:
            assert block is not None
            pool.release(block)
    assert len(taken) == 1


def test_pool_without_room_lends_nothing_and_others_may_take_what_is_left() -> None:
    budget = Budget(10 * PAGE_BYTES)
    first, second = BlockPool(budget, 6 * PAGE_BYTES), BlockPool(budget, 1 << 30)
    assert grow(first, 5 * PAGE_BYTES) is not None
    assert grow(first, 5 * PAGE_BYTES) is None
    assert grow(second, 4 * PAGE_BYTES) is not None
    assert second.slab_for(1) == 0
    first.close()
    assert second.slab_for(1) == 6 * PAGE_BYTES


def test_slab_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="over the budget"):
        BlockPool(Budget(100), 100).add_slab(101)


def test_least_free_slot_is_taken_and_there_are_no_more_than_there_are() -> None:
    slots = Slots(3)
    assert [slots.take() for _ in range(4)] == [0, 1, 2, None]
    slots.give(2)
    slots.give(0)
    assert [slots.take() for _ in range(3)] == [0, 2, None]
    assert slots.used == 3


def test_large_free_ranges_are_taken_and_given_back() -> None:
    pool = BlockPool(budget=Budget(1 << 20), slab_bytes=1 << 20)
    pool.add_slab(pool.slab_for(1))
    block = pool.take(2 * PAGE_BYTES)
    assert block is not None
    assert pool.take_large(2 << 20) == []
    (rest,) = pool.take_large(PAGE_BYTES)
    assert (rest.offset, rest.nbytes) == (2 * PAGE_BYTES, (1 << 20) - 2 * PAGE_BYTES)
    assert pool.take(1) is None, "nothing is free meanwhile"
    pool.give_large([rest])
    pool.release(block)
    assert pool.take(1 << 20) is not None


def test_ranges_of_a_slab_that_is_over_are_given_back_to_nobody() -> None:
    pool = BlockPool(budget=Budget(1 << 20), slab_bytes=1 << 20)
    pool.add_slab(pool.slab_for(1))
    block = pool.take(1)
    assert block is not None
    rest = pool.take_large(PAGE_BYTES)
    assert pool.lose(block)
    pool.give_large(rest)
    assert pool.take(1) is None
    assert pool.slab_bytes_taken == 0


def test_much_memory_is_in_few_slabs_as_each_takes_files() -> None:
    pool = BlockPool(Budget(8 << 30), 16 << 20)
    blocks = list[Block]()
    while (block := grow(pool, 8 << 20)) is not None:
        blocks.append(block)
    assert len({block.slab for block in blocks}) < 40
    assert sum(block.nbytes for block in blocks) > 0.95 * (8 << 30)
