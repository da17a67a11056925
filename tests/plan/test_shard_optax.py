"""Every optimizer of optax means the same on sharded variables as on whole ones."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from tests.support.optimizer_steps import BY_DAY, alias, aliases, optimizer_step
from tests.support.sharded import check_shard

SHAPES = {"a": (5, 4), "b": (3,), "c": (2, 3, 4)}
CUTS = {"a": [3, 1], "b": [2], "c": [1, 1, 2]}

# Two of optax.contrib want what no step has: a function to evaluate, and gradients of
# each example.
NOT_IN_A_STEP = {"sophia", "dpsgd"}


def contributed() -> list[str]:
    """Names of the functions of optax.contrib that make an optimizer."""
    found = inspect.getmembers(optax.contrib, inspect.isfunction)
    takes = {name: inspect.signature(fn).parameters for name, fn in found}
    return sorted(
        name
        for name, parameters in takes.items()
        if {"learning_rate", "base_optimizer", "optimizer"} & parameters.keys()
        and name not in NOT_IN_A_STEP
    )


def state_of(tx: optax.GradientTransformation) -> tuple[list[Variable], Any, list[Any]]:
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in SHAPES.items()
    }
    tree = {"params": params, "opt": tx.init(params)}
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    variables = []
    for path, value in leaves:
        name = getattr(path[-1], "key", "")
        cut = CUTS.get(name) if SHAPES.get(name) == value.shape else None
        partitioner = None if cut is None else lambda shape, dtype, cut=cut: cut
        variables.append(
            Variable(jax.tree_util.keystr(path), value, partitioner=partitioner)
        )
    return variables, treedef, [value for _, value in leaves]


def step_graph(tx: optax.GradientTransformation) -> tuple[Graph, list[Any]]:
    """Returns a step as a Trainer traces it, and the values of its variables."""
    variables, tree, values = state_of(tx)
    step = optimizer_step(tx, variables, tree, TaskName("/job:worker/task:0"))
    return trace(step, jnp.float32(0.5), variables=variables)[0], values


def check_steps(tx: optax.GradientTransformation) -> Graph:
    graph, values = step_graph(tx)
    return check_shard(graph, values, jnp.float32(0.5))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly)
        for name in aliases()
    ],
)
def test_an_optimizer_on_shards_is_the_optimizer(name: str) -> None:
    sharded = check_steps(alias(name))
    assert len(sharded.variables) > len(sharded.logical)


@pytest.mark.nightly
@pytest.mark.parametrize("name", contributed())
def test_a_contributed_optimizer_on_shards_is_the_optimizer(name: str) -> None:
    check_steps(alias(name, optax.contrib))


WRAPPED: dict[str, Callable[[], optax.GradientTransformation]] = {
    "clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(0.1)
    ),
    "clip_by_block_rms": lambda: optax.chain(
        optax.clip_by_block_rms(0.1), optax.scale(0.1)
    ),
    "adaptive_grad_clip": lambda: optax.chain(
        optax.adaptive_grad_clip(0.1), optax.sgd(0.1)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"fast": optax.adam(0.1), "slow": optax.sgd(0.01, 0.9)},
        {"a": "fast", "b": "slow", "c": "fast"},
    ),
    "masked": lambda: optax.masked(
        optax.adamw(0.1), {"a": True, "b": False, "c": True}
    ),
    "schedule": lambda: optax.adam(optax.exponential_decay(0.1, 10, 0.9)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(0.1, 0.9),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adam(0.1), 1
    ).gradient_transformation(),
    "multi_steps_of_2": lambda: optax.MultiSteps(
        optax.adam(0.1), 2
    ).gradient_transformation(),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_optimizer_on_shards_is_the_optimizer(name: str) -> None:
    assert not check_steps(WRAPPED[name]()).gathered


def test_what_mixes_all_elements_is_gathered_and_named() -> None:
    sharded = check_steps(optax.flatten(optax.sgd(0.1)))
    found = {(g.primitive, g.variable, g.nbytes) for g in sharded.gathered}
    assert found == {
        ("reshape", "['params']['a']", 5 * 4 * 4),
        ("concatenate", "['params']['b']", 3 * 4),
        ("reshape", "['params']['c']", 2 * 3 * 4 * 4),
    }
