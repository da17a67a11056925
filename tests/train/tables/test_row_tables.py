"""Tables of which a loss only looks up rows, trained as if they were whole."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.errors import ConfigError, DataError, RowIdError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph, eval_graph
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.rows import id_text
from jgraph.plan.plan import plan
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.train_step import TrainStep
from jgraph.train.trainer import Trainer
from tests.support.row_tables import BATCH, DIM, ROWS, Table, batch, trained

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")


class LinenEmbed(nn.Module):
    rows: int = ROWS
    dtype: Any = None

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        rows = nn.Embed(self.rows, DIM, dtype=self.dtype)(ids)
        return nn.Dense(1)(rows.mean(1))[:, 0]


class NnxEmbed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.table = nnx.Embed(ROWS, DIM, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.last(self.table(ids).mean(1))[:, 0]


Forward = Callable[[Any, Any], Any]


def of_table(forward: Forward, rows: int = ROWS) -> Any:
    """An adapter of ``mean((forward(t, batch) @ w - y) ** 2)``."""

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((forward(params["t"], batch) @ params["w"] - batch["y"]) ** 2)

    return adapt(Table(rows), loss, seed=0, data=as_dataset(batch["ids"]))


def of_linen(dtype: Any = None) -> Any:
    model = LinenEmbed(dtype=dtype)

    def loss(params: Any, batch: Any) -> Any:
        out = model.apply({"params": params}, batch["ids"])
        return jnp.mean((out - batch["y"]) ** 2)

    return adapt(model, loss, seed=0, data=as_dataset(batch["ids"]))


def nnx_loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2)


def two_lookups(t: Any, batch: Any) -> Any:
    return t[batch["ids"]].sum(1) * jnp.take(t, batch["item"], axis=0)


def hashed(t: Any, batch: Any) -> Any:
    crossed = (batch["ids"][:, 0] * 31 + batch["item"]) % ROWS
    return jnp.take(t, crossed, axis=0)


@jax.checkpoint
def checkpointed(t: Any, batch: Any) -> Any:
    return jnp.tanh(t[batch["ids"]]).sum(1)


@jax.jit
def jitted(t: Any, batch: Any) -> Any:
    return jax.nn.relu(t.astype(jnp.bfloat16)[batch["ids"]]).sum(1).astype(jnp.float32)


def mapped(t: Any, batch: Any) -> Any:
    return jax.vmap(lambda ids: t[ids].sum(0))(batch["ids"])


def dropping(t: Any, batch: Any) -> Any:
    far = jnp.where(batch["ids"] > 20, batch["ids"] + ROWS, batch["ids"])
    return jnp.take(t, far, axis=0, mode="fill", fill_value=0.5).sum(1)


def clipping(t: Any, batch: Any) -> Any:
    return jnp.take(t, batch["ids"] * 40 - 3, axis=0, mode="clip").sum(1)


def dropping_negative(t: Any, batch: Any) -> Any:
    near = batch["ids"] - 20
    far = jnp.where(batch["ids"] > 20, near, near - ROWS)
    return jnp.take(t, far, axis=0, mode="fill", fill_value=0.5).sum(1)


def clipping_negative(t: Any, batch: Any) -> Any:
    far = batch["ids"] * 40 - ROWS
    return t.at[far].get(mode="clip").sum(1)


MODELS: dict[str, Callable[[], Any]] = {
    "linen": of_linen,
    "linen in bfloat16": lambda: of_linen(jnp.bfloat16),
    "nnx": lambda: adapt(NnxEmbed(nnx.Rngs(0)), nnx_loss, seed=0),
    "nnx in bfloat16": lambda: adapt(
        NnxEmbed(nnx.Rngs(0), jnp.bfloat16), nnx_loss, seed=0
    ),
    "two lookups": lambda: of_table(two_lookups),
    "hashed": lambda: of_table(hashed),
    "checkpoint": lambda: of_table(checkpointed),
    "jit and cast": lambda: of_table(jitted),
    "vmap": lambda: of_table(mapped),
    "dropping": lambda: of_table(dropping),
    "clipping": lambda: of_table(clipping),
    "dropping negative ids": lambda: of_table(dropping_negative),
    "clipping negative ids": lambda: of_table(clipping_negative),
}


def graph_of(adapter: Any, tx: Any, sparse: Any) -> tuple[Graph, list[Any]]:
    step = TrainStep(adapter, tx, sparse=sparse)
    return step.graph(batch), step.initial_values


def assert_trains_alike(adapter: Any, tx: Any, sparse: Any) -> Graph:
    rows, values = graph_of(adapter, tx, sparse)
    whole, _ = graph_of(adapter, tx, "off")
    for a, b in zip(trained(rows, values), trained(whole, values), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)
    return rows


def reads_whole(graph: Graph, name: str) -> bool:
    """Whether a table is read other than by rows."""
    ref = dict(zip((v.name for v in graph.variables), graph.jaxpr.invars, strict=False))
    return any(len(e.invars) == 1 for e in graph.equations if ref[name] in e.invars)


@pytest.mark.parametrize("model", MODELS)
def test_rows_are_trained_as_the_whole_table_would_be(model: str) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.5))
    graph = assert_trains_alike(MODELS[model](), tx, "auto")
    assert "travels by rows" in graph.notes[0]
    table = graph.notes[0].split()[0]
    assert not reads_whole(graph, table)
    made = [v.aval.shape for e in graph.equations for v in e.outvars]
    assert (ROWS, DIM) not in made


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        pytest.param(optax.rmsprop(0.1), marks=pytest.mark.nightly),
        pytest.param(optax.adam(0.1), marks=pytest.mark.nightly),
        optax.adamw(0.1, weight_decay=0.1),
        pytest.param(optax.sgd(0.1, momentum=0.9), marks=pytest.mark.nightly),
        optax.lamb(0.1),
        optax.adafactor(0.1, min_dim_size_to_factor=2),
        optax.multi_transform(
            {"rows": optax.adagrad(0.1), "rest": optax.adam(0.1)},
            {"t": "rows", "w": "rest"},
        ),
        optax.masked(optax.adam(0.1), {"t": False, "w": True}),
    ],
)
def test_exact_is_exact_with_any_optimizer(tx: Any) -> None:
    assert_trains_alike(of_table(two_lookups), tx, "exact")


def table_after(tx: Any, sparse: Any, batches: Any, rows: int = ROWS) -> Any:
    """Returns the table before and after a step on each of these batches."""
    step = TrainStep(of_table(two_lookups, rows), tx, sparse=sparse)
    table, values = step.names.index("params/t"), list(step.initial_values)
    before, graph = values[table], step.graph(batches[0])
    run = jax.jit(lambda values, feeds: eval_graph(graph, values, feeds)[1])
    for n, each in enumerate(batches):
        values = run(values, [*jax.tree.leaves(each), np.int32(n), np.int32(0)])
    return before, values[table]


def test_lazy_rows_stay_as_they_are_where_the_optimizer_would_change_them() -> None:
    tx = optax.adamw(0.1, weight_decay=0.1)
    before, after = table_after(tx, "lazy", [batch] * 3)
    assert np.array_equal(before[40:], after[40:])
    assert not np.array_equal(before[:40], after[:40])
    step = TrainStep(of_table(two_lookups), tx, sparse="lazy")
    assert "rows that a step does not look up stay" in step.graph(batch).notes[0]


def test_rows_are_trained_by_default_as_plain_optax_would() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # 48 KB are no reason to think of other numbers
        graph = assert_trains_alike(of_table(two_lookups), optax.adam(0.1), "auto")
    assert (
        "of all rows (46.9 KiB), because the optimizer changes rows" in graph.notes[0]
    )
    assert "sparse='lazy' would update 1.5 KiB" in graph.notes[0]


def test_a_large_update_of_all_rows_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jgraph.train.tables.row_step._LARGE_UPDATE_BYTES", 1 << 21)
    adapter = of_table(two_lookups, 50_000)
    step = TrainStep(adapter, optax.adam(0.1))
    told = "params/t: each step updates all 50,000 rows .2.3 MiB., not only the 32"
    with pytest.warns(UserWarning, match=told):
        step.graph(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.graph(batch)
        TrainStep(adapter, optax.adam(0.1), sparse="exact").graph(batch)
        TrainStep(adapter, optax.adagrad(0.1)).graph(batch)


@pytest.mark.parametrize("sparse", ["auto", "lazy"])
def test_accumulated_gradients_of_rows_are_all_applied(sparse: Any) -> None:
    tx = optax.MultiSteps(optax.sgd(0.5), 2).gradient_transformation()
    batches = [
        {**batch, "ids": np.full((BATCH, 3), 2 * n), "item": np.full(BATCH, 2 * n + 1)}
        for n in range(4)
    ]
    before, after = table_after(tx, sparse, batches)
    changed = np.flatnonzero((before != after).any(1))
    assert changed.tolist() == list(range(8))
    wanted = table_after(tx, "off", batches)[1]
    np.testing.assert_allclose(after, wanted, 1e-5, 1e-6)


def test_lazy_norms_do_not_count_rows_that_are_not_there() -> None:
    """The trust ratio of one row that is looked up often is that of this row."""
    adapter = of_table(lambda t, batch: t[batch["item"] * 0 + 7])
    step = TrainStep(adapter, optax.lamb(0.1), sparse="lazy")
    whole = TrainStep(of_table(lambda t, b: t[b["item"] * 0], 1), optax.lamb(0.1))
    table = step.names.index("params/t")
    values = list(whole.initial_values)
    values[table] = step.initial_values[table][7:8]
    new = trained(step.graph(batch), step.initial_values, 1)[table][7:8]
    want = trained(whole.graph(batch), values, 1)[table]
    np.testing.assert_allclose(new, want, 1e-5)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda t, b: t[b["item"]] + t.sum(0), "also used as a whole (reduce_sum at"),
        (lambda t, b: t[jnp.arange(BATCH)], "the same in every step"),
        (
            lambda t, b: t[(t[b["item"]][:, 0] > 0).astype(int)],
            "its ids follow from parameters",
        ),
        (
            lambda t, b: jax.lax.map(lambda i: t[i[None]][0], b["item"]),
            "inside a loop or conditional (scan at",
        ),
    ],
)
def test_other_uses_keep_a_table_whole_and_the_plan_says_why(
    forward: Forward, reason: str
) -> None:
    graph = assert_trains_alike(of_table(forward), optax.sgd(0.1), "auto")
    assert len(graph.notes) == 1
    assert graph.notes[0].startswith("params/t travels whole: ")
    assert reason in graph.notes[0]


@jax.custom_vjp
def scaled(t: Any, factor: Any) -> Any:
    return t * factor


scaled.defvjp(
    lambda t, f: (t * f, (t, f)), lambda kept, g: (g * kept[1], (g * kept[0]).sum())
)


def in_while(t: Any, batch: Any) -> Any:
    def add(carry: Any) -> Any:
        n, total = carry
        return n + 1, total + jax.lax.stop_gradient(t)[batch["item"]]

    zero = jnp.zeros((BATCH, DIM))
    return jax.lax.while_loop(lambda c: c[0] < 2, add, (0, zero))[1]


BESIDE_LITERALS: dict[str, Forward] = {
    "product": lambda t, b: (t * 2.0)[b["item"]],
    "maximum": lambda t, b: jnp.maximum(t, 0.0)[b["item"]],
    "select": lambda t, b: jnp.where(t > 0.5, t, 1.0)[b["item"]],
    "fori_loop": lambda t, b: jax.lax.fori_loop(
        0, 3, lambda n, x: x + t[b["item"]], jnp.zeros((BATCH, DIM))
    ),
    "while_loop": in_while,
    "cond": lambda t, b: jax.lax.cond(
        b["y"][0] > 0, lambda x, t: x * t[b["item"]], lambda x, t: t[b["item"]], 2.0, t
    ),
    "custom_vjp": lambda t, b: scaled(t, 2.0)[b["item"]],
    "scan": lambda t, b: jax.lax.scan(
        lambda x, i: (x * 0.5 + t[i], None), jnp.zeros(DIM), b["item"]
    )[0][None],
}


@pytest.mark.parametrize("use", BESIDE_LITERALS)
def test_a_table_is_used_beside_numbers_of_the_program(use: str) -> None:
    forward = BESIDE_LITERALS[use]
    graph = assert_trains_alike(of_table(forward), optax.sgd(0.1), "auto")
    assert not any("travels by rows" in note for note in graph.notes)


def test_tied_weights_travel_whole() -> None:
    def loss(model: Any, batch: Any) -> Any:
        rows = model.table(batch["item"])
        return optax.softmax_cross_entropy_with_integer_labels(
            model.table.attend(rows), batch["item"]
        ).mean()

    adapter = adapt(NnxEmbed(nnx.Rngs(0)), loss, seed=0)
    graph, _ = graph_of(adapter, optax.sgd(0.1), "auto")
    assert "also used as a whole (transpose at" in graph.notes[0]
    assert "(Embed.attend))" in graph.notes[0]


def test_optimizer_state_without_rows_keeps_a_table_whole() -> None:
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    graph = assert_trains_alike(of_table(two_lookups), tx, "auto")
    assert "the optimizer keeps opt/" in graph.notes[0]


def test_a_small_table_travels_whole() -> None:
    graph, _ = graph_of(of_table(two_lookups, 30), optax.sgd(0.1), "auto")
    assert "looks up 32 ids, and the table is small: 30 rows" in graph.notes[0]


def test_models_without_tables_are_left_alone() -> None:
    adapter = of_table(lambda t, b: b["y"][:, None] * t[:BATCH])
    graph, _ = graph_of(adapter, optax.adam(0.1), "auto")
    assert graph.notes == ()


def test_bytes_of_a_step_do_not_depend_on_the_table() -> None:
    def nbytes(rows: int, sparse: Any) -> int:
        adapter = of_table(two_lookups, rows)
        place = lambda sizes: dict.fromkeys(sizes, PS)
        step = TrainStep(
            adapter, optax.adagrad(0.1), arrangement=Arrangement(place), sparse=sparse
        )
        graph = step.graph(batch)
        home = DeviceSpec.from_string(WORKER)
        planned = plan(graph, tasks=[PS, WORKER], driver=WORKER, default=home)
        assert all(note in str(planned) for note in graph.notes)
        return planned.nbytes_per_step

    assert nbytes(1000, "auto") == nbytes(100_000, "auto")
    assert nbytes(100_000, "off") > 20 * nbytes(100_000, "auto")


def fit(ids: Any, forward: Forward | None = None) -> Trainer:
    forward = forward or (lambda t, b: t[b["ids"]])

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((forward(params["t"], batch) @ params["w"] - batch["y"]) ** 2)

    data = {"ids": ids, "y": batch["y"]}
    variables = Table().init(jax.random.key(0), batch["ids"])
    trainer = Trainer(Table(), loss, optax.sgd(0.1), variables=variables)
    trainer.fit(data, steps=2, batch_size=BATCH, progress=False)
    return trainer


@pytest.mark.parametrize("bad", [ROWS, -1, 2**31 - 1, -(2**31) + 1])
def test_ids_out_of_range_are_refused_before_they_change_anything(bad: int) -> None:
    ids = batch["item"].copy()
    ids[3] = bad
    with pytest.raises(
        RowIdError,
        match=rf"batch\['ids'\] has the id {re.escape(id_text(bad))} at step 0",
    ):
        fit(ids)


def test_float_ids_are_refused() -> None:
    with pytest.raises(DataError, match=r"'ids'\] float32\[8\].*integer"):
        fit(batch["item"].astype(np.float32))


def test_ids_that_are_to_be_dropped_are_no_error() -> None:
    def drop(t: Any, batch: Any) -> Any:
        return jnp.take(t, batch["ids"], axis=0, mode="fill", fill_value=0)

    trainer = fit(batch["item"] + ROWS, drop)
    assert np.isfinite(trainer.model()["t"]).all()


def test_sparse_is_one_of_four_words() -> None:
    with pytest.raises(ConfigError, match="sparse is 'yes'; it is one of"):
        Trainer(Table(), lambda p, b: 0.0, optax.sgd(0.1), sparse="yes")  # type: ignore[arg-type]
