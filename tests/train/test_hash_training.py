"""Hash tables trained by a Trainer: on two ps, saved, and restored on one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.errors import CheckpointError, ConfigError, DataError
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_keys import shard_of
from jgraph.graph.rows.hash_spec import Column, Initial
from jgraph.plan.program.nodes import ContributeNode
from jgraph.runtime.store.hash_rows import initial_rows
from jgraph.train.hash_tables.hash_step import slot_columns
from jgraph.train.model.adapters import adapt
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.train_step import TrainStep
from tests.support.servers import connected

DIM, BATCH, BAG = 3, 8, 2
RATE = 0.5
INITIAL = Initial("normal", 0.1, seed=4)
PS = TaskName("/job:ps/task:0")
POOL = np.random.default_rng(0).integers(-(2**62), 2**62, 12)


class Model(nnx.Module):
    def __init__(self, **options: Any) -> None:
        given = {"capacity_bytes": 1 << 20, "initializer": INITIAL, **options}
        self.ads = jg.HashTable(DIM, **given)
        self.bias = nnx.Param(jnp.zeros(()))

    def __call__(self, ids: Any) -> Any:
        return self.ads(ids).sum(axis=(1, 2)) + self.bias[...]


def loss(model: Model, batch: Any) -> Any:
    return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2)


def data(step: int, pool: Any = POOL) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    ids = rng.choice(pool, (BATCH, BAG))
    return {
        "ids": jg.split_keys(ids),
        "y": rng.normal(size=BATCH).astype(np.float32),
        "keys": ids,
    }


def batch_of(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("ids", "y")}


class Reference:
    """The same model with a dict for a table, by Adagrad."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Any]] = {}
        self.bias = [np.float64(0), np.float64(0.1)]

    def row(self, key: int) -> list[Any]:
        column = Column("", DIM, initial=INITIAL)
        new = initial_rows(np.array([key]), column)[0].astype(np.float64)
        return self.rows.setdefault(key, [new, np.full(DIM, 0.1)])

    def step(self, given: dict[str, Any]) -> float:
        keys = given["keys"].tolist()
        sums = [sum(self.row(key)[0].sum() for key in bag) for bag in keys]
        error = np.array(sums) + self.bias[0] - given["y"]
        grads = {key: np.zeros(DIM) for bag in keys for key in bag}
        for bag, one in zip(keys, error, strict=True):
            for key in bag:
                grads[key] += 2 * one / BATCH
        for key, grad in grads.items():
            self._update(self.rows[key], grad)
        self._update(self.bias, 2 * error.mean())
        return float((error**2).mean())

    @staticmethod
    def _update(pair: list[Any], grad: Any) -> None:
        pair[1] = pair[1] + grad**2
        pair[0] = pair[0] - RATE * grad / np.sqrt(pair[1] + 1e-7)


def trainer(cluster: Any, tx: Any = None, **options: Any) -> jg.Trainer:
    return jg.Trainer(
        Model(**options), loss, tx or optax.adagrad(RATE), cluster=cluster
    )


def fit(one: jg.Trainer, given: dict[str, Any], steps: int = 1) -> Any:
    return one.fit(batch_of(given), steps=steps, batch_size=BATCH, progress=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with connected(ps=2, worker=1) as two:
        yield two


@pytest.fixture(scope="module")
def small() -> Iterator[Any]:
    with connected(ps=1, worker=1) as one:
        yield one


def assert_like(model: Model, reference: Reference) -> None:
    keys = model.ads.keys()
    assert sorted(keys.tolist()) == sorted(reference.rows)
    rows = np.asarray(model.ads.rows[...])[1:]
    expected = np.stack([reference.rows[int(key)][0] for key in keys])
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)


def test_training_is_that_of_a_dict_and_goes_on_elsewhere(
    cluster: Any, small: Any, tmp_path: Path
) -> None:
    reference, first = Reference(), trainer(cluster)
    for step in range(4):
        expected = reference.step(data(step))
        values = fit(first, data(step)).metrics("loss")["value"]
        assert values[0] == pytest.approx(expected, rel=1e-4)
    reference.step(data(4))
    run = fit(first, data(4))
    model = run.model()
    assert_like(model, reference)
    events = {event.task: event for event in run.events()}
    homes = shard_of(np.array(list(reference.rows)), 2)
    for number, task in enumerate(cluster.tasks("ps")):
        held = int((homes == number).sum())
        assert (events[task].rows, events[task].admitted) == (held, held)
    given = data(9)
    unseen = {**given, "ids": jg.split_keys(given["keys"] + 1)}
    found = first.evaluate(batch_of(unseen))["loss"]
    bias = float(model.bias[...])  # a key without a row reads the mean of new rows
    assert found == pytest.approx(((bias - given["y"]) ** 2).mean(), rel=1e-5)
    saved = run.save(tmp_path / "saved")
    first.close()
    second = trainer(small).restore(saved)
    reference.step(data(5))
    run = fit(second, data(5))
    assert_like(run.model(), reference)
    assert [event.rows for event in run.events()] == [len(reference.rows)]


def test_a_budget_that_is_spent_evicts_rows_and_says_so(small: Any) -> None:
    one = trainer(small, capacity_bytes=3000, eviction="lru")
    for step in range(7):
        fit(one, data(step, np.arange(100 * step, 100 * step + 100)))
    run = fit(one, data(7, np.arange(700, 800)))
    (event,) = run.events()
    assert event.evicted > 0
    assert event.rows == event.admitted - event.evicted
    assert event.nbytes <= 3000
    for name in ("rows", "nbytes", "admitted", "evicted"):
        found = run.metrics(f"table_{name}")
        assert found["value"][-1] == getattr(event, name)
        assert found["step"][-1] == run.steps
    assert f"table_rows={event.rows}" in repr(run)
    assert len(run.model().ads.keys()) == event.rows
    one.close()


def test_status_has_a_line_for_each_shard_of_a_table(cluster: Any) -> None:
    one = trainer(cluster)
    run = fit(one, data(0))
    status = cluster.status()
    found = {task.task: task.hash_tables for task in status.tasks}
    for event in run.events():
        (table,) = found[event.task]
        assert (table.rows, table.nbytes) == (event.rows, event.nbytes)
        assert (table.capacity_bytes, table.evicted) == (1 << 19, 0)
    assert not found["/job:worker/task:0"]
    assert "hash tables" in str(status)
    assert "<td>524.3 kB</td>" in status._repr_html_()
    (shard,) = status.to_dict()["tasks"][0]["hash_tables"]
    assert shard["name"] == "params/ads/rows/part_0"
    update, process = (status.tasks[0].busy_s[k] for k in ("update", "process"))
    assert 0 < update < process
    one.close()
    assert "hash tables" not in str(cluster.status())


def test_a_linen_model_trains_one_too(small: Any) -> None:
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            make = nnx.bridge.to_linen(jg.HashTable, DIM, 1 << 20, skip_rng=True)
            return nn.Dense(1)(make(ids).sum(axis=1))[:, 0]

    def linen_loss(variables: Any, batch: Any) -> Any:
        found = Linen().apply(variables, batch["ids"])
        return jnp.mean((found - batch["y"]) ** 2)

    given = data(0)
    variables = Linen().init(jax.random.key(0), given["ids"])
    one = jg.Trainer(
        Linen(), linen_loss, optax.adam(0.1), cluster=small, variables=variables
    )
    values = fit(one, given, 30).metrics("loss")["value"]
    assert values[-1] < 0.5 * values[0]
    known = one.model()["KnownKeys"]["ToLinen_0"]["known"]
    assert len(known) == 1 + len(np.unique(given["keys"]))


def test_a_checkpoint_of_another_table_is_refused(small: Any, tmp_path: Path) -> None:
    saved = fit(trainer(small), data(0)).save(tmp_path / "saved")
    other = trainer(small, tx=optax.adam(0.1))
    with pytest.raises(CheckpointError, match="leaves are missing"):
        other.restore(saved)


@pytest.mark.parametrize(
    ("tx", "begin"),
    [
        (optax.adagrad(0.1, initial_accumulator_value=0.5), [Initial(scale=0.5)]),
        (optax.adam(0.1), [Initial(), Initial()]),
        (optax.contrib.schedule_free_sgd(0.1), [INITIAL]),
        (optax.sgd(0.1), []),
    ],
)
def test_slots_begin_as_the_optimizer_says(tx: Any, begin: Sequence[Initial]) -> None:
    params = {"t": jnp.zeros((1, DIM)), "w": jnp.zeros(2)}
    paths, _ = jax.tree_util.tree_flatten_with_path(tx.init(params))
    names = {
        n: jax.tree_util.keystr(path)
        for n, (path, _) in enumerate(paths)
        if "'t'" in jax.tree_util.keystr(path)
    }
    found = slot_columns(tx.init, params, 0, names, INITIAL)
    assert [column.initial for column in found] == begin
    assert {column.width for column in found} <= {DIM}


def step_of(model: Any, loss: Any = loss, tx: Any = None) -> TrainStep:
    place = lambda sizes: dict.fromkeys(sizes, PS)
    arrangement = Arrangement(place, ps=(PS,))
    adapter = adapt(model, loss, seed=0)
    return TrainStep(adapter, tx or optax.adagrad(0.1), arrangement=arrangement)


def types(given: dict[str, Any]) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(given)
    )


def test_a_plan_says_that_a_table_is_hashed() -> None:
    (note,) = step_of(Model()).graph(types(data(0))).notes
    assert note.startswith("params/ads/rows is a hash table in 1 shards: at most 16")


def test_a_loss_that_uses_all_rows_is_refused() -> None:
    def whole(model: Model, batch: Any) -> Any:
        return loss(model, batch) + (model.ads.rows[...] ** 2).sum()

    with pytest.raises(ConfigError, match="rows cannot be trained: it is also used as"):
        step_of(Model(), whole).graph(types(data(0)))


def test_a_table_that_is_not_looked_up_is_refused() -> None:
    def other(model: Model, batch: Any) -> Any:
        return ((model.bias[...] - batch["y"]) ** 2).mean()

    with pytest.raises(ConfigError, match="the loss does not call it"):
        step_of(Model(), other).graph(types(data(0)))


def test_an_optimizer_with_other_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"of shape .* for one row of a hash table"):
        step_of(Model(), tx=optax.adafactor(0.1, min_dim_size_to_factor=1))


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
    ],
    ids=["line search", "sam"],
)
def test_an_optimizer_that_evaluates_the_loss_is_refused_in_words(tx: Any) -> None:
    with pytest.raises(ConfigError, match=r"ads/rows is a hash table, and this opt"):
        step_of(Model(), tx=tx).graph(types(data(0)))


@pytest.mark.parametrize("case", [0, 1])
def test_a_table_may_be_called_with_one_id_also_under_vmap(case: int) -> None:
    def each(model: Model, batch: Any) -> Any:
        one: Any = nnx.vmap(lambda table, key: table(key), in_axes=(None, 0))
        found = one(model.ads, batch["ids"].reshape(-1, 2)).sum(1)
        return jnp.mean((found.reshape(BATCH, BAG).sum(1) - batch["y"]) ** 2)

    def first(model: Model, batch: Any) -> Any:
        return model.ads(batch["ids"][0, 0]).sum()

    loss_of, count = [(each, BATCH * BAG), (first, 1)][case]
    (note,) = step_of(Model(), loss_of).graph(types(data(0))).notes
    assert f"at most {count} rows travel" in note


def test_a_budget_below_a_row_with_its_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="one row with its optimizer state takes"):
        step_of(Model(capacity_bytes=300), tx=optax.adam(0.1))


def test_large_ids_name_the_way_to_give_them() -> None:
    one = jg.Trainer(Model(), loss, optax.sgd(0.1))
    given = {"ids": data(0)["keys"], "y": data(0)["y"]}
    with pytest.raises(DataError, match=r"for a jg.HashTable give jg.split_keys\("):
        one.fit(given, steps=1, batch_size=BATCH, progress=False)


@pytest.mark.parametrize(
    "narrow", [pytest.param("bfloat16", marks=pytest.mark.nightly), "int8"]
)
def test_synchronous_step_with_narrow_gradients_has_whole_keys(narrow: Any) -> None:
    with connected(ps=2, worker=2) as two:
        models = []
        for dtype in (None, narrow):
            one = jg.Trainer(
                Model(),
                loss,
                optax.sgd(0.1),
                cluster=two,
                strategy=jg.SyncPS(gradient_dtype=dtype),
            )
            fit(one, data(0), steps=3)
            models.append(one.model())
    exact, rounded = (
        dict(zip(m.ads.keys().tolist(), m.ads.rows[...][1:], strict=True))
        for m in models
    )
    assert set(exact) == set(rounded) == set(data(0)["keys"].reshape(-1).tolist())
    for key, row in exact.items():
        np.testing.assert_allclose(rounded[key], row, atol=0.02)


def test_ids_that_are_written_as_they_came_pass_no_segment() -> None:
    with connected(ps=1, worker=1) as one:
        strategy = jg.SyncPS(gradient_dtype="bfloat16")
        trained = jg.Trainer(
            Model(), loss, optax.sgd(0.1), cluster=one, strategy=strategy
        )
        planned = trained.plan(batch_of(data(0)), batch_size=BATCH)
    (part,) = [p for p in planned.program.partitions if "ps" in p.task]
    (node,) = [n for n in part.nodes if isinstance(n, ContributeNode)]
    assert "int64" in {part.values[v].dtype for v in node.values}
