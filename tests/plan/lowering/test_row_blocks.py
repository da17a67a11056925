"""Initial values made in blocks of rows are those made in one go."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import random as jex_random

from jgraph.graph.variable import Variable
from jgraph.plan.lowering.row_blocks import initial_value

inits = jax.nn.initializers
ROWS, WIDTH, BLOCK = 1009, 7, 1500  # neither is a multiple of anything else


def by_init(init: Any, dtype: Any = jnp.float32) -> Callable[[], Any]:
    return lambda: init(jax.random.key(7), (ROWS, WIDTH), dtype)


def linen_embed() -> Any:
    table = nn.Embed(ROWS, WIDTH)
    return table.init(jax.random.key(0), jnp.zeros(3, jnp.int32))["params"]["embedding"]


def nnx_embed() -> Any:
    return nnx.Embed(ROWS, WIDTH, rngs=nnx.Rngs(3)).embedding[...]


SLICED: dict[str, Callable[[], Any]] = {
    "normal": by_init(inits.normal(0.02)),
    "uniform": by_init(inits.uniform(0.05)),
    "truncated": by_init(inits.truncated_normal(0.1)),
    "lecun": by_init(inits.lecun_normal()),
    "glorot half": by_init(inits.glorot_uniform(), jnp.bfloat16),
    "zeros": by_init(inits.zeros),
    "constant": by_init(inits.constant(0.1)),
    "linen embedding": linen_embed,
    "nnx embedding": nnx_embed,
    "bits": lambda: jax.random.bits(jax.random.key(1), (ROWS, WIDTH), jnp.uint8),
    "transposed": lambda: jax.random.bits(jax.random.key(0), (WIDTH, ROWS)).T,
    "reshaped": lambda: jax.random.bits(jax.random.key(0), (ROWS, 1, WIDTH))[:, 0],
    "every third": lambda: jax.random.bits(jax.random.key(0), (4 * ROWS, 3))[2::3],
    "places": lambda: jnp.arange(ROWS)[:, None] * jnp.arange(WIDTH) + 1,
    "a row each": lambda: jnp.broadcast_to(jnp.arange(40.0), (ROWS, 40)),
    "sorted": lambda: jnp.sort(jax.random.bits(jax.random.key(0), (ROWS, 8)), axis=1),
    "of an array": lambda: jnp.asarray(np.arange(ROWS * 3.0).reshape(-1, 3))[::2] * 2,
    "clipped": lambda: jnp.clip(
        jax.random.uniform(jax.random.key(0), (ROWS, 9)), 0.1, 0.9
    ),
}


def in_one_program(init: Callable[[], Any], block: int) -> tuple[Any, int]:
    seen = []

    def fn() -> Any:
        value, largest = initial_value(init, block)
        seen.append(largest)
        return value

    return np.asarray(jax.jit(fn)()), seen[0]


@pytest.mark.parametrize("name", SLICED)
def test_blocks_are_the_rows_of_the_whole(name: str) -> None:
    init = SLICED[name]
    value, largest = in_one_program(init, BLOCK)
    want = np.asarray(jax.jit(init)())
    assert largest == BLOCK
    np.testing.assert_array_equal(value.view("uint8"), want.view("uint8"))


@pytest.mark.combined
@pytest.mark.parametrize("kind", ["div", "mod"])
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_the_rows_of_the_whole(kind: str, axis: int) -> None:
    init = by_init(inits.uniform(0.02))
    counts = [3 if axis == n else 1 for n in range(2)]
    variable = Variable(
        "w",
        ((ROWS, WIDTH), jnp.float32, lambda *_: init()),
        partitioner=lambda *_: counts,
        partition_strategy=kind,
    )
    assert variable.spec.sharding is not None
    want = np.asarray(jax.jit(init)())
    for number, shard in enumerate(variable.shards):
        assert shard.init is not None
        value, largest = in_one_program(shard.init, 2048)
        index = variable.spec.sharding.index(2, number)
        assert largest == 2048
        np.testing.assert_array_equal(value, want[index])


WHOLE: dict[str, Callable[[], Any]] = {
    "orthogonal": lambda: inits.orthogonal()(jax.random.key(7), (203, WIDTH)),
    "product": lambda: (
        jax.random.uniform(jax.random.key(0), (203, 9)) @ jnp.ones((9, 9))
    ),
    "other generator": lambda: jax.random.bits(
        jax.random.key(0, impl="rbg"), (203, WIDTH)
    ),
    "one row": lambda: jax.random.bits(jax.random.key(0), (1, 2000)),
    "reversed": lambda: jax.random.bits(jax.random.key(0), (203, WIDTH))[::-1],
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_does_not_go_by_rows_is_made_in_one_go(name: str) -> None:
    value, largest = in_one_program(WHOLE[name], 1024)
    want = np.asarray(jax.jit(WHOLE[name])())
    assert largest >= want.nbytes
    np.testing.assert_array_equal(value, want)


def test_bits_that_do_not_count_are_made_in_one_go() -> None:
    with jax.threefry_partitionable(False):
        value, largest = in_one_program(SLICED["uniform"], BLOCK)
        want = np.asarray(jax.jit(SLICED["uniform"])())
    assert largest >= want.nbytes
    np.testing.assert_array_equal(value, want)


def test_scalars_keys_and_given_arrays_are_what_they_are() -> None:
    given = jnp.arange(5000.0)
    assert initial_value(lambda: given, 64) == (given, given.nbytes)
    assert initial_value(lambda: jnp.float32(3), 1)[0] == 3
    keys = jax.random.split(jax.random.key(0), 99)
    again, _ = initial_value(lambda: jax.random.split(jax.random.key(0), 99), 64)
    assert (jax.random.key_data(again) == jax.random.key_data(keys)).all()


def test_arrays_of_more_than_2_to_the_32_elements_count_on() -> None:
    rows, width = 1 << 20, 1 << 13
    taken = slice(rows - 5, rows, 2)
    key = jax.random.key(3)
    value, _ = in_one_program(
        lambda: jax.random.bits(key, (rows, width))[taken], 1 << 15
    )
    places = np.arange(rows - 5, rows, 2)[:, None] * width + np.arange(width)
    halves = np.stack([places >> 32, places & 0xFFFFFFFF]).astype(np.uint32)
    made = jex_random.threefry_2x32(jax.random.key_data(key), jnp.asarray(halves))
    np.testing.assert_array_equal(value, made[0] ^ made[1])


def test_the_program_needs_little_more_than_the_value() -> None:
    init = lambda: jax.random.normal(jax.random.key(0), (1 << 18, 16))
    memory = jax.jit(lambda: initial_value(init, 1 << 18)[0]).lower().compile()
    analysis: Any = memory.memory_analysis()
    size = 16 << 20
    assert analysis.output_size_in_bytes == size
    assert analysis.temp_size_in_bytes < size / 8
