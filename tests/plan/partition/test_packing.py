"""Packed variables and values: steps compute what they would compute one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph as jg
from jgraph.plan.plan import Plan
from jgraph.plan.program.nodes import ReadNode, SegmentNode, UnpackNode, packed_starts
from tests.support.optimizer_steps import BY_DAY, alias, aliases, optimizer_step
from tests.support.plans import PS, WORKERS, check_plan, nodes_of

SHAPES = [(5, 4), (3,), (2, 3, 4), (1,), (17,), (2, 2), (4, 8), (6,), (3, 3), (16,)]

# What looks at more than one element, or at where it lies, runs on each by itself.
NOT_ALIKE = {
    *("adafactor", "fromage", "lamb", "lars", "lbfgs", "noisy_sgd", "novograd"),
    "sm3",
}


def planned(
    tx: optax.GradientTransformation,
    shapes: list[tuple[int, ...]] = SHAPES,
    ps: int = 1,
    **kwargs: Any,
) -> Plan:
    """Checks a step as a Trainer traces it against one jit; returns its plan."""
    rng = np.random.default_rng(0)
    params = {
        f"p{n}": jnp.asarray(rng.normal(size=shape), jnp.float32)
        for n, shape in enumerate(shapes)
    }
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        {"params": params, "opt": tx.init(params)}
    )
    variables = [
        jg.Variable(jax.tree_util.keystr(path), value, device=PS[n % ps])
        for n, (path, value) in enumerate(leaves)
    ]
    step = optimizer_step(tx, variables, tree, WORKERS[0])
    return check_plan(step, jnp.float32(0.5), variables=variables, **kwargs)


def packs(plan: Plan) -> list[tuple[int, ...]]:
    return [node.packs for node in nodes_of(plan, PS[0], SegmentNode) if node.packs]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly)
        for name in aliases()
    ],
)
def test_an_optimizer_on_flat_arrays_is_the_optimizer(name: str) -> None:
    plan = planned(alias(name))
    assert bool(packs(plan)) == (name not in NOT_ALIKE)


def test_adam_takes_three_flat_arrays_and_one_of_gradients() -> None:
    plan = planned(optax.adam(0.1))
    (update,) = nodes_of(plan, PS[0], SegmentNode)
    assert update.packs == (10, 10, 10)
    assert len(update.updates) == 31  # the count is alone
    (read,) = nodes_of(plan, PS[0], ReadNode)
    assert read.packs == (10,)
    assert len(read.outs) == 1
    assert nodes_of(plan, PS[0], UnpackNode) == []
    (cut,) = nodes_of(plan, WORKERS[0], UnpackNode)
    assert len(cut.outs) == 10
    (gradients,) = nodes_of(plan, WORKERS[0], SegmentNode)
    assert len(gradients.outs) == 2  # and the loss


def test_norms_of_all_take_each_gradient_and_the_update_takes_the_flat_one() -> None:
    plan = planned(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)))
    assert packs(plan) == [(10, 10, 10)]
    (cut,) = nodes_of(plan, PS[0], UnpackNode)
    assert len(cut.outs) == 10


def test_two_kinds_of_update_are_two_groups() -> None:
    masks = {f"p{n}": "a" if n < 10 else "b" for n in range(20)}
    tx = optax.multi_transform(
        {"a": optax.sgd(0.1, momentum=0.9), "b": optax.sgd(0.2)}, masks
    )
    plan = planned(tx, SHAPES * 2)
    assert sorted(packs(plan)[0]) == [10, 10, 10]


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(SHAPES[:7], id="few"),
        pytest.param([(3, n) for n in range(5000, 5008)], id="large"),
        pytest.param([()] * 10, id="numbers"),
    ],
)
def test_what_is_not_worth_it_is_left_alone(shapes: list[tuple[int, ...]]) -> None:
    plan = planned(optax.adam(0.1), shapes)
    assert packs(plan) == []
    assert nodes_of(plan, WORKERS[0], UnpackNode) == []


def test_large_variables_among_small_ones_stay_alone() -> None:
    plan = planned(optax.adam(0.1), [*SHAPES, (100, 64)])
    (update,) = nodes_of(plan, PS[0], SegmentNode)
    assert update.packs == (10, 10, 10)
    assert len(update.updates) == 34


def test_each_task_packs_what_it_has() -> None:
    plan = planned(optax.sgd(0.1), SHAPES * 2, ps=2)
    for ps in PS:
        (update,) = nodes_of(plan, ps, SegmentNode)
        assert update.packs == (10,)


HOME = PS[0]


def many(prefix: str = "v") -> list[jg.Variable]:
    return [
        jg.Variable(f"{prefix}{n}", jnp.arange(n + 2, dtype=jnp.float32), device=HOME)
        for n in range(10)
    ]


def scattered(variables: list[jg.Variable]) -> Callable[[Any], Any]:
    """Reads all on a worker, and adds to each what follows from it."""

    def step(x: Any) -> Any:
        with jg.device(WORKERS[0]):
            deltas = [v[...] * x for v in variables]
        for variable, delta in zip(variables, deltas, strict=True):
            variable[...] = variable[...] + delta
        return x

    return step


def test_variable_that_something_else_takes_by_itself_lies_in_no_flat_array() -> None:
    variables = many()
    total = jg.Variable("total", jnp.zeros(()), device=HOME)
    step = scattered(variables)

    def summed(x: Any) -> Any:
        before = variables[3][...].sum()
        result = step(x)
        total[...] = total[...] + before
        return result

    plan = check_plan(summed, jnp.float32(2.0), variables=[*variables, total])
    assert packs(plan) == [(9,)]


def test_variable_of_which_a_part_is_written_lies_in_no_flat_array() -> None:
    variables = many()

    def step(x: Any) -> Any:
        with jg.device(WORKERS[0]):
            deltas = [v[...] * x for v in variables]
        for n, (variable, delta) in enumerate(zip(variables, deltas, strict=True)):
            if n == 5:
                variable[0] = variable[0] + delta[0]
            else:
                variable[...] = variable[...] + delta
        return x

    plan = check_plan(step, jnp.float32(2.0), variables=variables)
    assert packs(plan) == [(9,)]


def test_variables_that_take_one_another_keep_their_neighbours() -> None:
    first, second = many("v"), many("w")

    def step(x: Any) -> Any:
        for v, w in zip(first, second, strict=True):
            v[...] = v[...] + w[...] * x
            w[...] = w[...] * 0.5
        return x

    plan = check_plan(
        step, jnp.float32(2.0), variables=[*first, *second], driver=WORKERS[0]
    )
    assert packs(plan) == [(10, 10)]


def test_variables_crossed_are_not_packed_two_ways() -> None:
    """Each takes its neighbour: no order serves both the old and the new values."""
    variables = [
        jg.Variable(f"v{n}", jnp.full(4, n, jnp.float32), device=HOME)
        for n in range(10)
    ]

    def step(x: Any) -> Any:
        old = [v[...] for v in variables]
        for n, variable in enumerate(variables):
            variable[...] = old[n - 1] + x
        return x

    check_plan(step, jnp.float32(2.0), variables=variables)


def test_halves_travel_and_lie_apart_from_floats() -> None:
    variables = [
        jg.Variable(
            f"v{n}",
            jnp.arange(n + 2, dtype=("float32", "bfloat16")[n % 2]),
            device=HOME,
        )
        for n in range(20)
    ]

    def step(x: Any) -> Any:
        with jg.device(WORKERS[0]):
            deltas = [v[...] + x.astype(v.dtype) for v in variables]
        for variable, delta in zip(variables, deltas, strict=True):
            variable[...] = variable[...] + delta
        return x

    plan = check_plan(step, jnp.float32(2.0), variables=variables)
    assert sorted(packs(plan)[0]) == [10, 10]


def test_values_in_a_flat_array_begin_where_xla_takes_them_without_a_copy() -> None:
    variables = many()
    planned = check_plan(scattered(variables), jnp.float32(2.0), variables=variables)
    types = [variable.type for variable in planned.program.partition(HOME).variables]
    starts = packed_starts(types)
    assert all(start * 4 % 64 == 0 for start in starts)


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(False, id="values"),
        pytest.param(True, id="numbers", marks=pytest.mark.nightly),
    ],
)
def test_a_long_way_to_a_new_value_is_planned(numbers: bool) -> None:
    variables = many()

    def step(x: Any) -> Any:
        if numbers:
            for _ in range(1500):
                x = x * 0.999 + 0.001
        for variable in variables:
            value = variable[...]
            for _ in range(2 if numbers else 150):
                value = value * 0.9 + x
            variable[...] = value
        return x

    plan = check_plan(step, jnp.float32(2.0), variables=variables, exact=False)
    assert bool(packs(plan)) == numbers
