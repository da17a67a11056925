"""What a model has beside trained parameters: state, frozen parts, averages, noise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.errors import ConfigError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import eval_graph
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan
from jgraph.train.model.adapters import adapt
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.sync_step import SyncStep
from jgraph.train.step.train_step import TrainStep
from jgraph.train.trainer import Trainer
from tests.support.graph_interpreter import run_program
from tests.support.models import (
    LinenMLP,
    NnxMLP,
    NnxNorm,
    data,
    linen_loss,
    nnx_loss,
)

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
BATCH: Any = tuple(data(8))


def make_step(model: nnx.Module, tx: Any, wrt: Any = nnx.Param, **options: Any) -> Any:
    adapter = adapt(model, options.pop("loss", nnx_loss), seed=0, wrt=wrt)
    on_ps = Arrangement(lambda sizes: dict.fromkeys(sizes, PS))
    return TrainStep(adapter, tx, arrangement=on_ps, **options)


def planned(step: TrainStep) -> Plan:
    return plan(
        step.graph(BATCH),
        tasks=[PS, WORKER],
        driver=WORKER,
        default=DeviceSpec.from_string(WORKER),
    )


def sent(found: Plan, src: TaskName, dst: TaskName) -> int:
    return sum(e.nbytes for e in found.edges if (e.src, e.dst) == (src, dst))


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class Adapted(nnx.Module):
    """A base with a low-rank adapter, and a constant."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.base = nnx.Linear(4, 8, rngs=rngs)
        self.lora = nnx.LoRA(8, 2, 2, rngs=rngs)
        self.scale = nnx.Cache(jnp.ones(3))

    def __call__(self, x: Any) -> Any:
        return self.lora(self.base(x)) * self.scale[...].mean()


def test_only_what_wrt_selects_is_trained() -> None:
    model = Adapted(rngs=nnx.Rngs(0))
    trainer = Trainer(model, nnx_loss, optax.adam(0.1), wrt=nnx.LoRAParam)
    run = trainer.fit(data(), steps=5, batch_size=8, progress=False)
    assert [n for n in trainer.names if n.startswith("params/")] == [
        "params/lora/lora_a",
        "params/lora/lora_b",
    ]
    new = run.model()
    np.testing.assert_array_equal(new.base.kernel[...], model.base.kernel[...])
    assert not np.allclose(new.lora.lora_b[...], model.lora.lora_b[...])


def test_frozen_variables_send_nothing_back() -> None:
    step = make_step(Adapted(rngs=nnx.Rngs(0)), optax.adam(0.1), nnx.LoRAParam)
    assert sent(planned(step), WORKER, PS) == nbytes(step.adapter.params)
    constants = {"state/base/bias", "state/base/kernel", "state/scale"}
    assert step.constants(BATCH) == constants
    update = plan(
        SyncStep(step, BATCH, contributions=2).apply_graph(),
        tasks=[PS, WORKER],
        driver=PS,
    )
    used = {v.name for p in update.program.partitions for v in p.variables}
    assert "mean/params/lora/lora_a" in used
    assert not any("state/" in name for name in used)


def test_parameters_set_to_zero_send_no_gradient() -> None:
    labels = {"layers": {"0": "frozen", "1": "trained"}}
    parts = {"trained": optax.adam(0.1), "frozen": optax.set_to_zero()}
    step = make_step(NnxMLP(rngs=nnx.Rngs(0)), optax.multi_transform(parts, labels))
    up = sent(planned(step), WORKER, PS)
    assert up == nbytes(step.adapter.params["layers"]["1"])


def test_masked_transformation_passes_the_other_gradients_on_as_in_optax() -> None:
    mask = {"layers": {"0": False, "1": True}}
    tx = optax.masked(optax.set_to_zero(), mask)
    model = NnxMLP(rngs=nnx.Rngs(0))
    new = (
        Trainer(model, nnx_loss, optax.chain(optax.sgd(0.1), tx))
        .fit(data(), steps=3, batch_size=8, progress=False)
        .model()
    )
    frozen, trained = new.layers[1].kernel[...], new.layers[0].kernel[...]
    np.testing.assert_array_equal(frozen, model.layers[1].kernel[...])
    assert not np.allclose(trained, model.layers[0].kernel[...])


def averaged(decay: float) -> optax.GradientTransformation:
    """Keeps a moving average of the parameters, as users write it."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new = optax.apply_updates(params, updates)
        return updates, optax.incremental_update(new, state, 1 - decay)

    return optax.GradientTransformation(lambda params: params, update)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.chain(optax.adam(0.1), averaged(0.9)),
        pytest.param(
            lambda: optax.chain(optax.adam(0.1), optax.ema(0.9)),
            marks=pytest.mark.nightly,
        ),
        lambda: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    ],
    ids=["params_ema", "ema", "MultiSteps"],
)
def test_averages_and_accumulated_gradients_are_those_of_one_process(
    make: Callable[[], Any],
) -> None:
    step = make_step(NnxMLP(rngs=nnx.Rngs(0)), make())
    program, graph = planned(step).program, step.graph(BATCH)
    values = [np.asarray(v) for v in step.initial_values]
    store = {("", n): v for n, v in zip(step.names, values, strict=True)}
    feeds = [*BATCH, np.int32(0), np.int32(0)]
    given = dict(zip([f.name for f in graph.feeds], feeds, strict=True))
    whole = jax.jit(lambda v: eval_graph(graph, v, feeds)[1])
    for _ in range(3):
        run_program(program, store, {n: given[n] for n, _ in program.feeds})
        values = whole(values)
    for name, value in zip(step.names, values, strict=True):
        np.testing.assert_allclose(store["", name], value, 1e-5, 1e-6)


def losses(seed: int) -> list[float]:
    trainer = Trainer(NnxNorm(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1), seed=seed)
    run = trainer.fit(data(), steps=6, batch_size=8, progress=False)
    found: list[float] = run.metrics("loss")["value"].tolist()
    return found


def test_seed_decides_dropout() -> None:
    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_replicas_and_steps_draw_differently_and_again_the_same() -> None:
    adapter = adapt(NnxNorm(rngs=nnx.Rngs(0)), nnx_loss, seed=0)
    draw = jax.jit(
        lambda replica, step: adapter.loss(
            adapter.params, adapter.state, BATCH, (replica, step)
        )[0]
    )
    assert draw(0, 3) == draw(0, 3)
    assert len({float(draw(*seeds)) for seeds in [(0, 3), (1, 3), (0, 4)]}) == 3


@pytest.mark.parametrize(
    ("model", "wrt", "message"),
    [
        (Adapted(rngs=nnx.Rngs(0)), 3, "wrt is 3; give a filter"),
        (Adapted(rngs=nnx.Rngs(0)), nnx.BatchStat, "selects no variable"),
        (NnxNorm(rngs=nnx.Rngs(0)), nnx.RngState, "dtype .* has no gradient"),
        (LinenMLP(), nnx.LoRAParam, "linen LinenMLP; freeze its parameters with"),
    ],
)
def test_wrong_filter_of_what_to_train_is_named(
    model: Any, wrt: Any, message: str
) -> None:
    loss = linen_loss if isinstance(model, LinenMLP) else nnx_loss
    with pytest.raises(ConfigError, match=message):
        Trainer(model, loss, optax.sgd(0.1), wrt=wrt).fit(
            data(), steps=1, batch_size=8, progress=False
        )
