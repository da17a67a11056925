"""Data, pipeline and tensor parallel, and tables on ps, in one graph."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.errors import RowIdError
from jgraph.plan.plan import Plan
from jgraph.train.pipeline.step import PipelineStep
from tests.support.layers import squares
from tests.support.plans import assert_same
from tests.support.servers import connected

ROWS, WIDTH, HIDDEN, BATCH, WORDS = 100, 4, 8, 16, 2
FOUR = [[f"/job:worker/task:{2 * row + column}" for column in (0, 1)] for row in (0, 1)]
MODEL = jg.mesh(model=2)  # over the devices of each worker

# Adagrad changes no row without a gradient, Adam does.
TX = optax.multi_transform(
    {"dense": optax.adam(1e-2), "rows": optax.adagrad(0.1)},
    {"stages": "dense", "tables": "rows"},
)


def by(*axes: str | None) -> NamedSharding:
    return NamedSharding(MODEL, P(*axes))


def layers(params: Any, h: Any) -> Any:
    """Two layers as Megatron spreads them: by columns, then by rows."""
    first = jax.lax.with_sharding_constraint(params["first"], by(None, "model"))
    second = jax.lax.with_sharding_constraint(params["second"], by("model", None))
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(h @ first), by(None, "model"))
    return h + hidden @ second


def below(params: Any, x: Any) -> Any:
    return layers(params, x["words"].mean(1) + x["other"])


def start() -> dict[str, Any]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.normal(0, 0.5, size=shape).astype(np.float32)

    stages = [
        {"first": normal(WIDTH, HIDDEN), "second": normal(HIDDEN, WIDTH)}
        for _ in range(2)
    ]
    return {"stages": stages, "tables": {"words": normal(ROWS, WIDTH)}}


def batches(count: int, size: int = BATCH) -> Iterator[tuple[dict[str, Any], Any]]:
    random = np.random.default_rng(1)
    for _ in range(count):
        words = random.choice([3, 7, 50, 99, 0], size=(size, WORDS))
        other, t = random.normal(size=(2, size, WIDTH)).astype(np.float32)
        yield {"words": words.astype(np.int32), "other": other}, t


def trained_by(**options: Any) -> PipelineStep:
    begun = start()
    options = {"microbatches": 2, "tasks": FOUR, **options}
    return jg.Pipeline([below, layers], squares, **options).step(
        begun["stages"],
        TX,
        tables=begun["tables"],
        partitioner=jg.fixed_size_partitioner(2),
    )


@jax.jit
def alone(params: Any, opt: Any, x: Any, t: Any) -> tuple[Any, Any, Any]:
    """The same step of plain JAX, dense, on one device."""

    def plain(params: Any, h: Any) -> Any:
        return h + jnp.tanh(h @ params["first"]) @ params["second"]

    def loss(params: Any) -> Any:
        h = params["tables"]["words"][x["words"]].mean(1) + x["other"]
        for tree in params["stages"]:
            h = plain(tree, h)
        return squares(h, t)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = TX.update(grads, opt, params)
    return value, optax.apply_updates(params, updates), opt


def check(step: PipelineStep, session: Session, params: Any) -> None:
    wanted = jax.tree.map(np.asarray, params)
    assert_same(step.params(session), wanted["stages"], exact=False)
    assert_same(step.tables(session), wanted["tables"], exact=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=4) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in (
                {"schedule": "gpipe"},
                {
                    "schedule": "interleaved",
                    "tasks": 1,
                    "replicas": 3,
                    "microbatches": 1,
                },
            )
        ),
    ],
    ids=["2 replicas, 1f1b", "2 replicas, gpipe", "3 replicas, interleaved"],
)
def test_training_is_that_of_plain_jax(session: Session, options: Any) -> None:
    step, params = trained_by(**options), start()
    opt = TX.init(params)
    for x, t in batches(3, 12):
        loss = session.run(step.train, x, t)
        wanted, params, opt = alone(params, opt, x, t)
        assert loss == pytest.approx(float(wanted), rel=1e-6)
    check(step, session, params)


def bytes_of(made: Plan) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for edge in made.edges:
        found[edge.src, edge.dst] += edge.nbytes
    return found


@pytest.fixture(scope="module")
def made(cluster: Cluster) -> Plan:
    with cluster.session() as session:
        return session.plan(trained_by().train, *next(batches(1)))


def test_each_replica_gets_the_rows_of_its_part_from_the_ps(made: Plan) -> None:
    assert {made.task_of(f"params/tables/words/part_{n}") for n in (0, 1)} == {
        "/job:ps/task:0",
        "/job:ps/task:1",
    }
    sent = bytes_of(made)
    part = BATCH // 2 * WORDS * WIDTH * 4  # at most: each row of it is sent once
    for ps in ("/job:ps/task:0", "/job:ps/task:1"):
        for replica, others in (FOUR[0], FOUR[1]):
            assert part <= sent[ps, replica] <= part + 16
            assert sent[ps, others] <= 16  # the number of updates
            assert not sent[others, ps] or others == made.program.driver
    of_stage = 2 * WIDTH * HIDDEN * 4
    for stage in (0, 1):
        home, other = FOUR[0][stage], FOUR[1][stage]
        assert made.task_of(f"params/stages/{stage}/first") == home
        assert sent[home, other] >= of_stage
        assert sent[other, home] >= of_stage
    assert made.nbytes_per_step == sum(sent.values())


def test_the_devices_of_each_worker_share_the_matrices_of_its_stage(
    made: Plan,
) -> None:
    digests = {s.digest: s.task for s in made.segments if "@" in s.label}
    spread = [
        jax.export.deserialize(bytearray(code.exported)).nr_devices
        for code in made.program.segments
        if code.digest in digests
    ]
    assert spread
    assert set(spread) == {2}


@pytest.mark.nightly  # smaller: the next one, and test_balance.py
def test_a_checkpoint_is_restored_by_any_number_of_replicas(
    session: Session, cluster: Cluster, tmp_path: Path
) -> None:
    params = start()
    opt = TX.init(params)
    others: list[Any] = [
        {"tasks": 2},  # one replica
        {"schedule": "interleaved", "tasks": 1, "replicas": 4},
    ]
    step = trained_by()
    for number, (x, t) in enumerate(batches(4)):
        if number in {1, 3}:
            path = step.save(session, tmp_path / str(number))
            cluster.reset()
            step = trained_by(**others.pop())
            again = cluster.session()
            assert step.restore(again, path) == number
            session.close()
            session = again
        session.run(step.train, x, t)
        _, params, opt = alone(params, opt, x, t)
    check(step, session, params)
    assert not others


def test_a_step_with_other_replicas_goes_on_with_the_same_variables(
    session: Session,
) -> None:
    params = start()
    opt = TX.init(params)
    steps = trained_by(), trained_by(tasks=2)
    for step, (x, t) in zip(steps, batches(2), strict=True):
        session.run(step.train, x, t)
        _, params, opt = alone(params, opt, x, t)
    check(steps[1], session, params)


@pytest.mark.bad_input_row(32)
def test_ids_without_a_row_in_one_replica_leave_all_as_it_was(session: Session) -> None:
    step = trained_by()
    session.initialize(step.variables)
    (x, t), (y, u) = batches(2)
    session.run(step.train, x, t)
    before = session.read(step.variables)
    y["words"][-1, -1] = ROWS  # the last replica has it
    for _ in range(2):
        with pytest.raises(RowIdError, match=r"x\['words'\].* has the id 100"):
            session.run(step.train, y, u)
    after = session.read(step.variables)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_what_was_trained_answers_from_the_tasks_of_the_first_replica(
    session: Session,
) -> None:
    step = trained_by()
    x, t = next(batches(1))
    session.run(step.train, x, t)
    params = start()
    _, params, _ = alone(params, TX.init(params), x, t)
    h = params["tables"]["words"][x["words"]].mean(1) + x["other"]
    for tree in params["stages"]:
        h = h + jnp.tanh(h @ tree["first"]) @ tree["second"]
    found = session.run(step.forward, x)
    np.testing.assert_allclose(found, np.asarray(h), rtol=1e-4, atol=1e-5)
    made = session.plan(step.forward, x)
    others = {*FOUR[1]} - {made.program.driver}
    assert others.isdisjoint(s.task for s in made.segments)
