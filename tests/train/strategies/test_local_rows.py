"""Tables in rounds of local steps: rows that a round touches, on servers of tests."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, RowBudgetError, RowIdError
from jgraph.train.strategies.local_sgd import LocalSGD
from jgraph.train.trainer import Trainer
from tests.support.embeddings import DIM, ROWS, TABLE, Embed, data, loss
from tests.support.models import batches_of, step_by_hand
from tests.support.servers import connected, ps_bytes

pytestmark = pytest.mark.usefixtures("nothing_is_left")

BATCH, EVERY, ROUNDS = 4, 3, 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=2) as cluster:
        yield cluster


def trainer(cluster: Cluster, tx: Any, **options: Any) -> Trainer:
    sparse, rows = options.pop("sparse", "auto"), options.pop("rows", ROWS)
    model = options.pop("model", Embed(nnx.Rngs(0), rows))
    strategy = LocalSGD(sync_every=EVERY, step_timeout_s=20, **options)
    return Trainer(model, loss, tx, cluster=cluster, strategy=strategy, sparse=sparse)


def fit(there: Trainer, steps: int = ROUNDS) -> Any:
    return there.fit(data, steps=steps, batch_size=BATCH, progress=False)


def parameters(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    table, last = state["table"]["embedding"], state["last"]
    return {"table": np.asarray(table), **{k: np.asarray(v) for k, v in last.items()}}


def assert_close(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, due in wanted.items():
        np.testing.assert_allclose(found[name], due, rtol=1e-5, atol=1e-6)


def by_hand(
    tx: Any, outer: Any, workers: int, inner_state: str = "keep", whole: bool = False
) -> dict[str, Any]:
    """One process that does what all workers do, on whole tables.

    Rows that a round of a worker does not look up are put back after it, with their
    state, unless a table is to be trained whole.
    """
    graph, params = nnx.split(Embed(nnx.Rngs(0)))
    start = params
    step = step_by_hand(graph, loss, tx)
    stream = batches_of(data, BATCH * EVERY, 0)
    inner: list[Any] = [tx.init(params) for _ in range(workers)]
    opt = outer.init(params)
    for _ in range(ROUNDS):
        ways = []
        for worker in range(workers):
            taken = next(stream)
            touched = np.isin(np.arange(ROWS), taken["ids"])[:, None]

            def of_touched(new: Any, old: Any, touched: Any = touched) -> Any:
                table = new.shape == (ROWS, DIM) and not whole
                return jnp.where(touched, new, old) if table else new

            mine, state = params, inner[worker]
            for n in range(EVERY):
                some = slice(n * BATCH, (n + 1) * BATCH)
                mine, state = step(mine, state, {k: v[some] for k, v in taken.items()})
            mine = jax.tree.map(of_touched, mine, params)
            state = jax.tree.map(of_touched, state, inner[worker])
            inner[worker] = tx.init(start) if inner_state == "reset" else state
            ways.append(jax.tree.map(lambda old, new: old - new, params, mine))
        mean = jax.tree.map(lambda *each: sum(each) / workers, *ways)
        updates, opt = outer.update(mean, opt, params)
        params = optax.apply_updates(params, updates)
    return parameters(nnx.merge(graph, params))


@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_rows_of_a_round_become_what_they_would_in_a_whole_table(
    cluster: Cluster, outer: str
) -> None:
    """The law: SGD leaves the others alone, so rows are no approximation."""
    how = optax.sgd(1.0)
    if outer == "nesterov":
        how = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = optax.sgd(0.1)
    there = trainer(cluster, tx, outer=how)
    run = fit(there)
    assert f"{TABLE} travels by rows: at most 36 of {ROWS}" in str(there.plan())
    assert_close(parameters(run.model()), by_hand(tx, how, 2, whole=True))
    there.close()


@pytest.mark.combined
@pytest.mark.parametrize("inner_state", ["keep", "reset"])
@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_a_worker_keeps_state_for_the_rows_that_it_touched(
    name: str, inner_state: str
) -> None:
    """Where it does not begin with zeros, too."""
    tx = {"adam": optax.adam(1e-2), "adagrad": optax.adagrad(0.1)}[name]
    with connected(ps=2, worker=1) as cluster:
        there = trainer(cluster, tx, inner_state=inner_state)
        found = parameters(fit(there).model())
        assert_close(found, by_hand(tx, optax.sgd(1.0), 1, inner_state))
        there.close()


def test_rows_of_paced_and_of_asynchronous_rounds_travel_alike() -> None:
    tx = optax.adagrad(0.1)
    options: list[dict[str, Any]] = [{"sync_every_s": 3600.0}, {"max_staleness": 0}]
    with connected(ps=2, worker=1) as cluster:
        found = []
        for given in options:
            there = trainer(cluster, tx, **given)
            run = fit(there)
            assert run.steps == ROUNDS
            assert f"{TABLE} travels by rows" in str(there.plan())
            found.append(parameters(run.model()))
            there.close()
        assert_close(found[1], by_hand(tx, optax.sgd(1.0), 1))
        assert np.abs(found[0]["table"] - found[1]["table"]).max() > 1e-3


WHOLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "changes rows without a gradient too": (optax.adam(1e-2), {"sparse": "exact"}),
    "is of the state of all its rows": (optax.adam(1e-2), {"inner_state": "average"}),
    # These are of steps as well: tests/train/tables/test_row_tables.py has them by day.
    "makes of each row what hangs on all": (optax.lamb(0.01), {}),
    "keeps gradients for later steps": (optax.MultiSteps(optax.sgd(0.1), 2), {}),
    "has no row for each": (optax.adafactor(0.1, min_dim_size_to_factor=4), {}),
}


@pytest.mark.parametrize(
    "why",
    [
        pytest.param(why, marks=() if options else pytest.mark.nightly)
        for why, (_, options) in WHOLE.items()
    ],
)
def test_what_hangs_on_all_rows_of_a_table_lets_it_travel_whole(
    cluster: Cluster, why: str
) -> None:
    """And where a user wants the numbers of whole tables."""
    tx, options = WHOLE[why]
    there = trainer(cluster, tx, **options)
    notes = there.plan(data, BATCH).graph.notes
    assert notes[0].startswith(f"{TABLE} travels whole: "), notes
    assert why in notes[0]
    assert fit(there, 2).steps == 2
    there.close()


@pytest.mark.parametrize("fragments", [1, 3])
def test_an_id_without_a_row_ends_the_run_with_the_updates_before(
    cluster: Cluster, fragments: int
) -> None:
    there = trainer(cluster, optax.sgd(0.1), fragments=fragments)
    ids = np.where(np.arange(64)[:, None] == 40, ROWS, data["ids"])
    with pytest.raises(RowIdError, match=f"has the id {ROWS}"):
        there.fit(
            {**data, "ids": ids.astype(np.int32)},
            steps=10,
            batch_size=BATCH,
            progress=False,
        )
    there.close()


def test_a_round_that_needs_more_rows_than_a_worker_may_hold_ends_the_run(
    cluster: Cluster,
) -> None:
    """With the updates before it; a round of as many rows is none of those."""
    ids = np.full((64, 3), 7, np.int32)
    ids[40] = 1, 2, 3
    strategy = LocalSGD(sync_every=EVERY, row_budget=3, step_timeout_s=20)
    there = Trainer(
        Embed(nnx.Rngs(0)), loss, optax.sgd(0.1), cluster=cluster, strategy=strategy
    )
    due = r"needs 4 rows in a round, and a worker may hold 3; raise LocalSGD\(row_budg"
    with pytest.raises(RowBudgetError, match=due):
        there.fit({**data, "ids": ids}, steps=20, batch_size=BATCH, progress=False)
    position = there.current_position()
    assert position is None or position["done"] < 64 // (BATCH * EVERY)
    there.close()
    there = trainer(cluster, optax.sgd(0.1), row_budget=36)
    assert fit(there, 2).steps == 2
    there.close()
    wrong: Any = 2.5
    with pytest.raises(ConfigError, match=r"row_budget is 2\.5; give how many"):
        LocalSGD(row_budget=wrong)


def test_bytes_are_those_of_the_rows_that_a_round_touches() -> None:
    """By the counters of the ps, in both directions, whatever the table has."""
    with connected(ps=1, worker=1) as cluster:

        def of_rounds(rows: int, *touched: int) -> Iterator[float]:
            """Bytes of a round of as many rows each, in a table of as many."""
            there = trainer(cluster, optax.sgd(0.1), rows=rows)
            for count in touched:
                ids = (np.arange(64 * 32) % count).reshape(64, 32).astype(np.int32)
                given, seen = {**data, "ids": ids}, []
                for steps in (10, 10, 30):
                    there.fit(given, steps=steps, batch_size=16, progress=False)
                    seen.append(ps_bytes(cluster))
                yield (seen[2] - 2 * seen[1] + seen[0]) / 20
            there.close()

        few, many = of_rounds(50_000, 32, 64 * 32)
        touched = 3 * 16 * 32  # of steps whose ids are all others
        # A row goes there and back, and its number both ways.
        a_row = 2 * (4 * DIM + 4)
        assert 0.9 < (many - few) / ((touched - 32) * a_row) < 1.1
        assert few < many / 8
        (small,) = of_rounds(3_000, 32)
        assert small == pytest.approx(few, rel=0.5)  # of 16 times fewer


class Keyed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = jg.HashTable(DIM, capacity_bytes=1 << 20)
        self.last = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.last(jnp.tanh(self.table(ids)).mean(1))[:, 0]


def test_keys_of_a_round_get_rows_in_a_hash_table(cluster: Cluster) -> None:
    """As rows of a table that has as many, all zeros at first."""

    class Zeros(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = nnx.Embed(ROWS, DIM, rngs=rngs)
            self.table.embedding[...] = jnp.zeros((ROWS, DIM))
            self.last = nnx.Linear(DIM, 1, rngs=rngs)

        __call__ = Keyed.__call__

    start = nnx.Linear(DIM, 1, rngs=nnx.Rngs(7))

    def trained(model: Any) -> Any:
        for name in ("kernel", "bias"):
            getattr(model.last, name)[...] = getattr(start, name)[...]
        options: Any = {"inner_state": "reset"}
        there = trainer(cluster, optax.adagrad(0.1), model=model, **options)
        model = fit(there).model()
        there.close()
        return model

    found, wanted = trained(Keyed(nnx.Rngs(0))), trained(Zeros(nnx.Rngs(0)))
    rows = np.asarray(found.table.rows[...])[1:]
    due = np.asarray(wanted.table.embedding[...])
    keys = found.table.keys()
    assert len(keys) > 20
    np.testing.assert_allclose(rows, due[keys], rtol=1e-5, atol=1e-6)


@pytest.mark.bad_input_row(29)
def test_state_for_keys_that_a_worker_has_no_table_for_is_refused(
    cluster: Cluster,
) -> None:
    there = trainer(cluster, optax.adam(0.1), model=Keyed(nnx.Rngs(0)))
    with pytest.raises(ConfigError, match=r"write LocalSGD\(inner_state='reset'\), or"):
        fit(there)
    there = trainer(
        *(cluster, optax.adam(0.1)),
        model=Keyed(nnx.Rngs(0)),
        inner_state="average",
    )
    with pytest.raises(ConfigError, match="'average' is of the state of all its rows"):
        fit(there)
