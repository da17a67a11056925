"""Bags of ids against sums written out by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.errors import ConfigError, RowIdError
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.step.train_step import TrainStep
from jgraph.train.tables.bags import embedding_bag
from jgraph.train.trainer import Trainer
from tests.support.row_tables import ROWS, Table, trained

IDS = np.array([[3, 5, 3], [7, -1, -1], [-1, -1, -1], [9, 2, 0]], np.int32)
WEIGHTS = np.array([[1, 2, 0], [3, 1, 1], [1, 1, 1], [0.5, 1, 2]], np.float32)
TABLE = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)


def by_hand(table: Any, combiner: str) -> Any:
    out = np.zeros((4, 4))
    for n, (ids, weights) in enumerate(zip(IDS, WEIGHTS, strict=True)):
        pairs = [(i, w) for i, w in zip(ids, weights, strict=True) if i >= 0 and w]
        if pairs:
            used = np.array([w for _, w in pairs])
            scale = {"sum": 1, "mean": used.sum(), "sqrtn": np.sqrt((used**2).sum())}
            out[n] = sum(w * table[i] for i, w in pairs) / scale[combiner]
    return out


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_are_sums_over_their_ids(combiner: Any) -> None:
    have = jax.jit(embedding_bag, static_argnames="combiner")(
        TABLE, IDS, WEIGHTS, combiner=combiner
    )
    np.testing.assert_allclose(have, by_hand(TABLE, combiner), 1e-5, 1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_padding_has_no_gradient(combiner: Any) -> None:
    def loss(table: Any, weights: Any) -> Any:
        return (
            embedding_bag(table, jnp.asarray(IDS), weights, combiner=combiner) ** 2
        ).sum()

    rows, weights = jax.grad(loss, (0, 1))(TABLE, jnp.asarray(WEIGHTS))
    assert np.isfinite(rows).all()
    assert np.isfinite(weights).all()
    assert not weights[2].any()
    used = sorted({0, 2, 3, 5, 7, 9})
    assert np.flatnonzero(np.abs(rows).sum(1)).tolist() == used


def loss(params: Any, batch: Any) -> Any:
    rows = embedding_bag(params["t"], batch["ids"], batch["weights"], combiner="mean")
    return jnp.mean((rows @ params["w"] - batch["y"]) ** 2)


DATA = {"ids": IDS, "weights": WEIGHTS, "y": np.ones(4, np.float32)}


@pytest.mark.parametrize("sparse", ["lazy", "off"])
def test_bags_are_looked_up_by_rows(sparse: Any) -> None:
    adapter = adapt(Table(), loss, seed=0, data=as_dataset(IDS))
    step = TrainStep(adapter, optax.adam(0.1), sparse=sparse)
    graph = step.graph(DATA)
    is_whole = graph.notes == ("params/t travels whole: sparse='off'",)
    assert len(graph.notes) == 1
    assert is_whole == (sparse == "off")
    feeds = [*jax.tree.leaves(DATA), np.int32(0), np.int32(0)]
    assert len(feeds) == len(graph.feeds)
    new = trained(graph, step.initial_values, 1, DATA)
    changed = (
        new[step.names.index("params/t")]
        != step.initial_values[step.names.index("params/t")]
    )
    assert np.flatnonzero(changed.any(1)).tolist() == [0, 2, 3, 5, 7, 9]


NARROW = ["int8", "uint8", "int16", "uint16", "int32", "uint32"]


@pytest.mark.parametrize("dtype", NARROW)
def test_a_bag_has_its_largest_id_and_its_padding_whatever_the_dtype(
    dtype: str,
) -> None:
    largest = min(int(np.iinfo(dtype).max), 2**16 - 1)
    table = jnp.arange(largest + 1.0)[:, None]
    ids = jnp.array([[1, largest], [0, 0]], dtype)
    assert embedding_bag(table, ids, combiner="sum").tolist() == [[largest + 1], [0]]
    weights = jnp.array([[1.0, 0.0], [0.0, 0.0]])
    assert embedding_bag(table, ids, weights).tolist() == [[1], [0]]
    if np.issubdtype(dtype, np.signedinteger):
        ids = jnp.array([[1, -1], [-1, -1]], dtype)
        assert embedding_bag(table, ids).tolist() == [[1], [0]]


@pytest.mark.parametrize(
    ("dtype", "sparse"), [("int8", "lazy"), ("uint16", "lazy"), ("uint8", "exact")]
)
def test_training_changes_the_rows_of_a_bag_and_not_those_of_its_padding(
    dtype: str, sparse: Any
) -> None:
    largest = min(int(np.iinfo(dtype).max), ROWS - 1)
    ids = np.array([[1, largest]] * 4, dtype)
    weights = np.ones((4, 2), np.float32)
    if np.issubdtype(dtype, np.signedinteger):
        ids = np.insert(ids, 1, -1, axis=1)
        weights = np.ones((4, 3), np.float32)
    ids[3], weights[3] = 0, 0  # a bag without ids
    batch = {"ids": ids, "weights": weights, "y": np.ones(4, np.float32)}
    tx = optax.adamw(0.1, weight_decay=0.1) if sparse == "lazy" else optax.adam(0.1)
    step = TrainStep(
        adapt(Table(), loss, seed=0, data=as_dataset(ids)), tx, sparse=sparse
    )
    graph = step.graph(batch)
    assert "travels by rows" in graph.notes[0]
    new = trained(graph, step.initial_values, 1, batch)
    table = step.names.index("params/t")
    changed = (new[table] != step.initial_values[table]).any(1)
    assert np.flatnonzero(changed).tolist() == [1, largest]


@pytest.mark.parametrize(
    ("dtype", "bad", "told", "take"),
    [
        ("int8", -3, "-3 ", "index"),
        ("int16", -3, "-3 ", "take"),
        ("int32", -3, "-3 ", "index"),
        # Padding of a bag is that number where rows are looked up.
        ("int32", -(2**31), "-2147483647 or -2147483648 ", "take"),
        ("uint32", 2**31, r".*or 2147483648 if unsigned\) ", "index"),
        ("uint32", 2**31, r"2147483647 \(or more\) ", "take"),
    ],
)
def test_an_id_of_a_lookup_that_is_no_row_is_an_error_whatever_its_dtype(
    dtype: str, bad: int, told: str, take: str
) -> None:
    def lookup(params: Any, batch: Any) -> Any:
        t, ids = params["t"], batch["ids"]
        rows = t[ids] if take == "index" else jnp.take(t, ids, axis=0)
        return jnp.mean((rows @ params["w"] - batch["y"]) ** 2)

    ids = np.array([1, 2, bad, 0], dtype)
    variables = Table(rows=100).init(jax.random.key(0), ids)
    trainer = Trainer(Table(rows=100), lookup, optax.sgd(0.1), variables=variables)
    with pytest.raises(RowIdError, match=rf"the id {told}.*at step 0"):
        trainer.fit({"ids": ids, "y": DATA["y"]}, steps=1, batch_size=4, progress=False)


@pytest.mark.parametrize("bad", [-2, ROWS, 1 - 2**31, -(2**31)])
def test_other_ids_without_a_row_are_errors(bad: int) -> None:
    ids = IDS.copy()
    ids[3, 0] = bad
    variables = Table().init(jax.random.key(0), IDS)
    trainer = Trainer(Table(), loss, optax.sgd(0.1), variables=variables)
    told = max(bad, 1 - 2**31)  # the least is told with its colocated_with
    with pytest.raises(RowIdError, match=rf"the id {told} .*at step 0"):
        trainer.fit({**DATA, "ids": ids}, steps=1, batch_size=4, progress=False)


@pytest.mark.parametrize(
    ("ids", "weights", "combiner", "message"),
    [
        (IDS, None, "max", "combiner is 'max'; it is one of"),
        (IDS.astype(np.float32), None, "sum", r"ids are float32\[4, 3\]"),
        (IDS, WEIGHTS[:2], "sum", "one weight per id"),
        (IDS, WEIGHTS[:2].tolist(), "sum", "one weight per id"),
        ([[0, 1], [2]], None, "sum", "a list that is no array .* different lengths"),
    ],
)
def test_bad_bags_are_refused(
    ids: Any, weights: Any, combiner: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        embedding_bag(jnp.asarray(TABLE), ids, weights, combiner=combiner)


def test_rows_of_a_bag_are_clipped_to_a_norm_before_they_are_combined() -> None:
    """The rule of ``tf.nn.embedding_lookup(max_norm=)``."""
    table = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], np.float32)
    ids = jnp.array([[0, 1], [2, -1], [0, 0]])
    bags = embedding_bag(jnp.array(table), ids, combiner="sum", max_norm=1.0)
    due = [[0.6 + 0.3, 0.8 + 0.4], [0.0, 0.0], [1.2, 1.6]]
    np.testing.assert_allclose(bags, due, rtol=1e-6)
    gradient = jax.grad(
        lambda t: embedding_bag(t, ids, combiner="sum", max_norm=1.0).sum()
    )(jnp.array(table))
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient[1:], [[1, 1], [1, 1]], rtol=1e-6)


def test_norm_that_no_row_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_norm is 0; it is a number above 0"):
        embedding_bag(jnp.ones((2, 2)), jnp.array([[0]]), max_norm=0)
