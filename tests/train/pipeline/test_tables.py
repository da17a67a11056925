"""Embeddings on parameter servers below a pipeline, and checkpoints of both."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.errors import CheckpointError, PipelineError, RowIdError
from jgraph.train.pipeline.step import PipelineStep
from tests.support.layers import squares
from tests.support.plans import assert_same

ROWS, WIDTH, BATCH, WORDS = 1000, 4, 8, 2
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))


def below(params: Any, x: Any) -> Any:
    return jnp.tanh(x["words"].mean(1) @ params + x["other"])


def above(params: Any, h: Any) -> Any:
    return h @ params


def start() -> tuple[list[Any], Any]:
    random = np.random.default_rng(0)
    shapes = (WIDTH, WIDTH), (WIDTH, 1), (ROWS, WIDTH)
    first, second, table = (random.normal(size=s).astype(np.float32) for s in shapes)
    return [first, second], table


def batches(count: int) -> Iterator[tuple[dict[str, Any], Any]]:
    random = np.random.default_rng(1)
    for _ in range(count):
        words = random.choice([3, 7, 500, 999, 0], size=(BATCH, WORDS))
        other = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
        yield {"words": words.astype(np.int32), "other": other}, other[:, :1]


def pipeline(table: Any = None, shards: int = 2) -> PipelineStep:
    params, begin = start()
    pipe = jg.Pipeline([below, above], squares, microbatches=2)
    return pipe.step(
        params,
        TX,
        tables={"words": begin if table is None else table},
        partitioner=jg.fixed_size_partitioner(shards),
    )


@jax.jit
def alone(params: Any, opt: Any, x: Any, t: Any) -> tuple[Any, Any, Any]:
    """The same step of one process, dense."""

    def loss(params: Any) -> Any:
        words = params["tables"]["words"][x["words"]]
        h = below(params["stages"][0], {**x, "words": words})
        return squares(above(params["stages"][1], h), t)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = TX.update(grads, opt, params)
    return value, optax.apply_updates(params, updates), opt


def begun() -> tuple[Any, Any]:
    stages, table = start()
    params = {"stages": stages, "tables": {"words": table}}
    return params, TX.init(params)


def check(step: PipelineStep, session: Session, params: Any) -> None:
    wanted = jax.tree.map(np.asarray, params)
    assert_same(step.params(session), wanted["stages"], exact=False)
    assert_same(step.tables(session), wanted["tables"], exact=False)


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_training_is_that_of_one_process(session: Session, shards: int) -> None:
    step = pipeline(shards=shards)
    params, opt = begun()
    for x, t in batches(3):
        loss = session.run(step.train, x, t)
        wanted, params, opt = alone(params, opt, x, t)
        assert loss == pytest.approx(float(wanted), rel=1e-5)
    check(step, session, params)


def test_only_rows_of_the_batch_travel(session: Session) -> None:
    made = session.plan(pipeline().train, *next(batches(1)))
    table = ROWS * WIDTH * 4
    assert made.nbytes_per_step < table / 4
    homes = {made.task_of(f"params/tables/words/part_{n}") for n in (0, 1)}
    assert homes == {"/job:ps/task:0", "/job:ps/task:1"}
    assert made.task_of("params/stages/1") == "/job:worker/task:1"


def test_a_restored_pipeline_goes_on_as_one_that_was_never_stopped(
    session: Session, cluster: Cluster, tmp_path: Path
) -> None:
    step = pipeline()
    params, opt = begun()
    for number, (x, t) in enumerate(batches(4)):
        if number == 2:
            path = step.save(session, tmp_path / "two")
            cluster.reset()
            step = pipeline(np.zeros((ROWS, WIDTH)).astype(np.float32), shards=1)
            again = cluster.session()
            assert step.restore(again, path) == 2
            session.close()
            session = again
        session.run(step.train, x, t)
        _, params, opt = alone(params, opt, x, t)
    check(step, session, params)
    assert session.read([step.variables[0]])["global_step"] == 4


def test_a_checkpoint_of_another_pipeline_is_refused(
    session: Session, tmp_path: Path
) -> None:
    step = pipeline()
    session.initialize(step.variables)
    path = step.save(session, tmp_path / "here")
    with pytest.raises(CheckpointError, match="exists"):
        step.save(session, path)
    with pytest.raises(CheckpointError, match="tables"):
        pipeline(np.zeros((5, WIDTH), np.float32)).restore(session, path)


def test_wrong_ids_are_refused(session: Session) -> None:
    step, (x, t) = pipeline(), next(batches(1))
    with pytest.raises(PipelineError, match=r"x\['words'\] has to be int32 ids"):
        session.run(step.train, {"other": x["other"]}, t)
    with pytest.raises(RowIdError, match=r"x\['words'\].* has the id 1000"):
        session.run(step.train, {**x, "words": x["words"] + 1}, t)
    least = np.full_like(x["words"], -(2**31))
    with pytest.raises(RowIdError, match=r"x\['words'\].* has the id -2147483647 or"):
        session.run(step.train, {**x, "words": least}, t)


def test_refused_ids_leave_parameters_counters_and_optimizer_as_they_were(
    session: Session,
) -> None:
    params, table = start()
    step = jg.Pipeline([below, above], squares, microbatches=2).step(
        params,
        optax.adam(0.1),
        tables={"words": table},
        partitioner=jg.fixed_size_partitioner(2),
    )
    session.initialize(step.variables)
    (x, t), (y, u) = batches(2)
    session.run(step.train, x, t)
    before = session.read(step.variables)
    for _ in range(3):
        with pytest.raises(RowIdError):
            session.run(step.train, {**y, "words": y["words"] + 1}, u)
    after = session.read(step.variables)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
