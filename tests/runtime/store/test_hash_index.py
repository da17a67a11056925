import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.graph.rows.hash_keys import Keys, hash_keys, shard_of
from jgraph.runtime.store.hash_index import ABSENT, HashIndex

ANY_KEY = st.integers(-(2**63), 2**63 - 1)
FEW_KEYS = st.integers(-20, 20)


def ints(keys: list[int]) -> Keys:
    return np.array(keys, np.int64)


def colliding(count: int, bits: int = 10) -> Keys:
    """Keys of which every one wants the same slot at first."""
    keys = np.arange(count << (bits + 1), dtype=np.int64)
    same: Keys = keys[hash_keys(keys) & np.uint64((1 << bits) - 1) == 0]
    return same[:count]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(FEW_KEYS | ANY_KEY, max_size=40)), max_size=12
    )
)
def test_behaves_like_a_dict_of_keys(steps: list[tuple[bool, list[int]]]) -> None:
    index, model = HashIndex(1000), dict[int, int]()
    for adds, keys in steps:
        if adds:
            new = [k for k in dict.fromkeys(keys) if k not in model]
            model.update(zip(new, index.insert(ints(new)).tolist(), strict=True))
        else:
            gone = [k for k in dict.fromkeys(keys) if k in model]
            index.remove(np.array([model.pop(k) for k in gone], np.int32))
        assert index.find(ints(keys)).tolist() == [model.get(k, ABSENT) for k in keys]
        assert len(index) == len(model) == len(set(model.values()))
    everything = list(model)
    assert index.find(ints(everything)).tolist() == list(model.values())
    rows = np.array(list(model.values()), np.int32)
    assert index.keys_of(rows).tolist() == everything


def test_keys_that_all_want_one_slot_are_told_apart() -> None:
    keys = colliding(300)
    index = HashIndex(len(keys))
    rows = index.insert(keys[:200])
    index.remove(rows[::2])
    index.insert(keys[200:])
    assert (index.find(keys[1:200:2]) == rows[1::2]).all()
    assert (index.find(keys[:200:2]) == ABSENT).all()
    assert (index.find(keys[200:]) >= 0).all()


def test_rows_of_removed_keys_are_given_out_before_new_ones() -> None:
    index = HashIndex(6)
    index.insert(ints([1, 2, 3, 4]))
    index.remove(np.array([1, 2], np.int32))
    assert sorted(index.insert(ints([5, 6, 7])).tolist()) == [1, 2, 4]
    assert index.high == 5
    assert index.room == 1


def test_coming_and_going_for_ever_does_not_grow_the_index() -> None:
    index = HashIndex(100)
    before = None
    for turn in range(300):
        rows = index.insert(np.arange(100, dtype=np.int64) + 100 * turn)
        before = before or index._slots.nbytes
        index.remove(rows)
    assert index._slots.nbytes == before
    assert index.high == 100
    assert (index.find(np.arange(30_000, dtype=np.int64)) == ABSENT).all()


def test_memory_of_a_growing_index_is_within_what_was_said() -> None:
    index = HashIndex(100_000)
    for start in range(0, 100_000, 7_000):
        size = min(start + 7_000, 100_000)
        index.insert(np.arange(start, size, dtype=np.int64))
        assert index._slots.nbytes + 8 * index.high <= HashIndex.nbytes_for(size)


def test_index_of_one_key_works() -> None:
    index = HashIndex(1)
    for key in (0, -1, 2**63 - 1):
        rows = index.insert(ints([key]))
        assert index.find(ints([key, 17])).tolist() == [0, ABSENT]
        index.remove(rows)
        assert index.find(ints([key])).tolist() == [ABSENT]


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_consecutive_keys_spread_evenly_over_shards(shards: int) -> None:
    keys = np.arange(-50_000, 50_000, dtype=np.int64)
    sizes = np.bincount(shard_of(keys, shards), minlength=shards)
    assert len(sizes) == shards
    assert sizes.min() > 0.95 * len(keys) / shards


def test_keys_of_one_shard_still_spread_over_its_slots() -> None:
    keys = np.arange(100_000, dtype=np.int64)
    mine = keys[shard_of(keys, 8) == 3]
    slots = np.bincount((hash_keys(mine) & np.uint64(1023)).astype(np.int64))
    assert slots.max() < 2.5 * len(mine) / 1024
