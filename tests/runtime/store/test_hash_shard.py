from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.errors import ConfigError, MalformedMessageError
from jgraph.graph.rows.hash_keys import Keys, shard_of
from jgraph.graph.rows.hash_spec import Admission, Column, Eviction, HashSpec, Initial
from jgraph.runtime.store.hash_policy import nbytes_for, rows_within
from jgraph.runtime.store.hash_rows import initial_rows
from jgraph.runtime.store.hash_shard import HashShard, reshard

COLUMNS = (
    Column("rows", 3, initial=Initial("normal", 0.1, seed=1)),
    Column("accumulator", 3, initial=Initial(scale=0.5)),
    Column("count", 0, "int32"),
)
BATCHES = st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=6), max_size=15)
Arrays = tuple[np.ndarray[Any, Any], ...]


def shard_for(rows: int, **policy: Any) -> HashShard:
    """A shard with room for exactly ``rows`` rows."""
    spec = HashSpec("ads", COLUMNS, 1 << 30, **policy)
    size = nbytes_for(spec, rows)
    shard = HashShard(HashSpec("ads", COLUMNS, size, **policy))
    assert shard.capacity == rows
    return shard


def ints(*keys: int) -> Keys:
    return np.array(keys, np.int64)


def train(rows: Any, accumulator: Any, count: Any) -> Arrays:
    return rows + 1, accumulator * 2, count + 1


def keys_in(shard: HashShard) -> list[int]:
    keys: list[int] = shard.state()["keys"].tolist()
    return keys


@settings(max_examples=100, deadline=None)
@given(BATCHES)
def test_shard_with_room_behaves_like_a_dict_of_rows(batches: list[list[int]]) -> None:
    shard, model = shard_for(100), dict[int, Arrays]()
    for batch in batches:
        keys = ints(*batch)
        looked_up = shard.lookup(keys)
        for key, row in zip(batch, looked_up, strict=True):
            new = tuple(initial_rows(ints(key), column)[0] for column in COLUMNS)
            np.testing.assert_array_equal(row, model.setdefault(key, new)[0])
        once = sorted(set(batch))
        shard.update(ints(*once), train)
        model.update({key: train(*model[key]) for key in once})
    state = shard.state()
    assert state["keys"].tolist() == sorted(model)
    for number, column in enumerate(COLUMNS):
        for key, row in zip(sorted(model), state[column.name], strict=True):
            np.testing.assert_array_equal(row, model[key][number])


@settings(max_examples=100, deadline=None)
@given(BATCHES, st.sampled_from(["lru", "lfu", "ttl"]))
def test_shard_without_room_gives_up_the_right_rows(
    batches: list[list[int]], eviction: Eviction
) -> None:
    ttl = 3 if eviction == "ttl" else 0
    shard = shard_for(5, eviction=eviction, ttl=ttl)
    used, uses = dict[int, int](), dict[int, int]()
    for now, batch in enumerate(batches):
        shard.lookup(ints(*batch))
        left = set(keys_in(shard))
        assert len(left) <= 5
        for key in set(batch) & left:
            used[key] = now
            uses[key] = uses.get(key, 0) + 1
        gone = {key for key in used if key not in left}
        score = {key: (uses[key], used[key]) for key in used}
        if eviction == "lru":
            score = {key: (0, used[key]) for key in used}
        stayed = [score[key] for key in left if used[key] < now]
        if eviction == "ttl":
            assert all(now - used[key] > ttl for key in gone)
        elif gone and stayed:
            assert max(score[key] for key in gone) <= min(stayed)
        # What is in use stays, and nothing is refused while something could go.
        refused = set(batch) - left
        assert not refused or eviction == "ttl" or all(used[k] == now for k in left)
        for key in gone:
            del used[key], uses[key]
        shard.update(ints(), train)


def test_slots_go_with_their_row_and_a_returning_key_starts_anew() -> None:
    shard = shard_for(1)
    shard.lookup(ints(7))
    shard.update(ints(7), train)
    shard.lookup(ints(8))
    shard.update(ints(8), train)
    first = initial_rows(ints(7), COLUMNS[0])
    np.testing.assert_array_equal(shard.lookup(ints(7)), first)
    state = shard.state()
    assert state["accumulator"].tolist() == [[0.5, 0.5, 0.5]]
    assert state["count"].tolist() == [0]
    assert (shard.counts.evicted, shard.counts.admitted) == (2, 3)


def test_update_of_a_key_that_was_evicted_meanwhile_is_dropped_and_counted() -> None:
    shard = shard_for(2)
    shard.lookup(ints(1, 2))
    shard.update(ints(2), train)
    shard.lookup(ints(3))  # in place of 1 or 2
    (gone,) = {1, 2} - set(keys_in(shard))
    shard.update(ints(gone, 3), train)
    state = shard.state()
    assert gone not in state["keys"]
    assert state["count"][state["keys"] == 3].tolist() == [1]
    assert shard.counts.dropped == 1


def test_rows_with_a_gradient_under_way_stay_and_new_keys_are_refused() -> None:
    shard = shard_for(2)
    shard.lookup(ints(1, 2))
    row = shard.lookup(ints(3))
    np.testing.assert_array_equal(row, initial_rows(ints(3), COLUMNS[0]))
    assert keys_in(shard) == [1, 2]
    assert (shard.counts.refused, shard.counts.evicted) == (1, 0)


def test_batch_with_more_keys_than_room_keeps_as_many_as_fit() -> None:
    shard = shard_for(3)
    assert shard.lookup(np.arange(10, dtype=np.int64)).shape == (10, 3)
    assert (len(shard), shard.counts.refused) == (3, 7)


def test_rows_over_their_time_to_live_expire() -> None:
    shard = shard_for(10, eviction="ttl", ttl=8)
    shard.lookup(ints(1, 2))
    for _ in range(8 + 8 // 4):  # it looks four times in that time
        shard.lookup(ints(2))
        shard.update(ints(2), train)
    shard.lookup(ints(2))
    assert keys_in(shard) == [2]
    assert shard.counts.expired == 1


def test_a_peek_changes_nothing_and_unknown_keys_read_the_mean_of_new_rows() -> None:
    shard = shard_for(10, admission=Admission(sightings=2), eviction="lfu")
    shard.lookup(ints(1))
    before = shard.lookup(ints(1))
    state, counts = shard.state(), replace(shard.counts)
    for _ in range(5):
        out = np.empty((2, 3), np.float32)
        shard.peek(0, ints(1, 2), out)
        np.testing.assert_array_equal(out[:1], before)
        assert out[1].tolist() == [0, 0, 0]
    assert shard.counts == counts
    for name, values in shard.state().items():
        np.testing.assert_array_equal(values, state[name])
    shard.lookup(ints(2))  # its first sight
    assert keys_in(shard) == [1]


def test_key_that_is_not_admitted_reads_what_it_will_start_with() -> None:
    shard = shard_for(10, admission=Admission(sightings=2))
    declined = shard.lookup(ints(5))
    assert (len(shard), shard.counts.declined) == (0, 1)
    np.testing.assert_array_equal(shard.lookup(ints(5)), declined)
    assert len(shard) == 1


def test_key_twice_in_a_batch_is_seen_once() -> None:
    shard = shard_for(10, admission=Admission(sightings=2))
    shard.lookup(ints(5, 5, 5))
    assert len(shard) == 0
    rows = shard.lookup(ints(5, 6, 5))
    np.testing.assert_array_equal(rows[0], rows[2])
    assert keys_in(shard) == [5]


def test_failing_update_changes_nothing() -> None:
    shard = shard_for(10)
    before = shard.lookup(ints(1))

    def fail(*columns: Any) -> Arrays:
        columns[0][:] = 7
        raise FloatingPointError

    with pytest.raises(FloatingPointError):
        shard.update(ints(1), fail)
    np.testing.assert_array_equal(shard.lookup(ints(1)), before)
    assert shard.version == 1


def test_update_gives_what_was_computed_beside_the_rows() -> None:
    shard = shard_for(10)
    shard.lookup(ints(1))
    assert shard.update(ints(1), lambda *old: [*train(*old), "norm"]) == ["norm"]


@pytest.mark.parametrize("policy", [{}, {"eviction": "lfu"}])
def test_restored_shard_goes_on_as_if_nothing_had_happened(policy: Any) -> None:
    def go_on(shard: HashShard) -> list[int]:
        for key in range(20, 25):
            shard.lookup(ints(key, 3))
            shard.update(ints(key), train)
        return keys_in(shard)

    shard, copy = shard_for(8, **policy), shard_for(8, **policy)
    for key in [1, 2, 3, 1, 4, 5, 1, 6]:
        shard.lookup(ints(key))
        shard.update(ints(key), train)
    copy.lookup(ints(99))
    copy.restore(shard.state())
    for name, values in shard.state().items():
        np.testing.assert_array_equal(copy.state()[name], values)
    assert go_on(copy) == go_on(shard)


@given(st.sets(st.integers(-(2**63), 2**63 - 1), max_size=50), st.integers(1, 4))
def test_rows_survive_a_change_of_the_number_of_shards(
    keys: set[int], count: int
) -> None:
    shard = shard_for(60)
    shard.lookup(ints(*keys))
    shard.update(ints(*keys), train)
    parts = reshard([shard.state()], count)
    assert len(parts) == count
    for number, part in enumerate(parts):
        assert (shard_of(part["keys"], count) == number).all()
    (whole,) = reshard(parts, 1)
    for name, values in shard.state().items():
        np.testing.assert_array_equal(whole[name], values)


def test_restoring_more_rows_than_fit_keeps_the_youngest() -> None:
    large, small = shard_for(10), shard_for(3)
    for key in range(10):
        large.lookup(ints(key))
        large.update(ints(key), train)
    small.restore(large.state())
    assert keys_in(small) == [7, 8, 9]
    assert small.counts.evicted == 7


@pytest.mark.parametrize("sightings", [1, 3])
def test_budget_counts_everything_that_is_kept(sightings: int) -> None:
    admission = Admission(sightings=sightings)
    spec = HashSpec("ads", COLUMNS, 200_000, admission, "lfu")
    shard = HashShard(spec)
    keys = np.arange(5_000, dtype=np.int64)
    for _ in range(sightings):
        shard.lookup(keys)
    assert len(shard) == shard.capacity > 2_500
    arrays = [*shard._columns, shard._used, shard._uses]
    arrays += [shard._index._keys, shard._index._slots]
    if shard._gate.sketch is not None:
        arrays.append(shard._gate.sketch._cells)
    kept = sum(array.nbytes for array in arrays)
    assert 0.75 * spec.capacity_bytes < kept <= shard.nbytes <= spec.capacity_bytes


def test_budget_under_one_row_is_refused_with_what_a_row_takes() -> None:
    with pytest.raises(ConfigError, match=r"'ads' has 100 bytes .* takes") as caught:
        HashShard(HashSpec("ads", COLUMNS, 100))
    least = caught.value.details["needed_bytes"]
    assert rows_within(HashSpec("ads", COLUMNS, least)) == 1


def test_budget_beyond_the_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than this host can give"):
        HashShard(HashSpec("ads", (Column("rows", 1 << 20),), 1 << 50))


@pytest.mark.parametrize("ttl", [1, 2, 3])
def test_key_goes_after_as_many_steps_unseen_as_its_time_to_live(ttl: int) -> None:
    shard = shard_for(10, eviction="ttl", ttl=ttl)
    always, once = ints(1), ints(2)
    shard.lookup(once)
    shard.update(once, train)
    for unseen in range(1, ttl + 3):
        shard.lookup(always)
        assert (2 in keys_in(shard)) == (unseen <= ttl)
        shard.update(always, train)
    assert shard.counts.expired == 1


@settings(max_examples=5 * settings().max_examples)
@given(
    st.lists(
        st.tuples(BATCHES, st.booleans(), st.integers(0, 4)), min_size=1, max_size=5
    ),
    BATCHES,
    st.sampled_from(["lru", "lfu", "ttl"]),
    st.sampled_from([Admission(), Admission(2), Admission(probability=0.5)]),
)
def test_a_copy_that_was_made_in_parts_goes_on_as_the_shard_does(
    rounds: list[tuple[list[list[int]], bool, int]],
    after: list[list[int]],
    eviction: Eviction,
    admission: Admission,
) -> None:
    """Keys go and come back between parts: at other rows, and some at none."""
    ttl = 3 if eviction == "ttl" else 0
    shard = shard_for(5, eviction=eviction, ttl=ttl, admission=admission)
    copy = HashShard(shard.spec)

    def train_on(one: HashShard, batches: list[list[int]]) -> None:
        for batch in batches:
            one.lookup(ints(*batch))
            one.update(ints(*sorted(set(batch))), train)

    for number, (batches, restores, rows) in enumerate(rounds):
        train_on(shard, batches)
        if restores:
            shard.restore(shard.state())
        if number == 0:
            shard.mark()
        copy.put_copied(shard.copied(shard.marked[:rows]))
    copy.put_copied(shard.copied(shard.marked))
    copy.put_ends(shard.ends())
    assert len(shard.marked) == 0
    for _ in range(2):
        ours, theirs = copy.state(), shard.state()
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values)
        assert (copy.version, copy.counts) == (shard.version, shard.counts)
        train_on(shard, after)
        train_on(copy, after)


def test_a_copy_has_no_key_that_its_shard_has_given_up_since() -> None:
    shard = shard_for(5, eviction="ttl", ttl=3)
    copy = HashShard(shard.spec)
    shard.lookup(ints(1, 2))
    shard.mark()
    copy.put_copied(shard.copied(shard.marked))
    for _ in range(6):
        shard.lookup(ints(1))
        shard.update(ints(1), train)
    assert keys_in(shard) == [1]
    copy.put_copied(shard.copied(shard.marked))
    copy.put_ends(shard.ends())
    assert keys_in(copy) == [1]
    assert len(copy) == 1


def test_a_copy_of_many_rows_finds_each_of_its_keys() -> None:
    shard = shard_for(20_000)
    copy, chance = HashShard(shard.spec), np.random.default_rng(0)
    shard.mark()
    for _ in range(8):
        shard.lookup(chance.integers(0, 60_000, 4000))
        shard.updated(ints())
        rows = shard.marked
        copy.put_copied(shard.copied(rows[: len(rows) // 2]))
    copy.put_copied(shard.copied(shard.marked))
    copy.put_ends(shard.ends())
    assert shard.counts.evicted > 0
    for name, values in shard.state().items():
        np.testing.assert_array_equal(copy.state()[name], values)
    keys = ints(*range(60_000))
    np.testing.assert_array_equal(copy.take(0, keys), shard.take(0, keys))


@pytest.mark.parametrize("bad", range(5))
def test_rows_that_are_not_of_the_table_are_refused(bad: int) -> None:
    shard, copy = shard_for(10), shard_for(10)
    shard.lookup(ints(1, 2, 3))
    good = shard.copied(np.array([0, 2], np.int32))
    arrays = [*good]
    match bad:
        case 0:
            arrays[0] = np.array([2, 0], np.int32)  # in no order
        case 1:
            arrays[0] = np.array([2, 10], np.int32)  # beyond its rows
        case 2:
            arrays[1] = arrays[1][:1]
        case 3:
            arrays = arrays[:-1]
        case 4:
            arrays[4] = arrays[4].astype(np.float64)
    with pytest.raises(MalformedMessageError, match="another one"):
        copy.put_copied(arrays)
    with pytest.raises(MalformedMessageError, match="another one"):
        copy.put_ends(shard.ends()[:2])
    assert len(copy) == 0
    copy.put_copied(good)
    assert len(copy) == 2
