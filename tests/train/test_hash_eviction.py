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
from jgraph.graph.rows.hash_spec import Eviction
from tests.support.hash_eviction import (
    BATCH,
    Counts,
    Oracle,
    check_rows,
    counts_in,
    examples,
    loss,
    options,
)
from tests.support.ledger import examples_counted
from tests.support.servers import connected


class Linen(nn.Module):
    given: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        make = nnx.bridge.to_linen(jg.HashTable, 1, skip_rng=True, **self.given)
        return make(ids)


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
