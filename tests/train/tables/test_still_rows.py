"""Rows without a gradient: which optimizers leave them alone, in all steps to come."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.train.model.optimizer import CalledOptimizer
from jgraph.train.model.trees import group_with_parameters, path_of
from jgraph.train.tables.flat_update import FlatUpdate
from jgraph.train.tables.row_update import RowUpdate, probe, unchanged_operands

PARAMS = {"t": jnp.zeros((9, 2)), "w": jnp.zeros(2)}


def judged(tx: optax.GradientTransformation) -> RowUpdate:
    """Returns what is found out of an optimizer of the table ``t``."""
    called = CalledOptimizer(tx)
    tree = {"opt": called.init(PARAMS), "params": PARAMS}
    paths = [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    owners = [
        {"params/t": 0, "params/w": 1}.get(group)
        for group, path in zip(group_with_parameters(paths), paths, strict=True)
        if path[0] == "opt"
    ]
    return probe(called, PARAMS, [0], owners)


def late_decay(start: int) -> optax.GradientTransformation:
    rate = optax.linear_schedule(0.0, 0.1, 10, transition_begin=start)
    return optax.chain(optax.add_decayed_weights(rate), optax.sgd(0.1))


ROWS_ALONE = {
    "sgd": optax.sgd(0.1),
    "a schedule": optax.sgd(optax.cosine_decay_schedule(0.1, 100)),
    "adagrad": optax.adagrad(0.1),
    "clipping": optax.chain(
        optax.clip(1.0), optax.clip_by_global_norm(0.1), optax.adagrad(0.1)
    ),
    "only finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "parts": optax.multi_transform(
        {"rows": optax.adagrad(0.1), "rest": optax.adam(0.1)},
        {"t": "rows", "w": "rest"},
    ),
    "frozen": optax.masked(optax.adam(0.1), {"t": False, "w": True}),
}
ALL_ROWS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(0.1),
    "decay that begins later than anybody tries": late_decay(1000),
    "noise": optax.noisy_sgd(0.1, key=7),
    "adam that warms up": optax.adam(optax.linear_schedule(0.0, 0.1, 10)),
}


def large(params: Any) -> Any:
    """Returns of each parameter whether it is large, as users tell tables apart."""
    return jax.tree.map(lambda x: x.shape[0] > 8, params)


def of_columns(step: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns what does a step for parameters of more than two columns alone."""
    return optax.masked(step, lambda ps: jax.tree.map(lambda x: x.shape[-1] > 2, ps))


def rate_by_size(updates: Any, params: Any = None) -> Any:
    del params
    return jax.tree.map(lambda g: g * (-0.1 if len(g) > 8 else -0.2), updates)


BY_SIZE = {
    "decay of large ones": optax.chain(
        optax.add_decayed_weights(0.1, mask=large), optax.sgd(0.1)
    ),
    "labels": optax.multi_transform(
        {True: optax.adagrad(0.1), False: optax.adam(0.1)}, large
    ),
    "a rate": optax.stateless(rate_by_size),
}
LATER = {
    "two steps": optax.MultiSteps(optax.sgd(0.1), 2),
    "more steps than anybody tries": optax.MultiSteps(optax.adagrad(0.1), 100),
    "the sum of many": optax.MultiSteps(optax.sgd(0.1), 100, use_grad_mean=False),
    "apply_every": optax.chain(optax.apply_every(7), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", ROWS_ALONE)
def test_an_optimizer_that_leaves_other_rows_alone_updates_rows(name: str) -> None:
    found = judged(ROWS_ALONE[name])
    assert found.exact == {0}
    assert not found.held_back


@pytest.mark.parametrize("name", ALL_ROWS)
def test_an_optimizer_that_changes_other_rows_ever_updates_them_all(name: str) -> None:
    found = judged(ALL_ROWS[name])
    assert not found.exact
    assert not found.held_back


@pytest.mark.parametrize("name", BY_SIZE)
def test_an_optimizer_that_looks_at_sizes_never_sees_rows_alone(name: str) -> None:
    found = judged(BY_SIZE[name])
    assert not found.exact
    assert found.by_size == {0}


def test_an_optimizer_that_looks_at_columns_is_tried_in_vain() -> None:
    params = {"t": jnp.zeros((9, 4)), "w": jnp.zeros(2)}
    tx = optax.chain(of_columns(optax.add_decayed_weights(0.1)), optax.sgd(0.1))
    assert probe(CalledOptimizer(tx), params, [0], []).by_size == {0}


@pytest.mark.parametrize("name", LATER)
def test_an_optimizer_that_applies_gradients_later_is_found_out(name: str) -> None:
    found = judged(LATER[name])
    assert not found.exact
    assert found.held_back == {0}


def test_accumulation_over_one_step_is_none() -> None:
    assert not judged(optax.MultiSteps(optax.sgd(0.1), 1)).held_back


@pytest.mark.parametrize(
    ("fn", "is_kept"),
    [
        (lambda x, g: x + g * jnp.exp(x), True),
        (lambda x, g: x - jnp.clip(g, -1, 2) / (x + 1), True),
        (lambda x, g: x - jnp.clip(g, 1, 2), False),
        (lambda x, g: jnp.where(x > 0, x + g, x), True),
        (lambda x, g: jnp.where(x > 0, x + g, -x), False),
        (lambda x, g: jax.lax.cond(x[0] > 0, lambda: x + g, lambda: x), True),
        (lambda x, g: jax.lax.cond(x[0] > 0, lambda: x + g, lambda: 2 * x), False),
        (lambda x, g: x.astype(jnp.float16).astype(x.dtype) + g, False),
        (lambda x, g: x + jnp.cos(g), False),
        (lambda x, g: x + g.at[0].set(1.0), False),
        (lambda x, g: x[::-1] + g, False),
    ],
)
def test_what_stays_is_proven_and_nothing_else(fn: Any, is_kept: bool) -> None:
    x, g = jnp.arange(3.0), jnp.zeros(3)
    flat = FlatUpdate.traced(lambda x, g: [fn(x, g)], [x, g])
    kept = unchanged_operands(flat, [0], zeros=[1])
    assert (0 in kept) == is_kept
    if is_kept:
        np.testing.assert_array_equal(fn(x, g), x)


def test_numbers_of_half_width_stay_through_sums_in_full_width() -> None:
    x, g = jnp.arange(3.0, dtype=jnp.bfloat16), jnp.zeros(3)
    add = lambda x, g: [(x.astype(jnp.float32) + g).astype(x.dtype)]
    assert unchanged_operands(FlatUpdate.traced(add, [x, g]), [0], zeros=[1]) == {0}
