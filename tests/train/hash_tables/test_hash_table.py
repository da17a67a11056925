from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.errors import ConfigError, GraphError
from jgraph.graph.rows.hash_keys import split_keys
from jgraph.graph.rows.hash_spec import Initial
from jgraph.train.hash_tables.hash_table import HashTable
from jgraph.train.trainer import Trainer

KEYS = np.array([2**40, -3, 8], np.int64)
ROWS = np.arange(6.0, dtype=np.float32).reshape(3, 2)


def test_table_of_given_rows_reads_them_and_zeros_for_other_ids() -> None:
    table = HashTable(2, 1 << 20).with_rows(KEYS, ROWS)
    ids = split_keys(np.array([[-3, 5], [2**40, 2**40 + 1]]))
    expected = [[[2.0, 3.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]]
    assert table(ids).tolist() == expected
    assert jax.jit(table.__call__)(ids).tolist() == expected
    assert sorted(table.keys().tolist()) == sorted(KEYS.tolist())


def test_table_with_given_rows_leaves_the_one_it_came_from() -> None:
    table = HashTable(2, 1 << 20)
    table.with_rows(KEYS, ROWS)
    assert table.rows.shape == (1, 2)
    assert table.keys().shape == (0,)


def test_rows_have_gradients() -> None:
    table = HashTable(2, 1 << 20).with_rows(KEYS, ROWS)
    grads: Any = nnx.grad(lambda t: t(jnp.array([8, 8, 77])).sum())(table)
    place = 1 + table.keys().tolist().index(8)  # row 0 is of other ids
    assert grads.rows[...][place].tolist() == [2.0, 2.0]
    assert grads.rows[...][0].tolist() == [1.0, 1.0]


def test_table_is_a_layer_of_a_linen_model_too() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            table = nnx.bridge.to_linen(HashTable, 4, 1 << 20, skip_rng=True)
            return nn.Dense(1)(table(ids))

    ids = jnp.array([[1, 2, 3]])
    variables = Model().init(jax.random.key(0), ids)
    result: Any = Model().apply(variables, ids)
    assert result.shape == (1, 3, 1)


def test_options_are_those_given() -> None:
    table = HashTable(
        4, 1 << 20, initializer=0.5, eviction="ttl", ttl=9, dtype="bfloat16"
    )
    assert (table.options.initial, table.options.ttl) == (Initial(scale=0.5), 9)
    assert str(table(jnp.array([1])).dtype) == "bfloat16"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dim": 0}, "dim=0; a row has 1 value or more"),
        ({"capacity_bytes": 20}, "has 20 bytes for a shard, and one row .* takes"),
        ({"eviction": "fifo"}, "eviction='fifo'; use 'lru'"),
        ({"eviction": "ttl"}, "ttl=0; give ttl"),
        ({"eviction": "ttl", "ttl": 1.5}, "ttl=1.5; give whole updates"),
        ({"dim": 8.5}, "dim=8.5; a row has 1 value or more"),
        ({"capacity_bytes": "1 MB"}, "capacity_bytes='1 MB'; give whole bytes"),
        ({"initializer": nnx.initializers.normal()}, "give a number, or jg.Initial"),
        ({"admission": 2}, r"admission=2; give jg.Admission\(sightings=2\)"),
        ({"dtype": "int32"}, "dtype='int32'; give one of floating point"),
        ({"dtype": "f33"}, "dtype='f33'; give one of floating point"),
    ],
)
def test_table_that_cannot_be_is_refused(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        HashTable(**{"dim": 4, "capacity_bytes": 1 << 20, **options})


def test_trainer_refuses_a_table_whose_rows_it_would_not_train() -> None:
    def loss(table: HashTable, batch: Any) -> Any:
        return (table(batch["ids"]) ** 2).mean()

    trainer = Trainer(HashTable(4, 1 << 20), loss, optax.sgd(0.1))
    ids = np.arange(8, dtype=np.int32)
    with pytest.raises(ConfigError, match="rows is a hash table, which lives on"):
        trainer.fit({"ids": ids}, steps=1, batch_size=4, progress=False)


def test_trainer_refuses_a_table_that_wrt_leaves_out() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.ads = HashTable(4, 1 << 20)
            self.scale = nnx.Param(jnp.ones(4))

    def loss(model: Model, batch: Any) -> Any:
        return (model.ads(batch["ids"]) * model.scale[...]).mean()

    wrt = nnx.All(nnx.Param, nnx.PathContains("scale"))
    trainer = Trainer(Model(), loss, optax.sgd(0.1), wrt=wrt)
    with pytest.raises(
        ConfigError, match="wrt leaves out ads/rows, which is of a hash"
    ):
        trainer.fit({"ids": np.arange(8)}, steps=1, batch_size=4, progress=False)


@pytest.mark.parametrize(
    ("keys", "rows"), [([7, 7], ROWS[:2]), ([7, 8], ROWS), ([7], ROWS[:1, :1])]
)
def test_rows_that_are_not_one_for_each_key_are_refused(keys: Any, rows: Any) -> None:
    with pytest.raises(ConfigError, match="each once, and a row of 2 values for each"):
        HashTable(2, 1 << 20).with_rows(keys, rows)


def test_no_ids_have_no_rows() -> None:
    table = HashTable(2, 1 << 20)
    assert table(split_keys([])).shape == (0, 2)
    assert table(split_keys(np.zeros((3, 0), np.int64))).shape == (3, 0, 2)


def test_float_ids_are_refused() -> None:
    with pytest.raises(GraphError, match="ids of a hash table are float32"):
        HashTable(4, 1 << 20)(jnp.array([1.0]))
