"""What eviction within a step means, against a dict: one shard, several workers."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from jgraph.graph.rows.hash_keys import Keys
from jgraph.graph.rows.hash_spec import Admission, Column, Eviction, HashSpec
from jgraph.runtime.store.hash_policy import nbytes_for
from jgraph.runtime.store.hash_shard import HashShard
from tests.support.hash_eviction import ROOM, TTL, WORKERS, Oracle

AT_ONCE = Admission()
POLICIES = st.sampled_from(["lru", "lfu", "ttl"])
COLUMNS = (Column("rows", 1), Column("count", 0, "int32"))
LOOKUPS = st.tuples(
    st.integers(0, WORKERS - 1), st.lists(st.integers(-7, 7), min_size=1, max_size=4)
)


def shard_of(eviction: Eviction, admission: Admission = AT_ONCE) -> HashShard:
    ttl = TTL if eviction == "ttl" else 0
    spec = HashSpec("ads", COLUMNS, 1 << 20, admission, eviction, ttl)
    shard = HashShard(replace(spec, capacity_bytes=nbytes_for(spec, ROOM)))
    assert shard.capacity == ROOM
    return shard


def train(rows: Any, count: Any) -> tuple[Any, Any]:
    return rows + 1, count + 1


def ints(keys: set[int]) -> Keys:
    return np.array(sorted(keys), np.int64)


def look_up(shard: HashShard, oracle: Oracle, asked: list[int]) -> None:
    found = shard.lookup(np.array(asked, np.int64))
    left = set(shard.state()["keys"].tolist())
    oracle.looked_up(set(asked), left)
    due = [oracle.rows.get(key, 0) for key in asked]
    assert found[:, 0].tolist() == due


def update(shard: HashShard, oracle: Oracle, keys: set[int]) -> None:
    shard.update(ints(keys), train)
    oracle.updated(keys)
    state = shard.state()
    found = dict(zip(state["keys"].tolist(), state["count"].tolist(), strict=True))
    assert found == oracle.rows


def check_counts(shard: HashShard, oracle: Oracle) -> None:
    counts = shard.counts
    for name in ("refused", "evicted", "expired", "dropped"):
        assert getattr(counts, name) == getattr(oracle, name), name


@settings(max_examples=200, deadline=None)
@given(eviction=POLICIES, steps=st.lists(LOOKUPS, max_size=20))
def test_rows_under_a_gradient_may_go_for_the_lookup_of_another_worker(
    eviction: Eviction, steps: list[tuple[int, list[int]]]
) -> None:
    """Asynchronous: a worker looks up again once its gradient is here."""
    shard, oracle = shard_of(eviction), Oracle(eviction)
    under_way = dict[int, set[int]]()
    for worker, asked in steps:
        if worker in under_way:
            update(shard, oracle, under_way.pop(worker))
        look_up(shard, oracle, asked)
        under_way[worker] = set(asked)
    if len({worker for worker, _ in steps}) == 1 and eviction != "ttl":
        assert shard.counts.dropped == shard.counts.refused  # nobody is in between
    check_counts(shard, oracle)


@settings(max_examples=200, deadline=None)
@given(
    eviction=POLICIES,
    updates=st.lists(
        st.tuples(st.lists(LOOKUPS, min_size=1, max_size=3), st.integers(1, 3)),
        max_size=10,
    ),
)
def test_no_row_goes_between_the_lookups_of_an_update_and_the_update(
    eviction: Eviction, updates: list[tuple[list[tuple[int, list[int]]], int]]
) -> None:
    """Synchronous, with backups: all look up, and some count."""
    shard, oracle = shard_of(eviction), Oracle(eviction)
    for lookups, counted in updates:
        refused = oracle.refused
        for _, asked in lookups:
            look_up(shard, oracle, asked)
        asked_for = {key for _, asked in lookups[:counted] for key in asked}
        before = oracle.dropped
        update(shard, oracle, asked_for)
        if oracle.refused == refused:
            assert oracle.dropped == before
    check_counts(shard, oracle)


@settings(max_examples=100, deadline=None)
@given(
    eviction=POLICIES,
    sightings=st.sampled_from([1, 2]),
    probability=st.sampled_from([1.0, 0.5]),
    before=st.lists(LOOKUPS, max_size=12),
    after=st.lists(LOOKUPS, max_size=12),
)
def test_a_copy_of_a_shard_gives_up_the_same_rows(
    eviction: Eviction,
    sightings: int,
    probability: float,
    before: list[tuple[int, list[int]]],
    after: list[tuple[int, list[int]]],
) -> None:
    """As ``durability`` makes one: of rows that are put in order in both."""
    admission = Admission(sightings, probability)
    held, copy = (shard_of(eviction, admission) for _ in range(2))
    for _, asked in before:
        held.lookup(np.array(asked, np.int64))
        held.update(ints(set(asked)), train)
    state = held.state()
    held.restore(state)
    copy.restore(state)
    for _, asked in after:
        for shard in (held, copy):
            shard.lookup(np.array(asked, np.int64))
            shard.update(ints(set(asked)), train)
    for name, values in held.state().items():
        np.testing.assert_array_equal(values, copy.state()[name], err_msg=name)
