"""Tables of a run in one process: updated where they lie, ids checked before."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, strategies as st

from jgraph.errors import RowIdError
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.step.applied import IdCheck, id_check_of
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.local import LocalRunner
from jgraph.train.trainer import Trainer

ROWS, BATCH = 40, 8
random = np.random.default_rng(0)
DATA = {
    "user": random.integers(0, ROWS, (64, 3)).astype(np.int32),
    "item": random.integers(0, ROWS, 64).astype(np.int32),
    "y": random.normal(size=64).astype(np.float32),
}


class TwoTables(nnx.Module):
    def __init__(self) -> None:
        self.user = nnx.Embed(ROWS, 4, rngs=nnx.Rngs(0))
        self.item = nnx.Embed(ROWS, 4, rngs=nnx.Rngs(1))


def loss(model: Any, batch: Any) -> Any:
    score = (model.user(batch["user"]).sum(1) * model.item(batch["item"])).sum(-1)
    return jnp.mean((score - batch["y"]) ** 2)


def adam_of_users_alone() -> Any:
    return optax.multi_transform(
        {"user": optax.adam(0.1), "item": optax.sgd(0.1)},
        {"user": "user", "item": "item"},
    )


def graph_of(tx: Any) -> Any:
    batch = as_dataset(DATA).step_avals(BATCH)
    step = TrainStep(adapt(TwoTables(), loss, seed=0), tx, alone=True)
    return step.graph(batch)


def operations(graph: Any) -> list[str]:
    return [equation.primitive.name for equation in graph.equations]


def trained(tx: Any, sparse: Any) -> list[np.ndarray[Any, Any]]:
    trainer = Trainer(TwoTables(), loss, tx, sparse=sparse)
    trainer.fit(DATA, steps=6, batch_size=BATCH, progress=False)
    return [np.asarray(value) for value in trainer.current_values()]


def test_a_table_whose_update_is_of_all_rows_is_an_array_like_others() -> None:
    graph = graph_of(optax.adam(0.1))
    assert "unique_rows" not in operations(graph)
    assert [note.split(maxsplit=1)[1] for note in graph.notes] == [
        "is read and updated whole, where it lies"
    ] * 2


def test_no_result_of_a_step_waits_for_the_check_of_its_ids() -> None:
    assert graph_of(optax.adam(0.1)).fetches == ("['loss']",)


def test_a_table_beside_it_whose_rows_alone_change_goes_by_rows() -> None:
    graph = graph_of(adam_of_users_alone())
    assert operations(graph).count("unique_rows") == 1
    notes = dict(note.split(maxsplit=1) for note in graph.notes)
    assert notes["params/user/embedding"].startswith("is read and updated whole")
    assert notes["params/item/embedding"].startswith("travels by rows: at most 8 of")


@pytest.mark.parametrize("make", [lambda: optax.adam(0.1), adam_of_users_alone])
def test_numbers_are_those_of_arrays_bit_for_bit(make: Any) -> None:
    for ours, plain in zip(
        trained(make(), "auto"), trained(make(), "off"), strict=True
    ):
        np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("table", ["user", "item"])
def test_an_id_without_a_row_is_named_with_its_table_and_changes_nothing(
    table: str,
) -> None:
    bad = DATA | {table: np.full_like(DATA[table], ROWS)}
    trainer = Trainer(TwoTables(), loss, adam_of_users_alone())
    before = [np.array(value) for value in trainer.current_values()]
    told = rf"has the id {ROWS} at step 0, and params/{table}/embedding has {ROWS} rows"
    with pytest.raises(RowIdError, match=told):
        trainer.fit(bad, steps=3, batch_size=BATCH, progress=False)
    for now, then in zip(trainer.current_values(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert trainer.fit(DATA, steps=2, batch_size=BATCH, progress=False).steps == 2


def test_ids_are_looked_at_before_the_step_on_the_batch_before_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def note_calls(cls: Any, name: str, word: str) -> None:
        method = getattr(cls, name)

        def noted(*args: Any) -> Any:
            calls.append(word)
            return method(*args)

        monkeypatch.setattr(cls, name, noted)

    note_calls(IdCheck, "look", "look")
    note_calls(LocalRunner, "_one", "step")
    trainer = Trainer(TwoTables(), loss, optax.sgd(0.1))
    trainer.fit(DATA, steps=3, batch_size=BATCH, progress=False)
    assert calls == ["look", "look", "step", "look", "step", "step"]


IDS_OF: dict[str, Callable[[Any], Any]] = {
    "as they come": lambda ids: ids,
    "some of them": lambda ids: ids[:, 1:],
    "turned": lambda ids: ids.T[::-1],
    "repeated": lambda ids: jnp.broadcast_to(ids[None], (2, *ids.shape)),
    "as int8": lambda ids: ids.astype(jnp.int8),
    "as int16": lambda ids: ids.astype(jnp.int16),
    "as uint32": lambda ids: ids.astype(jnp.uint32),
    "one more": lambda ids: ids + 1,
    "half": lambda ids: ids // 2,
    "clipped": lambda ids: jnp.clip(ids, 0, 299),
}
AS_THEY_COME = {"as they come", "some of them", "turned", "repeated"}


@functools.cache
def check_of(way: str, dtype: str) -> IdCheck:
    model = nnx.Embed(300, 2, rngs=nnx.Rngs(0))

    def loss_of(model: Any, batch: Any) -> Any:
        return model(IDS_OF[way](batch["ids"])).sum()

    batch = as_dataset({"ids": np.zeros((4, 3), dtype)}).step_avals(2)
    step = TrainStep(adapt(model, loss_of, seed=0), optax.sgd(0.1), alone=True)
    check = id_check_of(step, batch)
    assert check is not None
    return check


@pytest.mark.parametrize("way", IDS_OF)
def test_ids_of_the_batch_are_looked_at_without_jax_where_they_are_used_as_they_come(
    way: str,
) -> None:
    one = np.int32(1)
    look = check_of(way, "int32").look(one, one, np.full((2, 3), 7, np.int32))
    assert (look is None) == (way in AS_THEY_COME)


@given(
    st.sampled_from(sorted(IDS_OF)),
    st.sampled_from(["int8", "int32", "uint8", "uint32"]),
    st.lists(st.integers(-130, 305), min_size=6, max_size=6),
)
@pytest.mark.hypothesis
def test_no_id_without_a_row_passes_where_jax_is_not_asked(
    way: str, dtype: str, numbers: list[int]
) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    ids = np.clip(numbers, least, most).astype(dtype).reshape(2, 3)
    check, one = check_of(way, dtype), np.int32(1)
    used = np.asarray(IDS_OF[way](jnp.asarray(ids)))
    error = check.error(check.look(one, one, ids), 1)
    assert (error is not None) == bool(((used < 0) | (used >= 300)).any())
