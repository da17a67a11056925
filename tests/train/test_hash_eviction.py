"""Hash tables that are trained within a budget, against a dict with the same rules."""

from contextlib import nullcontext
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.graph.rows.hash_keys import join_keys
from jgraph.graph.rows.hash_spec import Column, Eviction, HashSpec
from jgraph.runtime.store.hash_budget import nbytes_for
from jgraph.train.run.run import Run
from tests.runtime.test_hash_eviction import ROOM, TTL, Oracle
from tests.support.ledger import examples_counted
from tests.support.servers import connected

BATCH, KEYS = 2, 16


def options(eviction: Eviction, rows: int = ROOM) -> dict[str, Any]:
    """Options of a table with so many rows in each shard."""
    ttl = TTL if eviction == "ttl" else 0
    spec = HashSpec("t", (Column("", 1),), 1 << 20, eviction=eviction, ttl=ttl)
    return {"capacity_bytes": nbytes_for(spec, rows), "eviction": eviction, "ttl": ttl}


class Counts(nnx.Module):
    """A row counts the updates that its key has had."""

    def __init__(self, **given: Any) -> None:
        self.table = jg.HashTable(1, **given)

    def __call__(self, ids: Any) -> Any:
        return self.table(ids)


def loss(model: Any, batch: Any) -> Any:
    seen = jax.nn.one_hot(batch["number"], KEYS).sum(0)
    return -model(batch["ids"]).sum(), {"seen": seen}


class Linen(nn.Module):
    given: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        make = nnx.bridge.to_linen(jg.HashTable, 1, skip_rng=True, **self.given)
        return make(ids)


def counts_in(model: Any) -> dict[int, float]:
    """Returns the row of each key."""
    if isinstance(model, nnx.Module):
        table: Any = model
        known, rows = table.table.known[...], table.table.rows[...]
    else:
        known = model["KnownKeys"]["ToLinen_0"]["known"]
        rows = model["params"]["ToLinen_0"]["rows"]
    keys = join_keys(np.asarray(known)[1:])
    values = np.asarray(rows)[1:, 0]
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("eviction", "form"),
    [
        ("lru", "nnx"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("lfu", "nnx"),
                ("ttl", "nnx"),
                ("lru", "linen"),
                ("lru", "x64"),
            ]
        ),
    ],
)
def test_a_worker_alone_trains_the_table_of_a_dict(
    eviction: Eviction, form: str
) -> None:
    given, rng, oracle = options(eviction), np.random.default_rng(0), Oracle(eviction)
    wide = jax.enable_x64(True) if form == "x64" else nullcontext()
    with wide, connected(ps=1, worker=1) as cluster:
        model: Any = Counts(**given)
        loss_of: Any = loss
        if form == "linen":
            model = Linen(given)
            apply = lambda v, batch: -model.apply(v, batch["ids"]).sum()
            loss_of = apply
        one = jg.Trainer(model, loss_of, optax.sgd(1.0), cluster=cluster)
        run: Any = None
        for _ in range(8):
            ids = rng.permutation(10)[: 2 * BATCH].reshape(BATCH, 2)
            keys = ids.astype(np.int64) if form == "x64" else jg.split_keys(ids)
            batch = {"ids": keys, "number": np.zeros(BATCH, np.int32)}
            run = one.fit(batch, steps=1, batch_size=BATCH, progress=False)
            found = counts_in(run.model())
            oracle.looked_up(set(ids.ravel().tolist()), set(found))
            oracle.updated(set(ids.ravel().tolist()))
            assert found == oracle.rows
        (event,) = run.events()
        assert event.dropped == oracle.dropped
        assert event.evicted == oracle.evicted
        assert event.evicted or eviction == "ttl"


def examples() -> dict[str, Any]:
    """Examples of a key each, those of low numbers more often."""
    number = (np.random.default_rng(0).random(64) ** 2 * KEYS).astype(np.int32)
    return {"ids": jg.split_keys(number[:, None]), "number": number}


def check_rows(run: Run, lookups: Any) -> None:
    """No row has more updates than it can have had, and none has parts of one.

    Args:
      run: is over.
      lookups: how often each key was looked up, by key.
    """
    model: Any = run.model()
    found = counts_in(model)
    assert found
    for key, count in found.items():
        assert 0 <= count <= lookups[key]
        assert count == round(count)
    assert all(event.rows <= ROOM for event in run.events())


@pytest.mark.nightly
@pytest.mark.parametrize("eviction", ["lru", "lfu", "ttl"])
@pytest.mark.parametrize("strategy", [jg.AsyncPS(), jg.SyncPS(backup_workers=1)])
def test_two_workers_within_a_budget_apply_no_update_twice(
    strategy: Any, eviction: Eviction
) -> None:
    with connected(ps=1, worker=2) as cluster:
        one = jg.Trainer(
            Counts(**options(eviction)),
            loss,
            optax.sgd(1.0),
            cluster=cluster,
            strategy=strategy,
        )
        run = one.fit(examples(), steps=60, batch_size=BATCH, progress=False)
        told = run.metrics("seen")["value"].sum(0)
        check_rows(run, told)
        (event,) = run.events()
        assert event.rows == event.admitted - event.evicted - event.expired
        if isinstance(strategy, jg.SyncPS):  # five rows are enough for two workers
            np.testing.assert_allclose(examples_counted(run), told)
            assert event.dropped == event.refused == 0 or eviction == "ttl"
