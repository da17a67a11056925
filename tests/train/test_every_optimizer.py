"""Whatever optimizer optax has trains on a cluster as it does alone.

Optimizers are found in the installed package. One that plain optax cannot call with
what a step has must be refused; every other one must give plain optax's numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.every_optimizer import makers, variants
from tests.support.models import BATCH, batches_of, data
from tests.support.servers import connected

STEPS = 5
VARIANTS = dict(variants())
STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "asynchronous, whole": AsyncPS,
    "asynchronous, cut": lambda: AsyncPS(
        variable_partitioner=jg.fixed_size_partitioner(3)
    ),
    "synchronous, whole": SyncPS,
    "synchronous, cut": lambda: SyncPS(
        variable_partitioner=jg.fixed_size_partitioner(3)
    ),
}
Example = tuple[Any, Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=3, worker=1) as cluster:
        yield cluster


class Head(nn.Module):
    """Two layers, of which the last has one output."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(jnp.tanh(nn.Dense(3)(x)))[:, 0]


def loss_of(params: Any, batch: Example) -> jax.Array:
    outputs: Any = Head().apply({"params": params}, batch[0])
    return jnp.mean((outputs - batch[1]) ** 2)


def fields() -> Example:
    x, y = data()
    return x, y.astype(np.float32)


# What plain optax may have to be told, beside the gradients; the least that does.
KEYWORDS: tuple[tuple[str, ...], ...] = (
    (),
    ("value",),
    ("value", "grad", "value_fn"),
    ("obj_fn",),
    ("grad_fn",),
)


def plain_step(tx: Any, keywords: tuple[str, ...]) -> Callable[..., Any]:
    """Returns the step that a JAX user would write."""
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params: Any, state: Any, batch: Example) -> Any:
        value_fn = lambda params: loss_of(params, batch)
        value, grad = jax.value_and_grad(value_fn)(params)
        known = {
            "value": value,
            "grad": grad,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": lambda params, _: jax.grad(value_fn)(params),
        }
        given = {name: known[name] for name in keywords}
        updates, state = tx.update(grad, state, params, **given)
        return value, optax.apply_updates(params, updates), state

    return step


def plain(tx: Any, params: Any) -> tuple[Any, Any, list[float], bool] | None:
    """Returns (parameters, state, losses, needs the loss function); None: it cannot."""
    x, y = fields()
    for keywords in KEYWORDS:
        try:
            now, state, losses = params, tx.init(params), []
            step, stream = plain_step(tx, keywords), batches_of({"x": x, "y": y}, BATCH)
            for _ in range(STEPS):
                batch = next(stream)
                value, now, state = step(now, state, (batch["x"], batch["y"]))
                losses.append(float(value))
        except (AttributeError, TypeError, ValueError):
            continue
        types: list[Any] = [jax.tree.map(jnp.shape, tree) for tree in (params, now)]
        if types[0] == types[1]:  # else broadcasting has made others of them
            return now, state, losses, bool(set(keywords) - {"value"})
    return None


def descending(tx: Any, params: Any) -> tuple[Any, Any]:
    """Returns (what to train with, what plain optax gives); None as ``plain`` does.

    What goes along the gradient is a part of an optimizer. Alone it leaves every
    minimum, and rounding grows a thousandfold in five steps of plain optax, too.
    """
    expected = plain(tx, params)
    if expected is not None and not expected[2][-1] < 2 * expected[2][0]:
        tx = optax.chain(tx, optax.scale(-0.05))
        expected = plain(tx, params)
    return tx, expected


def assert_same(found: Any, expected: Any, what: str = "") -> None:
    def numbers(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf, np.float64)

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        # Ten times as far as plain optax goes from parameters changed by a rounding.
        np.testing.assert_allclose(numbers(a), numbers(b), 2e-4, 2e-5, err_msg=what)


def check(
    tx: Any, expected: Any, params: Any, cluster: Cluster, strategy: Strategy
) -> None:
    cluster.reset()
    trainer = Trainer(
        Head(),
        loss_of,
        tx,
        cluster=cluster,
        strategy=strategy,
        variables={"params": params},
    )
    train: Callable[[], Run] = lambda: trainer.fit(
        fields(), steps=STEPS, batch_size=BATCH, progress=False
    )
    if expected is None or (expected[3] and isinstance(strategy, SyncPS)):
        with pytest.raises(ConfigError, match="the optimizer tx"):
            train()
        return
    now, state, losses, _ = expected
    run = train()
    assert_same(run.model(), now)
    np.testing.assert_allclose(run.metrics("loss")["value"], losses, 2e-4, 2e-5)
    values = dict(zip(trainer.names, trainer.current_values(), strict=True))
    assert_same([v for name, v in values.items() if name.startswith("opt/")], state)
    trainer.close()


def initial() -> Any:
    variables: Any = Head().init(jax.random.key(0), fields()[0])
    return variables["params"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_an_optimizer_of_optax_is_on_a_cluster_what_it_is_alone(
    name: str, cluster: Cluster
) -> None:
    params = initial()
    tx, expected = descending(VARIANTS[name](), params)
    for strategy in STRATEGIES.values():
        check(tx, expected, params, cluster, strategy())


def test_every_optimizer_that_optax_has_is_among_them() -> None:
    known = set(makers())
    assert {"adamw", "lbfgs", "scale_by_adam", "masked", "MultiSteps"} <= known
    assert {"muon", "sam", "dowg", "prodigy"} <= known
    assert known == {name.partition("(")[0] for name in VARIANTS}
    for name, make in VARIANTS.items():
        assert isinstance(make(), optax.GradientTransformation), name


def test_a_new_optimizer_is_tried_or_asks_for_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fresh(learning_rate: float, momentum: float = 0.0) -> Any:
        return optax.sgd(learning_rate, momentum)

    def strange(spin: float) -> optax.GradientTransformation:
        return optax.sgd(spin)

    monkeypatch.setattr(optax, "fresh", fresh, raising=False)
    monkeypatch.setattr(optax, "strange", strange, raising=False)
    found = dict(variants())
    assert isinstance(found["fresh"](), optax.GradientTransformation)
    assert isinstance(found["fresh(momentum)"](), optax.GradientTransformation)
    with pytest.raises(LookupError, match="needs an argument 'spin': add it"):
        found["strange"]()


class Parts(nn.Module):
    """As many parts as there are optimizers, of a few parameters each."""

    names: tuple[str, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return {name: nn.Dense(1, name=name)(x) for name in self.names}


OFTEN = (
    "adafactor(momentum, weight_decay_rate)",
    "adamw(nesterov, weight_decay)",
    "chain(clip, adam, schedule)",
    "chain(decay and momentum)",
    "lars(momentum, nesterov, weight_decay)",
    "lion(weight_decay)",
    "mechanize",
    "monitor()",
    "MultiSteps(of 2)",
    "rprop",
    "sam",
    "schedule_free_sgd(weight_decay)",
)


@pytest.mark.nightly  # smaller: tests/plan/test_shard_optax.py
@pytest.mark.parametrize("how", STRATEGIES)
def test_a_dozen_optimizers_each_of_a_part_are_what_they_are_alone(
    how: str, cluster: Cluster
) -> None:
    cluster.reset()
    x, y = fields()
    parts = {f"part_{number}": VARIANTS[name]() for number, name in enumerate(OFTEN)}
    model = Parts(tuple(parts))
    variables: Any = model.init(jax.random.key(0), x)

    def loss(params: Any, batch: Example) -> Any:
        outputs: Any = model.apply({"params": params}, batch[0])
        return sum(jnp.mean((out[:, 0] - batch[1]) ** 2) for out in outputs.values())

    @jax.jit
    def step(params: Any, states: Any, batch: Example) -> Any:
        grads = jax.grad(loss)(params, batch)
        new, updated = {}, {}
        for name, tx in parts.items():
            own = params[name]
            updates, updated[name] = tx.update(grads[name], states[name], own)
            new[name] = optax.apply_updates(own, updates)
        return new, updated

    params = variables["params"]
    states = {name: tx.init(params[name]) for name, tx in parts.items()}
    stream = batches_of({"x": x, "y": y}, BATCH)
    for _ in range(STEPS):
        batch = next(stream)
        params, states = step(params, states, (batch["x"], batch["y"]))

    trainer = Trainer(
        model,
        loss,
        parts,
        cluster=cluster,
        strategy=STRATEGIES[how](),
        variables=variables,
    )
    run = trainer.fit((x, y), steps=STEPS, batch_size=BATCH, progress=False)
    found: Any = run.model()
    for name, called in zip(parts, OFTEN, strict=True):
        assert_same(found[name], params[name], called)
    trainer.close()
