"""Small tables travel whole with what is packed, and workers look at their ids."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, RowIdError
from jgraph.plan.lowering.lanes import SMALL_BYTES
from jgraph.plan.program.nodes import CheckNode, RouteNode
from jgraph.train.strategies.batch_share import check_rows
from jgraph.train.tables.row_tables import RowTables, find_row_tables
from jgraph.train.trainer import Trainer
from tests.support.servers import connected

ROWS, DIM, BATCH = 40, 4, 4
rng = np.random.default_rng(0)
TEXT = rng.integers(0, ROWS, (32, 6)).astype(np.int32)
Table = Callable[[Any, Any], Any]


@pytest.fixture(scope="module", autouse=True)
def rows_travel_of_small_tables_too() -> None:
    """Here they do not."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One worker, so that an asynchronous run has the same numbers each time."""
    with connected(ps=2, worker=1) as cluster:
        yield cluster


class Words(nnx.Module):
    def __init__(self) -> None:
        self.table = nnx.Embed(ROWS, DIM, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(DIM, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids: Any) -> Any:
        return self.last(jnp.tanh(self.table(ids)).mean(1))[:, 0]


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch[:, :-1]) - batch[:, -1]) ** 2)


def words(cluster: Cluster, tx: Any, **options: Any) -> Trainer:
    options = {"strategy": jg.AsyncPS(), **options}
    return Trainer(Words(), loss, tx, cluster=cluster, **options)


def fitted(trainer: Trainer, data: Any = TEXT, steps: int = 6) -> list[Any]:
    trainer.fit(data, steps=steps, batch_size=BATCH, progress=False)
    return [np.array(value) for value in trainer.current_values()]


def kinds(trainer: Trainer) -> set[str]:
    program = trainer.plan(TEXT, batch_size=BATCH).program
    return {type(n).__name__ for p in program.partitions for n in p.nodes}


# ------------------------------------------------------------------ what travels whole


def tables_of(
    lookup: Table, batch: Any = TEXT[:BATCH], rows: int = ROWS, **options: Any
) -> RowTables:
    params = {"t": jnp.zeros((rows, DIM))}
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def loss(params: Any, state: Any, batch: Any, seeds: Any) -> Any:
        return lookup(params["t"], batch).sum(), ({}, state)

    options = {"looks": ["t"], **options}
    return find_row_tables(loss, params, {}, batch, (number, number), ["t"], **options)


@pytest.mark.parametrize(
    ("lookup", "part"),
    [
        (lambda t, b: t[b], ((0, 4), (0, 6))),
        (lambda t, b: t[b.reshape(-1)], ((0, 4), (0, 6))),
        (lambda t, b: t[b.T[::-1]], ((0, 4), (0, 6))),
        (lambda t, b: t[b[:, :-1]], ((0, 4), (0, 5))),
        (lambda t, b: t[b[:, 2]], ((0, 4), (2, 3))),
        (lambda t, b: t[b[1:, 1:][1:, 1:3]], ((2, 4), (2, 4))),
        (lambda t, b: t[b[:, :-1].reshape(-1)], ((0, 4), (0, 5))),
    ],
)
def test_the_part_of_a_batch_that_is_ids_is_found(lookup: Table, part: Any) -> None:
    tables = tables_of(lookup)
    assert not tables.tables
    (looked_at,) = tables.looked_at
    assert [one.part for one in looked_at.lookups] == [part]
    assert tables.dense == {"t": "it is small (640 B)"}


@pytest.mark.parametrize(
    "lookup",
    [
        lambda t, b: t[b % 7],
        lambda t, b: t[b[:, ::2]],
        lambda t, b: t[b.reshape(-1)[3:]],
        jg.embedding_bag,
        lambda t, b: t[b[:, 0]] + t[b[:, 1] // 2],
    ],
    ids=["computed", "with holes", "no part", "bags", "one of two"],
)
def test_rows_travel_by_ids_that_are_no_part_of_a_batch(lookup: Table) -> None:
    (table,) = tables_of(lookup).tables
    assert (table.name, table.rows) == ("t", ROWS)


def test_rows_travel_of_what_is_too_large_to_be_packed() -> None:
    row = 4 * DIM
    assert tables_of(lambda t, b: t[b], rows=SMALL_BYTES // row).looked_at
    assert tables_of(lambda t, b: t[b], rows=SMALL_BYTES // row + 1).tables


def test_rows_travel_if_nobody_looks_at_ids() -> None:
    assert tables_of(lambda t, b: t[b], looks=[]).tables


@pytest.mark.parametrize(
    "options",
    [
        {"sparse": "lazy"},
        {"strategy": jg.AsyncPS(gradient_dtype="bfloat16")},
        {"strategy": jg.AsyncPS(variable_partitioner=jg.fixed_size_partitioner(2))},
        {"strategy": jg.LocalSGD(sync_every=2)},
    ],
    ids=["lazy", "gradient_dtype", "cut", "rounds"],
)
def test_rows_travel_where_all_of_a_table_would_be_another_thing(
    cluster: Cluster, options: Any
) -> None:
    with words(cluster, optax.sgd(0.1), **options) as trainer:
        assert RouteNode.__name__ in kinds(trainer)


# ----------------------------------------------------------------------------- numbers


@pytest.mark.combined
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize("kind", [jg.AsyncPS, jg.SyncPS])
def test_numbers_are_those_of_rows(
    cluster: Cluster, tx: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with words(cluster, tx, strategy=kind()) as trainer:
        assert {"CheckNode", "RouteNode"} & kinds(trainer) == {CheckNode.__name__}
        ours = fitted(trainer)
    monkeypatch.setattr("jgraph.train.tables.row_tables.SMALL_BYTES", -1)
    with words(cluster, tx, strategy=kind()) as trainer:
        assert {"CheckNode", "RouteNode"} & kinds(trainer) == {RouteNode.__name__}
        rows = fitted(trainer)
    for one, other in zip(ours, rows, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_the_plan_says_so_and_nothing_more_is_sent(cluster: Cluster) -> None:
    with words(cluster, optax.adam(0.1)) as trainer:
        plan = trainer.plan(TEXT, batch_size=BATCH)
        assert "params/table/embedding travels whole: it is small (640 B)" in str(plan)
        sent = [e for e in plan.edges if e.src == "/job:worker/task:0"]
        # Gradients alone go to a ps: what counts steps there waits for those.
        assert [len(e.values) for e in sent] == [1, 2]
        assert len({e.dst for e in sent}) == 2


# ------------------------------------------------------------------- ids without a row


@pytest.mark.parametrize("kind", [jg.AsyncPS, jg.SyncPS])
@pytest.mark.parametrize("bad", [ROWS, -1])
def test_an_id_without_a_row_is_named_and_changes_nothing(
    cluster: Cluster, kind: Any, bad: int
) -> None:
    text = TEXT.copy()
    text[:, 2] = bad
    with words(cluster, optax.adam(0.1), strategy=kind()) as trainer:
        before = [np.array(value) for value in trainer.current_values()]
        with pytest.raises(RowIdError, match=rf"batch.*table.*has the id {bad}"):
            fitted(trainer, text)
        for now, then in zip(trainer.current_values(), before, strict=True):
            np.testing.assert_array_equal(now, then)


def bags(model: Any, batch: Any) -> Any:
    rows = jg.embedding_bag(model.table.embedding[...], batch[:, :-1])
    return jnp.mean((model.last(rows)[:, 0] - batch[:, -1]) ** 2)


def by_computed_ids(model: Any, batch: Any) -> Any:
    return loss(model, batch + batch[:1, -1:] * 0)


@pytest.mark.combined
@pytest.mark.parametrize("told", [loss, by_computed_ids, bags])
@pytest.mark.parametrize(
    "strategy",
    [
        jg.Local(),
        jg.AsyncPS(),
        jg.AsyncPS(gradient_dtype="bfloat16"),
        jg.SyncPS(variable_partitioner=jg.fixed_size_partitioner(2)),
        jg.SyncPS(dense="workers"),
        jg.LocalSGD(sync_every=2),
    ],
    ids=["local", "async", "compressed", "cut", "owners", "rounds"],
)
def test_an_id_without_a_row_is_refused_of_a_batch_of_more_ids_than_rows(
    cluster: Cluster, strategy: Any, told: Any
) -> None:
    there = None if isinstance(strategy, jg.Local) else cluster
    text = np.tile(TEXT, (2, 1))
    wrong = text.copy()
    wrong[:, 2] = ROWS
    text[::2, 2] = -1 if told is bags else 0
    with Trainer(
        *(Words(), told, optax.adam(0.1)), strategy=strategy, cluster=there
    ) as trainer:
        trainer.fit(text, steps=2, batch_size=16, progress=False)
        before = [np.array(value) for value in trainer.current_values()]
        assert all(np.isfinite(value).all() for value in before)
        with pytest.raises(RowIdError, match=rf"the id {ROWS} at"):
            trainer.fit(wrong, steps=2, batch_size=16, progress=False)
        for now, then in zip(trainer.current_values(), before, strict=True):
            np.testing.assert_array_equal(now, then)


def tied(model: Any, batch: Any) -> Any:
    return loss(model, batch) + 1e-3 * jnp.sum(model.table.embedding[...] ** 2)


@pytest.mark.combined
@pytest.mark.parametrize(("told", "sparse"), [(tied, "auto"), (loss, "off")])
@pytest.mark.parametrize(
    "strategy",
    [
        jg.Local(),
        jg.AsyncPS(),
        jg.SyncPS(),
        jg.SyncPS(batch_share="measured"),
        jg.LocalSGD(sync_every=2),
    ],
    ids=["local", "async", "sync", "shares", "rounds"],
)
def test_an_id_without_a_row_of_a_table_that_travels_whole_is_refused(
    cluster: Cluster, strategy: Any, told: Any, sparse: Any
) -> None:
    there = None if isinstance(strategy, jg.Local) else cluster
    wrong = TEXT.copy()
    wrong[:, 2] = ROWS
    options = {"strategy": strategy, "cluster": there, "sparse": sparse}
    with Trainer(Words(), told, optax.adam(0.1), **options) as trainer:
        before = fitted(trainer, steps=2)
        with pytest.raises(RowIdError, match=rf"the id {ROWS} at"):
            fitted(trainer, wrong, steps=2)
        for now, then in zip(trainer.current_values(), before, strict=True):
            np.testing.assert_array_equal(now, then)


def test_what_is_no_id_may_be_any_number(cluster: Cluster) -> None:
    text = TEXT.copy()
    text[:, -1] = -100
    with words(cluster, optax.sgd(1e-6)) as trainer:
        assert all(np.isfinite(value).all() for value in fitted(trainer, text))


def test_workers_that_share_a_batch_still_want_sparse_off() -> None:
    class Step:
        tables = tables_of(lambda t, b: t[b])

    with pytest.raises(ConfigError, match="sparse='off'"):
        check_rows(Step())
