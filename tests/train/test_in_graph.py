"""One client, one graph over many tasks: pipelines, towers, and both with a ps."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.errors import (
    ConfigError,
    DeviceSpecError,
    FeedError,
    GraphError,
    UnknownDeviceError,
)
from tests.support.layers import (
    BATCH,
    STEPS,
    WORKERS,
    batches,
    layer,
    params_of,
    squares,
)
from tests.support.models import NnxMLP, batches_of, cross_entropy, data, nnx_loss
from tests.support.plans import assert_same


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1f1b", 2),
        pytest.param("gpipe", 2, marks=pytest.mark.nightly),
        ("interleaved", 4),
    ],
)
def test_training_a_pipeline_is_training_the_model_in_one_piece(
    session: Session, schedule: Any, stages: int
) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    pipe = jg.Pipeline(
        [layer] * stages, squares, microbatches=4, schedule=schedule, tasks=WORKERS
    )
    step = pipe.step(params_of(stages), tx)

    @jax.jit
    def whole(params: Any, opt: Any, x: Any, t: Any) -> Any:
        def loss(params: Any) -> Any:
            return squares(pipe.apply(params, x), t)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = tx.update(grads, opt, params)
        return value, optax.apply_updates(params, updates), opt

    params = params_of(stages)
    opt = tx.init(params)
    for x, t in batches(3):
        loss = session.run(step.train, x, t)
        wanted, params, opt = whole(params, opt, x, t)
        assert loss == pytest.approx(float(wanted), rel=1e-6)
    assert_same(step.params(session), jax.tree.map(np.asarray, params), exact=False)


def test_a_cluster_with_fewer_tasks_than_the_pipeline_says_which_one_is_missing(
    session: Session,
) -> None:
    pipe = jg.Pipeline([layer] * 3, squares, microbatches=2)
    step = pipe.step(params_of(3), optax.sgd(0.1))
    with pytest.raises(UnknownDeviceError, match="worker/task:2' is not in this"):
        session.plan(step.train, *batches(1)[0])


def test_the_workers_compile_a_pass_once_for_all_microbatches(
    session: Session, cluster: Cluster
) -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=8)
    step = pipe.step(params_of(2), optax.sgd(0.1))
    made = session.plan(step.train, *batches(1)[0])
    passes = [s for s in made.segments if "@" in s.label]
    assert (len(passes), len({s.digest for s in passes})) == (24, 5)


def test_towers_on_all_workers_train_as_synchronous_training_does(
    session: Session, cluster: Cluster
) -> None:
    tx = optax.sgd(0.1, momentum=0.9)
    trainer = jg.Trainer(
        NnxMLP(rngs=nnx.Rngs(0)),
        nnx_loss,
        tx,
        cluster=cluster,
        strategy=jg.SyncPS(step_timeout_s=20),
    )
    x, y = data()
    stream = batches_of({"x": x, "y": y}, BATCH, 0)
    trained = trainer.fit((x, y), steps=STEPS, batch_size=BATCH, progress=False)

    graph, params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))
    state = {
        "params": nnx.to_pure_dict(params),
        "opt": tx.init(nnx.to_pure_dict(params)),
    }
    leaves, tree = jax.tree.flatten(state)
    variables = [jg.Variable(f"v{n}", leaf) for n, leaf in enumerate(leaves)]

    def loss(params: Any, batch: Any) -> Any:
        like = nnx.state(NnxMLP(rngs=nnx.Rngs(0)), nnx.Param)
        nnx.replace_by_pure_dict(like, params)
        return cross_entropy(nnx.merge(graph, like)(batch["x"]), batch["y"])

    @jg.function
    def train(batch: Any) -> Any:
        now = jax.tree.unflatten(tree, [v[...] for v in variables])
        value, grads = jg.towers(loss, WORKERS)(now["params"], batch)
        updates, opt = tx.update(grads, now["opt"], now["params"])
        new = {"params": optax.apply_updates(now["params"], updates), "opt": opt}
        for variable, leaf in zip(variables, jax.tree.leaves(new), strict=True):
            variable[...] = leaf
        return value

    for _ in range(STEPS):
        both = [next(stream) for _ in range(WORKERS)]
        session.run(train, {k: np.concatenate([b[k] for b in both]) for k in both[0]})
    values = [session.read([v])[v.name] for v in variables]
    wanted = nnx.to_pure_dict(nnx.state(trained.model(), nnx.Param))
    assert_same(
        jax.tree.leaves(jax.tree.unflatten(tree, values)["params"]),
        [np.asarray(leaf) for leaf in jax.tree.leaves(wanted)],
        exact=False,
    )


def test_gradients_of_towers_are_combined_on_the_ps(
    session: Session, cluster: Cluster
) -> None:
    w = jg.Variable("w", jnp.ones((64, 64)), device="/job:ps/task:1")

    @jg.function
    def train(x: Any) -> Any:
        loss, gradient = jg.towers(lambda w, x: ((x @ w) ** 2).mean(), WORKERS)(
            w[...], x
        )
        w[...] = w[...] - gradient
        return loss

    made = session.plan(train, jnp.ones((4, 64)))
    sent = {(e.src, e.dst) for e in made.edges if e.nbytes >= 64 * 64 * 4}
    assert sent == {
        (a, b)
        for worker in cluster.tasks("worker")
        for a, b in [("/job:ps/task:1", worker), (worker, "/job:ps/task:1")]
    }
    towers = [s.task for s in made.segments if "dot_general" in s.label]
    assert sorted(towers) == cluster.tasks("worker")


def test_embeddings_on_a_ps_below_a_pipeline_over_the_workers(
    session: Session, cluster: Cluster
) -> None:
    rows, width, rate = 1000, 4, 0.5
    start = np.random.default_rng(1).normal(size=(rows, width)).astype(np.float32)
    table = jg.Variable("table", start, device="/job:ps/task:0")
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=2)
    dense = [
        jg.Variable(f"{name}{n}", value, device=pipe.devices[n])
        for n, tree in enumerate(params_of(2))
        for name, value in sorted(tree.items())
    ]
    tree = jax.tree.structure(params_of(2))

    @jg.function
    def train(ids: Any, t: Any) -> Any:
        params = jax.tree.unflatten(tree, [v[...] for v in dense])
        loss, (grads, into) = pipe.value_and_grad(
            params, table[ids], t, input_gradients=True
        )
        table[...] = table[...].at[ids].add(-rate * into)
        for variable, gradient in zip(dense, jax.tree.leaves(grads), strict=True):
            variable[...] = variable[...] - rate * gradient
        return loss

    ids = np.array([3, 7, 3, 999, 0, 1, 2, 500], np.int32)
    (t,) = batches(1)[0, :1]

    def whole(table: Any, params: Any) -> Any:
        return squares(pipe.apply(params, table[ids]), t)

    wanted, (of_table, of_dense) = jax.value_and_grad(whole, (0, 1))(
        start, params_of(2)
    )
    made = session.plan(train, ids, t)
    assert made.nbytes_per_step < table.spec.aval.size  # rows travel, the table stays
    assert session.run(train, ids, t) == pytest.approx(float(wanted), rel=1e-6)
    values = session.read([table, *dense])
    assert_same(values["table"], start - rate * np.asarray(of_table), exact=False)
    old, grads = jax.tree.leaves(params_of(2)), jax.tree.leaves(of_dense)
    new = [np.asarray(p - rate * g) for p, g in zip(old, grads, strict=True)]
    assert_same([values[v.name] for v in dense], new, exact=False)


def test_towers_without_a_task_and_batches_that_cannot_be_cut_are_refused() -> None:
    nothing: Any
    for nothing in (0, [], 2.5, "worker:0", None):
        with pytest.raises(ConfigError, match="towers need a task; give how many"):
            jg.towers(squares, nothing)
    rows: Any = [["worker:0"], ["worker:1"]]  # only of a pipeline
    with pytest.raises(DeviceSpecError, match="is not a device; write a string"):
        jg.towers(squares, rows)
    run = jg.towers(lambda w, x: (w * x).mean(), 2)
    with pytest.raises(FeedError, match="batch has 3 examples, which cannot be cut"):
        run(jnp.ones(()), jnp.ones(3))
    with pytest.raises(FeedError, match="batch has no examples"):
        run(jnp.ones(()), [])
    with pytest.raises(FeedError, match="batch has 2 and 4 examples"):
        run(jnp.ones(()), [jnp.ones(2), jnp.ones(4)])


def test_a_loss_of_towers_that_is_no_scalar_is_named_with_its_shape() -> None:
    def errors(w: Any, x: Any) -> Any:
        return w * x

    run, nothing = jg.towers(errors, 2), cast("Any", None)
    with pytest.raises(GraphError, match=r"loss 'errors' returned .* shape \(3,\); "):
        run(jnp.ones(()), jnp.ones(6))
    with pytest.raises(ConfigError, match="loss is None; give a function"):
        jg.towers(nothing, 2)
