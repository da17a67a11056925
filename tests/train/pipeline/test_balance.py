"""Layers cut into stages by the speed of tasks: the loss and gradients of any cut."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.placement.auto import AutoPlacement
from jgraph.client.session import Session
from jgraph.errors import FeedError, MemoryLimitError, PipelineError
from jgraph.plan.placement.spread import nbytes_of
from jgraph.plan.plan import plan
from jgraph.testing.memory_use import held_nbytes
from tests.support.balances import of_speeds
from tests.support.layers import BATCH, batches, layer, params_of, squares
from tests.support.plans import PS, WORKERS, assert_same

LAYERS, WIDTH = 5, 4
X = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")


def parts(layers: int, tasks: int) -> list[tuple[int, ...]]:
    """Returns how many layers each task may have, every way."""
    cuts = itertools.combinations(range(1, layers), tasks - 1)
    return [tuple(np.diff([0, *cut, layers]).tolist()) for cut in cuts]


def cut_like(
    part: Sequence[int],
    *,
    loss: Callable[[Any, Any], Any] = squares,
    layers: Sequence[Any] | None = None,
    **options: Any,
) -> jg.Pipeline:
    """Returns a pipeline over tasks so fast that each gets that many layers."""
    # The gradient of what the first layer takes is not computed: two products of three.
    seconds = [3 * count - (n == 0) for n, count in enumerate(part)]
    return jg.Pipeline(
        layers or [layer] * sum(part),
        loss,
        balance=of_speeds([1e9 * s for s in seconds]),
        **{"microbatches": 4, **options},
    )


def layers_of(pipe: jg.Pipeline) -> tuple[int, ...]:
    assert pipe.balance is not None
    return tuple(np.diff(pipe.balance.bounds).tolist())


def whole_loss(params: Any, x: Any, t: Any) -> Any:
    for tree in params:
        x = layer(tree, x)
    return squares(x, t)


@pytest.mark.parametrize("part", [*parts(LAYERS, 2), *parts(LAYERS, 3)], ids=str)
def test_loss_and_gradients_of_every_cut_are_those_of_the_model_in_one_piece(
    part: tuple[int, ...],
) -> None:
    pipe = cut_like(part)
    params, (x, t) = params_of(LAYERS), batches(1)[0]
    found = jax.jit(pipe.value_and_grad)(params, x, t)
    assert layers_of(pipe) == part
    wanted = jax.jit(jax.value_and_grad(whole_loss))(params, x, t)
    assert_same(found, wanted, exact=False)
    structures: list[Any] = [jax.tree.structure(one[1]) for one in (found, wanted)]
    assert structures[0] == structures[1]


def test_gpipe_and_gradients_of_the_input_go_with_a_cut() -> None:
    pipe = cut_like((3, 2), schedule="gpipe")
    params, (x, t) = params_of(LAYERS), batches(1)[0]

    def run(params: Any, x: Any, t: Any) -> Any:
        return pipe.value_and_grad(params, x, t, input_gradients=True)

    loss, gradients = jax.jit(run)(params, x, t)
    wanted = jax.jit(jax.value_and_grad(whole_loss, (0, 1)))(params, x, t)
    assert_same((loss, gradients), wanted, exact=False)


@pytest.mark.parametrize("layers", [8, 9])
def test_a_task_twice_as_slow_gets_about_half_as_many_layers(layers: int) -> None:
    pipe = jg.Pipeline(
        [layer] * layers, squares, microbatches=2, balance=of_speeds([1e9, 0.5e9])
    )
    pipe.step(params_of(layers), optax.sgd(0.1), x=X)
    assert layers_of(pipe) == (6, layers - 6)


def test_equal_tasks_get_equal_cuts() -> None:
    pipe = jg.Pipeline(
        [layer] * 8, squares, microbatches=2, balance=of_speeds([1e9] * 4)
    )
    pipe.step(params_of(8), optax.sgd(0.1), x=X)
    assert layers_of(pipe) == (2, 2, 2, 2)


def test_every_variable_is_with_its_layer_and_every_pass_with_its_stage() -> None:
    pipe = cut_like((1, 3), layers=[layer] * 4)
    step = pipe.step(params_of(4), optax.adam(0.1), x=X)
    graph, _ = step.train.trace(*batches(1)[0])
    made = plan(graph, tasks=PS + WORKERS, driver=WORKERS[0])
    for name in ("params", "opt/0/mu", "opt/0/nu"):
        homes = [made.task_of(f"{name}/{n}/w") for n in range(4)]
        assert homes == [WORKERS[0], *[WORKERS[1]] * 3]
    homes_of_passes = {
        s.label.split("@")[1][0]: s.task for s in made.segments if "@" in s.label
    }
    assert homes_of_passes == {"0": WORKERS[0], "1": WORKERS[1]}
    assert len({s.digest for s in made.segments if "@" in s.label}) == 5


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_bytes_of_a_balance_are_a_bound_that_is_near_those_of_the_plan(
    name: Any,
) -> None:
    width, size = 64, 256
    pipe = cut_like((2, 3, 1), layers=[layer] * 6, schedule=name)
    x = np.ones((size, width), np.float32)
    step = pipe.step(params_of(6, width), optax.adam(0.1), x=x)
    graph, _ = step.train.trace(x, x)
    made = plan(graph, tasks=PS + WORKERS, driver=PS[0])
    stored = Counter[str]()
    for spec in made.graph.variables:
        stored[made.variable_tasks[spec.key]] += nbytes_of(spec)
    values = held_nbytes(made.program)
    assert pipe.balance is not None
    for stage in pipe.balance.stages:
        # Nothing tells a cut what targets are; the last task has them all at once.
        targets = x.nbytes if stage.end == 6 else 0
        planned = stored[stage.task] + values[stage.task] - targets
        assert planned <= stage.nbytes <= 1.6 * planned


def test_a_limit_of_memory_leaves_a_task_fewer_layers() -> None:
    params, tx = params_of(8, 64), optax.adam(0.1)
    x = jax.ShapeDtypeStruct((8, 64), "float32")

    def made(limits: dict[Any, int]) -> jg.Pipeline:
        balance = of_speeds([3e9, 1e9], limits=limits)
        pipe = jg.Pipeline([layer] * 8, squares, microbatches=2, balance=balance)
        pipe.step(params, tx, x=x)
        return pipe

    free = made({})
    assert free.balance is not None
    assert layers_of(free) == (6, 2)
    # A layer has 49,920 bytes of parameters and state of Adam.
    tight = made({WORKERS[0]: free.balance.stages[0].nbytes - 2 * 49_920})
    assert layers_of(tight) == (4, 4)
    with pytest.raises(MemoryLimitError, match="8 layers do not fit 2 tasks") as caught:
        made(dict.fromkeys(WORKERS[:2], 100_000))
    assert caught.value.code == "JG-235"


def test_the_state_of_the_optimizer_counts_as_memory() -> None:
    def nbytes(tx: optax.GradientTransformation) -> int:
        pipe = cut_like((3, 2))
        pipe.step(params_of(LAYERS), tx, x=X)
        assert pipe.balance is not None
        return sum(stage.nbytes for stage in pipe.balance.stages)

    params = sum(leaf.nbytes for leaf in jax.tree.leaves(params_of(LAYERS)))
    assert nbytes(optax.adam(0.1)) - nbytes(optax.sgd(0.1)) == 2 * params


class Embed(nn.Module):
    @nn.compact
    def __call__(self, ids: Any) -> Any:
        return nn.Embed(10, WIDTH)(ids)


def test_modules_say_by_init_what_a_batch_is() -> None:
    layers: list[Any] = [Embed(), nn.Dense(WIDTH), nn.Dense(WIDTH), nn.Dense(10)]

    def loss(y: Any, t: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(y, t).mean()

    pipe = cut_like((2, 2), loss=loss, layers=layers)
    ids = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
    params: list[Any] = pipe.init(0, ids)
    assert len(params) == 4
    assert pipe.balance is None
    pipe.step(params, optax.sgd(0.1))
    assert len(layers_of(pipe)) == 2

    def whole(params: Any) -> Any:
        h: Any = ids
        for module, tree in zip(layers, params, strict=True):
            h = module.apply({"params": tree}, h)
        return loss(h, ids)

    assert_same(
        jax.jit(pipe.value_and_grad)(params, ids, ids),
        jax.jit(jax.value_and_grad(whole))(params),
        exact=False,
    )


def test_a_cut_is_made_once_and_other_batches_go_through_it() -> None:
    pipe = cut_like((3, 2))
    params, (x, t) = params_of(LAYERS), batches(1)[0]
    pipe.step(params, optax.sgd(0.1), x=X)
    cut = pipe.balance
    pipe.value_and_grad(params, x[:4], t[:4])
    pipe.step(params, optax.adam(0.1), x=x[:4])
    assert pipe.balance is cut


def test_a_pipeline_shows_which_layers_are_where() -> None:
    pipe = cut_like((3, 2))
    assert repr(pipe).endswith("at most 2 held; 5 layers, not yet cut>")
    pipe.step(params_of(LAYERS), optax.sgd(0.1), x=X)
    assert repr(pipe).endswith("at most 2 held; 3, 2 layers>")
    assert "/job:worker/task:0: layers 0-2, " in str(pipe.balance)
    assert "layers 0-2" in pipe._repr_html_()
    assert pipe.schedule.stages == 2


def refused(sentence: str, **changed: Any) -> None:
    options = {"microbatches": 2, "balance": of_speeds([1e9] * 2), **changed}
    layers = options.pop("layers", [layer] * 4)
    with pytest.raises(PipelineError, match=sentence) as caught:
        jg.Pipeline(layers, squares, **options)
    assert caught.value.code == "JG-234"


def test_what_cannot_be_balanced_is_refused_with_a_sentence() -> None:
    refused("balance is 'fast'; give what jg.auto", balance="fast")
    refused("balance is AutoPlanner.* give what", balance=of_speeds([1e9]).planner)
    refused("one stage for each task, and 'interleaved'", schedule="interleaved")
    refused("there are 'gpipe', '1f1b'", schedule="zigzag")
    refused("cannot cut 1 layers for 2 tasks; give at", layers=[layer])
    refused("cannot cut 0 layers for 2 tasks; give at", layers=[])
    refused("tasks is 3, and balance has 2 .*; give 1 to 2", tasks=3)
    refused("tasks is 0, and balance has 2", tasks=0)
    refused("tasks names '/job:worker/task:7', and bal", tasks=["/job:worker/task:7"])
    refused("tasks names '/job:worker', and balance kn", tasks=["/job:worker"])
    refused("'/job:worker/task:0' more than once", tasks=[WORKERS[0], WORKERS[0]])
    refused("layer 1 .'int'. is no layer", layers=[layer, 3])
    refused("replicas is 0; give how many", replicas=0)
    refused("replicas is 3, and balance has 2", replicas=3)
    refused("tasks is 2, and balance has 2 .*; give 1 to 1 for", tasks=2, replicas=2)
    rows = [[WORKERS[0]], ["/job:worker/task:7"]]
    refused("tasks names '/job:worker/task:7', and bal", tasks=rows)
    refused("it can be part of one replica only", tasks=[[WORKERS[0]], [WORKERS[0]]])


def test_a_cut_without_a_batch_or_for_layers_that_do_not_fit_is_refused() -> None:
    pipe, params, tx = cut_like((3, 2)), params_of(LAYERS), optax.sgd(0.1)
    with pytest.raises(PipelineError, match="nothing says what a batch is; give step"):
        pipe.step(params, tx)
    with pytest.raises(PipelineError, match="4 trees and there are 5 layers"):
        pipe.step(params[1:], tx, x=X)
    with pytest.raises(FeedError, match="x has 6 examples, which cannot be cut into 4"):
        pipe.step(params, tx, x=np.ones((6, WIDTH), np.float32))
    with pytest.raises(PipelineError, match=r"layer 0 .* not take float32\[2,7\]"):
        pipe.step(params, tx, x=np.ones((8, 7), np.float32))
    assert pipe.balance is None
    pipe.step(params, tx, x=X)
    with pytest.raises(PipelineError, match=r"layer 0 .* not take float32\[2,7\]"):
        pipe.value_and_grad(params, jnp.ones((8, 7)), jnp.ones((8, 4)))


def test_towers_of_layers_are_cut_for_the_slowest_of_each_stage() -> None:
    pipe = cut_like((3, 2))
    assert pipe.over(1) is pipe
    with pytest.raises(PipelineError, match="tasks names '/job:worker/task:2'"):
        jg.towers(pipe.loss, [WORKERS[:2], WORKERS[2:4]])
    with pytest.raises(PipelineError, match="give an array of devices"):
        jg.towers(pipe.loss, 2)
    balance, rows = of_speeds([8e9, 5e9, 2e9, 9e9]), [WORKERS[:2], WORKERS[2:4]]
    one = jg.Pipeline(
        [layer] * LAYERS, squares, microbatches=2, tasks=2, balance=balance
    )
    params, (x, t) = params_of(LAYERS), batches(1)[0]
    wanted = jax.jit(jax.value_and_grad(whole_loss))(params, x, t)
    both = jax.jit(jg.towers(one.loss, rows))(params, x, t)
    assert_same(both, wanted, exact=False)


@pytest.mark.parametrize(
    ("speeds", "wanted"),
    [
        ([8e9, 2e9, 8e9, 2e9], (4, 1)),
        ([8e9, 2e9, 2e9, 8e9], (3, 2)),  # as if each stage had the slowest task
        ([8e9, 2e9, 1e9, 8e9], (2, 3)),
        ([9e9, 9e9, 1e9, 9e9], (1, 4)),
    ],
)
def test_replicas_have_the_cut_whose_slowest_stage_of_all_is_fastest(
    speeds: list[float], wanted: tuple[int, int]
) -> None:
    pipe = jg.Pipeline(
        [layer] * LAYERS,
        squares,
        microbatches=2,
        replicas=2,
        balance=of_speeds(speeds),
    )
    assert pipe.replicas == (tuple(WORKERS[:2]), tuple(WORKERS[2:4]))
    step = pipe.step(params_of(LAYERS), optax.adam(0.1), x=X)
    assert layers_of(pipe) == wanted
    assert pipe.balance is not None
    (others,) = pipe.balance.others
    assert [stage.task for stage in others] == WORKERS[2:4]
    assert [s.end for s in others] == [s.end for s in pipe.balance.stages]
    slowest = max(s.seconds for s in (*pipe.balance.stages, *others))
    assert pipe.balance.slowest_s == slowest
    # The optimizer's state is on the first replica alone.
    assert all(
        other.nbytes < first.nbytes
        for other, first in zip(others, pipe.balance.stages, strict=True)
    )
    assert str(pipe.balance).startswith(f"{LAYERS} layers on 2 times 2 tasks: ")
    assert str(pipe.balance).count("/job:worker/task:") == 4
    homes = {v.spec.device.task_name for v in step.variables}
    assert homes == {*WORKERS[:2], None}  # the number of steps may be anywhere


@pytest.mark.parametrize("part", parts(LAYERS, 2), ids=str)
def test_loss_and_gradients_of_replicas_of_every_cut_are_those_of_one_piece(
    part: tuple[int, ...],
) -> None:
    seconds = [3 * count - (n == 0) for n, count in enumerate(part)]
    pipe = jg.Pipeline(
        [layer] * LAYERS,
        squares,
        microbatches=2,
        replicas=2,
        balance=of_speeds([1e9 * s for s in seconds] * 2),
    )
    params, (x, t) = params_of(LAYERS), batches(1)[0]
    found = jax.jit(pipe.value_and_grad)(params, x, t)
    assert layers_of(pipe) == part
    wanted = jax.jit(jax.value_and_grad(whole_loss))(params, x, t)
    assert_same(found, wanted, exact=False)


def test_tasks_are_the_first_of_the_balance_or_those_that_are_named() -> None:
    balance = of_speeds([1e9] * 3)
    for tasks, wanted in (
        (None, WORKERS[:3]),
        (2, WORKERS[:2]),
        ([WORKERS[2], WORKERS[0]], [WORKERS[2], WORKERS[0]]),
    ):
        pipe = jg.Pipeline(
            [layer] * 3, squares, microbatches=1, tasks=tasks, balance=balance
        )
        assert pipe.devices == wanted


def trained(step: Any, session: Session, count: int, skip: int = 0) -> None:
    for x, t in batches(count + skip)[skip:]:
        session.run(step.train, x, t)


def test_a_checkpoint_of_one_cut_is_restored_to_another(
    session: Session, cluster: Cluster, tmp_path: Path
) -> None:
    tx = optax.adam(0.1)
    step = cut_like((3, 1), layers=[layer] * 4).step(params_of(4), tx, x=X)
    trained(step, session, 2)
    path = step.save(session, tmp_path / "two")
    trained(step, session, 2, skip=2)
    wanted = step.params(session)
    for other in (
        cut_like((1, 3), layers=[layer] * 4),
        jg.Pipeline(
            [layer] * 4, squares, microbatches=2, schedule="interleaved", tasks=2
        ),
    ):
        cluster.reset()
        with cluster.session() as again:
            step = other.step(params_of(4), tx, x=X)
            assert step.restore(again, path) == 2
            trained(step, again, 2, skip=2)
            assert_same(step.params(again), wanted, exact=False)


def test_tables_stay_below_a_pipeline_that_was_cut(session: Session) -> None:
    def below(params: Any, x: Any) -> Any:
        return layer(params, x["words"].mean(1))

    pipe = cut_like((1, 2), layers=[below, layer, layer])
    random = np.random.default_rng(0)
    table = random.normal(size=(100, WIDTH)).astype(np.float32)
    x = {"words": random.integers(0, 100, (BATCH, 2)).astype(np.int32)}
    t = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    params = params_of(3)
    step = pipe.step(params, optax.sgd(0.5), x=x, tables={"words": table})

    def loss(params: Any, table: Any) -> Any:
        return whole_loss(params[1:], below(params[0], {"words": table[x["words"]]}), t)

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, table)
    assert session.run(step.train, x, t) == pytest.approx(float(value), rel=1e-5)
    moved = jax.tree.map(lambda w, g: np.asarray(w - 0.5 * g), (params, table), grads)
    assert_same(step.params(session), moved[0], exact=False)
    assert_same(step.tables(session)["words"], moved[1], exact=False)
    assert layers_of(pipe) == (1, 2)


def test_forward_and_apply_go_through_the_stages_of_a_cut(session: Session) -> None:
    pipe, params = cut_like((3, 2)), params_of(LAYERS)
    x, _ = batches(1)[0]
    step = pipe.step(params, optax.sgd(0.1), x=x)
    wanted = x
    for tree in params:
        wanted = layer(tree, wanted)
    assert_same(session.run(step.forward, x), np.asarray(wanted), exact=False)
    assert_same(pipe.apply(params, x), wanted, exact=False)


@pytest.mark.nightly  # smaller: the cuts above, tests/client/placement
@pytest.mark.slow
@pytest.mark.procs
def test_a_measured_cluster_of_processes_trains_what_it_cut() -> None:
    layers, width, batch = 6, 256, 64
    # So small that no layer makes rounding errors larger.
    params: Any = jax.tree.map(lambda w: w / 16, params_of(layers, width))
    tx = optax.sgd(0.1)
    x, t = np.random.default_rng(0).normal(size=(2, batch, width)).astype(np.float32)
    with jg.LocalCluster(ps=0, workers=2) as cluster:
        balance = jg.auto(cluster)
        assert isinstance(balance, AutoPlacement)
        pipe = jg.Pipeline([layer] * layers, squares, microbatches=2, balance=balance)
        step = pipe.step(params, tx, x=x)
        assert sum(layers_of(pipe)) == layers
        with cluster.session() as session:
            losses = [session.run(step.train, x, t) for _ in range(3)]
            after = step.params(session)
            homes = [
                session.plan(step.train, x, t).task_of(f"params/{n}/w")
                for n in range(layers)
            ]
    first, second = layers_of(pipe)
    assert homes == [WORKERS[0]] * first + [WORKERS[1]] * second
    opt = tx.init(params)
    for loss in losses:
        wanted, grads = jax.jit(jax.value_and_grad(whole_loss))(params, x, t)
        assert loss == pytest.approx(float(wanted), rel=1e-5)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
    assert_same(after, jax.tree.map(np.asarray, params), exact=False)
