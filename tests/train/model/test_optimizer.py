"""An optimizer is given what a step has, and keeps its state in one form."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.train.model.optimizer import CalledOptimizer, Optimizer
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import BATCH, NnxMLP, batches_of, data, nnx_loss
from tests.support.servers import connected

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.float32(3.0)}


def loss_of(params: Any) -> jax.Array:
    value: jax.Array = jnp.sum((params["a"] - 0.5) ** 2) + params["b"] ** 2
    return value


def steps(
    tx: Any, count: int, init: Any = None, **given: Any
) -> tuple[list[Any], list[Any]]:
    """Returns parameters and states of an optimizer, step by step."""
    params, state = PARAMS, (init or tx.init)(PARAMS)
    all_params, states = [], [state]
    for _ in range(count):
        value, grads = jax.value_and_grad(loss_of)(params)
        extra = {"value": value} | {k: fn(grads) for k, fn in given.items()}
        updates, state = tx.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
        all_params.append(params)
        states.append(state)
    return all_params, states


def called(tx: Optimizer, count: int = 3) -> tuple[list[Any], list[Any]]:
    return steps(CalledOptimizer(tx), count, value_fn=lambda _: loss_of)


def assert_close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), a, b)


def gradient_of(params: Any, number: int) -> Any:
    return jax.grad(loss_of)(params)


EVALUATING: dict[str, Callable[[], Any]] = {
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    ),
    "sophia": lambda: contrib.sophia(0.1, update_interval=2),
    "sam": lambda: contrib.sam(
        optax.sgd(0.1), optax.sgd(0.05), reset_state=False, opaque_mode=True
    ),
    "sam in a chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), EVALUATING["sam"]()
    ),
}
# What plain optax wants to be given, by hand.
KEYWORDS: dict[str, dict[str, Any]] = {
    "lbfgs": {"grad": lambda grads: grads, "value_fn": lambda _: loss_of},
    "backtracking": {"grad": lambda grads: grads, "value_fn": lambda _: loss_of},
    "sophia": {"obj_fn": lambda _: loss_of},
    "sam": {"grad_fn": lambda _: gradient_of},
    "sam in a chain": {"grad_fn": lambda _: gradient_of},
}


# Line searches of lbfgs take half a minute to compile.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name == "lbfgs" else ())
        for name in EVALUATING
    ],
)
def test_an_optimizer_that_evaluates_the_loss_is_given_it(name: str) -> None:
    tx = EVALUATING[name]()
    # Plain optax would be given value where it is wanted only.
    plain = optax.with_extra_args_support(tx)
    takes_value = name in {"lbfgs", "backtracking"}

    def update(grads: Any, state: Any, params: Any, value: Any, **given: Any) -> Any:
        extra = {"value": value, **given} if takes_value else given
        return plain.update(grads, state, params, **extra)

    alone = optax.GradientTransformationExtraArgs(plain.init, update)
    expected, _ = steps(alone, 3, **KEYWORDS[name])
    assert_close(called(tx)[0], expected)


def test_an_optimizer_without_a_batch_to_evaluate_says_what_is_missing() -> None:
    tx = CalledOptimizer(EVALUATING["backtracking"]())
    with pytest.raises(ConfigError, match=r"evaluates the loss itself.*use AsyncPS"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.float32(0))


def monitor() -> optax.GradientTransformationExtraArgs:
    large = lambda updates: optax.tree.norm(updates) > 1.0
    return optax.chain(
        optax.sgd(0.1, 0.9),
        optax.monitor(
            {
                "norm": optax.tree.norm,
                "is_clipped": optax.measure_with_ema(large, decay=0.9),
            }
        ),
        optax.clip_by_global_norm(1.0),
    )


def test_measurements_that_an_update_adds_to_the_state_are_there_from_the_start() -> (
    None
):
    plain = monitor()
    expected, states = steps(optax.with_extra_args_support(plain), 3)
    params, found = called(monitor())
    assert_close(params, expected)
    assert_close(found[1:], states[1:])
    assert_close(found[0], jax.tree.map(jnp.zeros_like, found[3]))
    assert optax.tree.get(found[0], "norm") == 0.0


def made_at_the_first_update(read: bool) -> optax.GradientTransformation:
    """Keeps the last gradient, and reads it or not."""

    def init(params: Any) -> Any:
        return {"seen": None}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        old = state["seen"]
        if old is not None and read:
            updates = jax.tree.map(lambda u, o: u + o, updates, old)
        return jax.tree.map(lambda u: -0.1 * u, updates), {"seen": updates}

    return optax.GradientTransformation(init, update)


def changed(**leaves: Any) -> optax.GradientTransformation:
    """Begins with a float and an array, and returns this as its new state."""

    def init(params: Any) -> Any:
        return {"count": jnp.float32(0), "rows": jnp.zeros(3)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new = {**state, **leaves}
        return updates, {name: leaf for name, leaf in new.items() if leaf is not None}

    return optax.GradientTransformation(init, update)


def turned() -> optax.GradientTransformation:
    """Its new state has as many leaves, of the same shapes, in another order."""

    def init(params: Any) -> Any:
        return {"first": jnp.float32(1), "second": (jnp.float32(2),)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {"first": state["second"], "second": state["first"]}

    return optax.GradientTransformation(init, update)


def test_a_state_made_at_the_first_update_and_never_read_is_kept() -> None:
    params, states = called(made_at_the_first_update(read=False))
    expected, plain = steps(
        optax.with_extra_args_support(made_at_the_first_update(read=False)), 3
    )
    assert_close(params, expected)
    assert_close(states[3], plain[3])


@pytest.mark.parametrize(
    ("tx", "told"),
    [
        (
            made_at_the_first_update(read=True),
            "opt/seen/a is floating[2], and before the update it was nothing",
        ),
        (changed(more=jnp.int32(1)), "opt/more is signedinteger[], and before the"),
        (changed(rows=None), "opt/rows is nothing, and before the update it was"),
        (changed(rows=jnp.ones(4)), "opt/rows is floating[4], and before"),
        (changed(count=jnp.int32(1)), "opt/count is signedinteger[], and before"),
        (turned(), "opt/first is nothing, and before the update it was floating[]"),
        (changed(rows=[jnp.zeros(3)]), "opt/rows is nothing, and before"),
        (
            optax.stateless(lambda u, p: jax.tree.map(lambda x: x[None], u)),
            "params/a is floating[1,2], and the parameter is floating[2]",
        ),
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), "its own (optax.lookahead)"),
        (
            contrib.differentially_private_aggregate(1.0, 0.1, key=0),
            "of each example (contrib.dpsgd)",
        ),
    ],
)
def test_what_cannot_be_trained_with_is_named_in_one_sentence(
    tx: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        called(tx)
    message = str(caught.value)
    assert "data" not in message
    assert "\n" not in message


def test_a_state_of_fewer_bits_stays_so() -> None:
    tx = changed(rows=jnp.zeros(3, jnp.bfloat16))
    assert called(tx)[1][1]["rows"].dtype == jnp.bfloat16  # cast by who writes it


def test_each_part_of_a_model_may_have_its_own_optimizer() -> None:
    parts = {"a": optax.adam(0.1), "b": optax.chain(optax.clip(0.1), optax.sgd(1.0))}
    params, _ = called(parts)
    for name, tx in parts.items():
        own, state = PARAMS[name], tx.init(PARAMS[name])
        for _ in range(3):
            grad = jax.grad(loss_of)({**PARAMS, name: own})[name]
            updates, state = tx.update(grad, state, own)
            own = optax.apply_updates(own, updates)
        np.testing.assert_allclose(params[-1][name], own, rtol=1e-6)


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("a", "head")])
def test_parts_without_an_optimizer_or_without_parameters_are_named(
    names: tuple[str, ...],
) -> None:
    with pytest.raises(ConfigError, match=r"optimizers for \['a'.*in \['a', 'b'\]"):
        called({name: optax.sgd(0.1) for name in names})


@pytest.mark.parametrize("tx", [{}, {"layers": 0.1}, 1e-3, optax.sgd])
def test_what_is_no_optimizer_is_refused(tx: Any) -> None:
    with pytest.raises(ConfigError, match=r"tx(\['layers'\])? is a .*give an optax"):
        Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, tx)


def trained(tx: Any, **options: Any) -> Any:
    trainer = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, tx, **options)
    run = trainer.fit(data(), steps=4, batch_size=BATCH, progress=False)
    model = nnx.to_pure_dict(nnx.state(run.model()))
    trainer.close()
    return model


def test_a_line_search_on_a_cluster_is_the_line_search() -> None:
    # A loop that evaluates the loss, with the batch, on the worker.
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3))
    graph, params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value_fn = lambda params: nnx_loss(nnx.merge(graph, params), batch)
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(
            grad, state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), state

    x, y = data()
    state, stream = tx.init(params), batches_of({"x": x, "y": y}, BATCH)
    for _ in range(4):
        batch = next(stream)
        params, state = step(params, state, (batch["x"], batch["y"]))
    expected = nnx.to_pure_dict(params)
    with connected(ps=2, worker=1) as one:
        assert_close(trained(tx, cluster=one, strategy=AsyncPS()), expected)


def test_a_line_search_of_a_synchronous_step_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="SyncPS applies the mean"):
        trained(EVALUATING["backtracking"](), cluster=cluster, strategy=SyncPS())
