import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.errors import ConfigError
from jgraph.graph.rows.hash_spec import Admission, Column, HashSpec, Initial
from jgraph.runtime.store.hash_policy import CountSketch, Gate, victims
from jgraph.runtime.store.hash_rows import initial_rows

EXPECTED = [-0.3134161, -0.8715204]
KEYS = np.arange(10_000, dtype=np.int64)
NO_COUNTS = np.zeros(0, np.uint32)


@given(st.lists(st.sets(st.integers(0, 200), max_size=60), max_size=8))
def test_sketch_never_counts_too_few(batches: list[set[int]]) -> None:
    sketch, seen = CountSketch(256), dict.fromkeys(range(201), 0)
    for batch in batches:
        keys = sorted(batch)
        counts = sketch.add(np.array(keys, np.int64))
        for key, count in zip(keys, counts.tolist(), strict=True):
            seen[key] += 1
            assert count >= seen[key]


def test_sketch_of_few_keys_is_exact_and_stops_at_its_limit() -> None:
    sketch = CountSketch(1 << 16)
    for turn in range(1, 300):
        assert (sketch.add(KEYS[:5]) == min(turn, 255)).all()


def test_sketch_forgets_keys_that_were_rare() -> None:
    sketch = CountSketch(1024)
    sketch.add(np.array([-1]))
    sketch.add(np.arange(8 * 1024, dtype=np.int64))  # halves at once
    sketch.add(np.arange(8 * 1024, dtype=np.int64) + 2**40)
    wide = CountSketch(1 << 20)
    wide._cells[:] = 1
    wide._added = 8 << 20
    wide.add(KEYS[:1])
    assert int(wide._cells.max()) == 1  # two sightings became one, one became none
    assert int(wide._cells.min()) == 0


def test_gate_lets_a_key_in_when_it_is_seen_often_enough() -> None:
    gate = Gate(Admission(sightings=3), 1 << 16)
    keys = KEYS[:50]
    assert [bool(gate.admits(keys, now).all()) for now in range(4)] == [
        *(False, False),
        *(True, True),
    ]


def test_gate_with_a_probability_lets_that_share_in_another_one_each_time() -> None:
    gate = Gate(Admission(probability=0.2), 64)
    first, second = gate.admits(KEYS, 0), gate.admits(KEYS, 1)
    assert first.mean() == pytest.approx(0.2, abs=0.02)
    assert (first & second).mean() == pytest.approx(0.04, abs=0.01)
    assert (gate.admits(KEYS, 0) == first).all()


def test_lru_takes_the_rows_unused_for_longest_and_never_those_in_use() -> None:
    used = np.array([5, 0, 3, 9, 4, 9])
    assert sorted(victims(used, NO_COUNTS, 9, 2, "lru").tolist()) == [2, 4]
    assert sorted(victims(used, NO_COUNTS, 9, 10, "lru").tolist()) == [0, 2, 4]


def test_lfu_takes_the_rarest_and_of_equally_rare_ones_the_oldest() -> None:
    used = np.array([5, 1, 3, 4, 0])
    uses = np.array([2, 9, 2, 1, 0], np.uint32)
    assert sorted(victims(used, uses, 9, 2, "lfu").tolist()) == [2, 3]


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_initial_rows_are_a_function_of_seed_and_key(kind: str) -> None:
    column = Column("rows", 5, initial=Initial(kind, 0.1, seed=3))  # type: ignore[arg-type]
    rows = initial_rows(KEYS, column)
    some = KEYS[[70, 3, 70]]
    np.testing.assert_array_equal(initial_rows(some, column), rows[[70, 3, 70]])
    other = Column("rows", 5, initial=Initial(kind, 0.1, seed=4))  # type: ignore[arg-type]
    assert (initial_rows(KEYS, other) != rows).mean() > 0.99


def test_initial_rows_have_the_distribution_asked_for() -> None:
    normal = initial_rows(KEYS, Column("rows", 7, initial=Initial("normal", 0.1)))
    assert normal.mean() == pytest.approx(0, abs=0.002)
    assert normal.std() == pytest.approx(0.1, rel=0.01)
    assert abs(np.corrcoef(normal.T) - np.eye(7)).max() < 0.05
    uniform = initial_rows(KEYS, Column("rows", 4, initial=Initial("uniform", 0.1)))
    assert uniform.std() == pytest.approx(0.2 / 12**0.5, rel=0.02)
    assert abs(uniform).max() <= 0.1
    constant = initial_rows(KEYS[:2], Column("s", 0, "bfloat16", Initial(scale=0.5)))
    assert (constant.shape, str(constant.dtype)) == ((2,), "bfloat16")


def test_initial_rows_are_the_same_in_every_release() -> None:
    """Rows that were never changed are made anew, also from old checkpoints."""
    column = Column("rows", 2, initial=Initial("uniform", 1.0, seed=1))
    row = initial_rows(np.array([42]), column)[0]
    assert row.tolist() == pytest.approx(EXPECTED, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Initial("glorot"), "no initializer 'glorot'"),  # type: ignore[arg-type]
        (lambda: Initial(scale="1"), "scale='1' and seed=0; give"),  # type: ignore[arg-type]
        (lambda: Initial(seed=2**63), "give a number, and a whole one below"),
        (lambda: Admission(sightings=0), "after 0 sightings"),
        (lambda: Admission(sightings=1.5), "after 1.5 sightings"),  # type: ignore[arg-type]
        (lambda: Admission(probability=1.5), "probability 1.5"),
        (lambda: Admission(probability="1"), "probability '1'"),  # type: ignore[arg-type]
        (
            lambda: HashSpec("ads", (Column("rows", 2),), 1000, eviction="fifo"),  # type: ignore[arg-type]
            "'ads' has eviction='fifo'; use 'lru'",
        ),
        (
            lambda: HashSpec("ads", (Column("rows", 2),), 1000, eviction="ttl"),
            "ttl=0; give ttl, more than 0",
        ),
        (
            lambda: HashSpec("ads", (Column("rows", 2),), 1000, ttl=5),
            "eviction='lru' and ttl=5",
        ),
    ],
)
def test_policies_that_cannot_be_are_refused(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=says):
        make()
