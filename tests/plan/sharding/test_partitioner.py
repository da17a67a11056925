"""Partitioners: TensorFlow's arithmetic, by its documented rules and examples."""

import math
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

from jgraph.errors import ShardingError
from jgraph.plan.sharding.partitioner import (
    fixed_size_partitioner,
    min_max_variable_partitioner,
    variable_axis_size_partitioner,
)

F32 = jnp.float32


@pytest.mark.parametrize(
    ("shards", "axis", "shape", "expected"),
    [
        (2, 0, (10, 3), [2, 1]),
        (3, 0, (10, 3), [3, 1]),
        (20, 0, (10, 3), [10, 1]),
        (2, 1, (10, 3), [1, 2]),
        (1, 0, (10,), [1]),
        (4, 0, (), []),
        (4, 1, (5,), [1]),
    ],
)
def test_a_fixed_size_is_clamped_to_the_rows(
    shards: int, axis: int, shape: tuple[int, ...], expected: list[int]
) -> None:
    assert fixed_size_partitioner(shards, axis)(shape, F32) == expected


@pytest.mark.parametrize(
    ("limits", "shape", "dtype", "expected"),
    [
        ((4,), (6, 1), F32, [6, 1]),
        ((4, 0, 2), (6, 1), F32, [2, 1]),
        ((1024,), (6, 1), F32, [1, 1]),
        # Rows of 12 bytes: two fit into 32, so ten need five shards.
        ((32,), (10, 3), F32, [5, 1]),
        # A shard has at least one row, also when a row is over the limit.
        ((8,), (10, 3), F32, [10, 1]),
        ((32,), (10, 3), jnp.bfloat16, [2, 1]),
        ((40, 1), (10, 3), F32, [1, 3]),
        ((65536,), (4, 8, 16, 32), F32, [1, 1, 1, 1]),
        ((32768, 3), (4, 8, 16, 32), F32, [1, 1, 1, 2]),
    ],
)
def test_shards_of_a_largest_size_are_as_few_as_possible(
    limits: tuple[int, ...], shape: tuple[int, ...], dtype: Any, expected: list[int]
) -> None:
    assert variable_axis_size_partitioner(*limits)(shape, dtype) == expected


@pytest.mark.parametrize(
    ("limits", "shape", "expected"),
    [
        ((2, 0, 2), (6, 1), [2, 1]),
        ((2, 0, 4), (6, 1), [2, 1]),
        ((10, 0, 4), (6, 1), [6, 1]),
        ((1,), (10_000, 256), [1, 1]),
        ((100,), (1024, 256), [4, 1]),
        # 256 KiB and one row more: rounded up.
        ((100,), (257, 256), [2, 1]),
        ((100,), (10, 3), [1, 1]),
        ((100, 1, 4), (2, 3), [1, 3]),
    ],
)
def test_shards_of_a_smallest_size_are_as_many_as_allowed(
    limits: tuple[int, ...], shape: tuple[int, ...], expected: list[int]
) -> None:
    assert min_max_variable_partitioner(*limits)(shape, F32) == expected


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 2000), st.integers(1, 60))
def test_partitioners_keep_their_limits(
    rows: int, width: int, nbytes: int, limit: int
) -> None:
    shape, row = (rows, width), 4 * width
    assert fixed_size_partitioner(limit)(shape, F32)[0] == min(limit, rows)
    shards = variable_axis_size_partitioner(nbytes)(shape, F32)[0]
    assert math.ceil(rows / shards) * row <= max(nbytes, row)
    shards = min_max_variable_partitioner(limit, 0, nbytes)(shape, F32)[0]
    assert 1 <= shards <= min(limit, rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fixed_size_partitioner(0),
        lambda: fixed_size_partitioner(0, axis=-1),
        lambda: variable_axis_size_partitioner(0),
        lambda: variable_axis_size_partitioner(8, max_shards=0),
        lambda: min_max_variable_partitioner(max_partitions=0),
        lambda: min_max_variable_partitioner(min_slice_size=0),
    ],
)
def test_limits_that_cannot_be_are_refused(make: Any) -> None:
    with pytest.raises(ShardingError):
        make()


@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_negative_axis_counts_from_the_end(axis: int) -> None:
    """As TensorFlow's, which index the list of sizes with it."""
    shape = (4, 6)
    made = [
        fixed_size_partitioner(2, axis),
        variable_axis_size_partitioner(24, axis),
        min_max_variable_partitioner(2, axis, min_slice_size=8),
    ]
    for partitioner in made:
        shards = partitioner(shape, F32)
        if axis == -3:
            assert shards == [1, 1]
        else:
            assert shards[axis] > 1
            assert shards[axis + 1] == 1
