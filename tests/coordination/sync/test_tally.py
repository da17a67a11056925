"""Tally of contributions: the same in arrays as one by one, whatever is told."""

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.sync.roster import MOST, Roster, Steps
from jgraph.coordination.sync.tally import Tally
from jgraph.graph.ir import TaskName

SHARDS = [TaskName(f"/job:ps/task:{i}") for i in range(3)]
REPLICAS = 5
ROSTER = Roster("abcde")
FEWER_FIRST = st.sampled_from([0, 99])
"""All in arrays, and all one by one."""


def told_of(
    tally: Tally, shard: TaskName, steps: list[tuple[str, int]], version: int
) -> list[tuple[tuple[str, int], bool]]:
    """Returns what all ps have told of now, and whether at several versions."""
    found = tally.tell(shard, ROSTER.steps(steps), version)
    return [(steps[place], place in found.mixed) for place in found.places]


@given(few=FEWER_FIRST, seed=st.integers(0, 2**32), ends=st.booleans())
def test_a_step_is_there_when_each_ps_has_told_of_it(
    few: int, seed: int, ends: bool
) -> None:
    order = random.Random(seed)
    tally = Tally(SHARDS, REPLICAS, few)
    # What each ps has to tell, in the order of each replica's steps; some never come.
    left: dict[TaskName, dict[str, list[tuple[str, int]]]] = {}
    told: defaultdict[tuple[str, int], dict[TaskName, int]] = defaultdict(dict)
    for shard in SHARDS:
        each = {name: [(name, step) for step in range(6)] for name in "abcde"}
        left[shard] = {
            name: [s for s in steps if ends or order.random() < 0.8]
            for name, steps in each.items()
        }
    there, now = [], []
    while any(steps for of in left.values() for steps in of.values()):
        shard, version = order.choice(SHARDS), order.randrange(2)
        ready = [of for of in left[shard].values() if of]
        steps = [of.pop(0) for of in ready if order.random() < 0.6]
        order.shuffle(steps)
        for step in steps:
            told[step][shard] = version
            if len(told[step]) == len(SHARDS):
                now.append((step, len({*told[step].values()}) > 1))
        found = told_of(tally, shard, steps, version)
        there += found
        assert sorted(there) == sorted(now)
        assert [step for step, _ in found] == [s for s in steps if s in dict(found)]
        if steps and order.random() < 0.1:  # it says so again, which changes nothing
            done = [s for s in steps if s not in dict(now)]
            assert told_of(tally, shard, done, version) == []


@given(few=FEWER_FIRST, first=st.integers(1, 2))
def test_what_a_lost_replica_told_of_counts_for_nothing(few: int, first: int) -> None:
    one, two = SHARDS[:2]
    tally = Tally([one, two], REPLICAS, few)
    assert told_of(tally, one, [("a", first), ("b", 1)], 5) == []
    tally.lose(ROSTER.number("a"))
    assert told_of(tally, two, [("a", 1), ("b", 1)], 5) == [(("b", 1), False)]
    assert told_of(tally, one, [("a", 1)], 6) == [(("a", 1), True)]


@pytest.mark.parametrize("few", [0, 99])
def test_a_ps_that_often_had_only_the_later_of_two_steps_is_counted(few: int) -> None:
    one, two = SHARDS[:2]
    for times in (254, 255, 256):
        tally = Tally([one, two], REPLICAS, few)
        for step in range(0, 2 * times, 2):
            assert told_of(tally, one, [("a", step)], 5) == []
            assert told_of(tally, one, [("a", step + 1)], 5) == []
            found = told_of(tally, two, [("a", step + 1)], 5)
            assert found == [(("a", step + 1), False)]
        assert told_of(tally, two, [("a", 2 * times)], 5) == []
        assert told_of(tally, one, [("a", 2 * times)], 5) == [(("a", 2 * times), False)]


def test_a_task_that_keeps_no_contributions_counts_for_none() -> None:
    tally = Tally(SHARDS[:1], REPLICAS)
    assert told_of(tally, SHARDS[1], [("a", 1)], 5) == []
    assert told_of(tally, SHARDS[0], [("a", 1)], 5) == [(("a", 1), False)]


def test_steps_as_columns_are_the_steps() -> None:
    names = [("b", 7), ("a", 3), ("e", 0)]
    steps = Roster("abcde").steps(names)
    assert steps == tuple(names)
    assert hash(steps) == hash(tuple(names))
    assert steps[1] == ("a", 3)
    assert list(steps[-2:]) == names[-2:]
    assert ROSTER.numbered(steps) is steps  # the same replicas in the same order
    others = Roster("edcba").steps(steps)
    assert others == steps
    assert others.numbers.tolist() == [3, 4, 0]
    assert ROSTER.numbered([("f", 1)]) is ROSTER.numbered([("a", MOST + 1)]) is None
    with pytest.raises(KeyError, match="f"):
        ROSTER.steps([("a", 1), ("f", 1)])
    assert len(Steps(ROSTER, np.empty(0, np.int64), np.empty(0, np.int64))) == 0
