"""Variables that are made of old values: their own, and each other's."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import jgraph as jg
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.nodes import ReadNode, SegmentNode
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.types import value_type
from tests.support.plans import (
    DRIVER,
    FAST,
    PS,
    TASKS,
    assert_same,
    check_plan,
    check_program,
    graph_of,
    initial_values,
    nodes_of,
    simulated,
)
from tests.support.tasks import Tasks

CASES = int(os.environ.get("JGRAPH_FUZZ_CASES", "8"))
HALF = jg.fixed_size_partitioner(2)
SHAPES = [(), (1,), (3,), (4, 1), (40,), (3, 400)]


def variables(
    shape: tuple[int, ...], homes: list[str], *, cut: bool = False
) -> list[jg.Variable]:
    size = int(np.prod(shape))
    return [
        jg.Variable(
            f"v{n}",
            np.arange(size, dtype=np.float32).reshape(shape) + 10 * n,
            device=home,
            partitioner=HALF if cut and shape and shape[0] > 1 else None,
        )
        for n, home in enumerate(homes)
    ]


# ---------------------------------------------------------------- each other's values


@pytest.mark.parametrize("shape", SHAPES)
def test_two_variables_are_swapped(shape: tuple[int, ...]) -> None:
    a, b = both = variables(shape, [PS[0]] * 2)

    def swap() -> None:
        a[...], b[...] = b[...], a[...]

    planned = check_plan(swap, variables=both)
    assert len(nodes_of(planned, PS[0], SegmentNode)) == 1
    assert not nodes_of(planned, PS[0], ReadNode)


def test_two_variables_on_two_tasks_are_swapped() -> None:
    a, b = both = variables((40,), [PS[0], PS[1]])

    def swap() -> None:
        a[...], b[...] = b[...], a[...]

    check_plan(swap, variables=both)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_that_decay_have_a_momentum(shape: tuple[int, ...]) -> None:
    w, m = both = variables(shape, [PS[0]] * 2)

    def step(x: Any) -> Any:
        with jg.device(DRIVER):
            value, gradient = jax.value_and_grad(lambda w: (w * x).sum())(w[...])
        new = 0.5 * m[...] + gradient + 0.25 * w[...]
        m[...] = new
        w[...] = w[...] - 0.5 * new
        return value

    planned = check_plan(step, np.float32(2), variables=both)
    assert len(nodes_of(planned, PS[0], SegmentNode)) == 1


@pytest.mark.parametrize("shape", [(2,), (40,)])
def test_an_old_value_is_used_with_a_part_of_the_new_one(
    shape: tuple[int, ...],
) -> None:
    (w,) = variables(shape, [PS[0]])

    def step() -> Any:
        old = w[...]
        w[...] = 2 * old + 1
        with jg.device(DRIVER):
            there = w[0] + 1
        with jg.device(PS[0]):
            return (old + w[0]).sum() + there

    planned = check_plan(step, variables=[w])
    assert is_atomic(planned, "v0")


class Cell:
    """A variable of the oracle: what was read of it stays as it was."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, index: Any) -> Any:
        return np.array(self.value[index])

    def __setitem__(self, index: Any, new: Any) -> None:
        self.value[index] = new


Form = Callable[[Any, Any, Any], Any]

# What a variable's new value is: of its old one, another's, and a value of a worker.
FORMS: dict[str, Form] = {
    "as it was": lambda mine, other, x: mine,
    "the other's": lambda mine, other, x: other,
    "sum": lambda mine, other, x: mine + other,
    "difference": lambda mine, other, x: other - mine,
    "leap": lambda mine, other, x: mine + 2 * other,
    "of a worker": lambda mine, other, x: mine - x,
    "of a worker and the other's": lambda mine, other, x: other + x,
    "largest": lambda mine, other, x: mine + other.max(),
    "turned": lambda mine, other, x: other[::-1] if other.ndim else other,
}
PARTS = ["whole", "first", "rows", "twice"]


@pytest.mark.timeout(120 + CASES)
@settings(
    max_examples=CASES,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
)
@given(
    shape=st.sampled_from(SHAPES),
    homes=st.lists(st.integers(0, 3), min_size=2, max_size=4),
    tasks=st.integers(1, 4),
    cut=st.booleans(),
    data=st.data(),
)
def test_variables_are_made_of_each_others_old_values(
    shape: tuple[int, ...], homes: list[int], tasks: int, cut: bool, data: st.DataObject
) -> None:
    """Of swaps, rotations, leapfrogs, chains; whole, in part, and by rows."""
    names = TASKS[1 : 1 + tasks]
    used = variables(shape, [names[h % tasks] for h in homes], cut=cut)
    writes = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, len(homes) - 1),
                st.integers(0, len(homes) - 1),
                st.sampled_from(sorted(FORMS)),
                st.sampled_from(PARTS if shape else PARTS[:1]),
                st.booleans(),  # of the values at the start, or of the newest
            ),
            min_size=2,
            max_size=5,
        )
    )

    def run(store: list[Any], x: Any) -> Any:
        start = [cell[...] for cell in store]
        with jg.device(names[-1]):
            sent = start[0].sum() * x
        for target, other, form, part, old in writes:
            now = start if old else [cell[...] for cell in store]
            new = FORMS[form](now[target], now[other], sent)
            match part:
                case "whole":
                    store[target][...] = new
                case "first":
                    store[target][0] = new[0]
                case "rows":
                    ids = np.arange(len(new))[::2]
                    store[target][ids] = new[ids]
                case _:
                    store[target][0] = new[0]
                    store[target][-1] = new[-1]
        return sent

    def step(x: Any) -> Any:
        return run(used, x)

    x = np.float32(0.5)
    graph = graph_of(step, x, variables=used)
    planned = plan(graph, tasks=names, driver=names[0])
    check_program(planned.program)
    values = [np.asarray(value) for value in initial_values(used).values()]
    cells = [Cell(value.copy()) for value in values]
    fetched = run(cells, x)
    after = {v.name: cell.value for v, cell in zip(used, cells, strict=True)}
    parts = {
        shard.name: piece
        for v, value in zip(used, values, strict=True)
        for shard, piece in zip(v.shards, split_like(v, value), strict=True)
    }
    (got,), stored = simulated(planned, parts, (x,), FAST)
    whole = {v.name: joined_like(v, stored) for v in used}
    assert_same((got, whole), (np.float32(fetched), after), exact=True)


def split_like(variable: jg.Variable, value: Any) -> list[Any]:
    sharding = variable.spec.sharding
    return [value] if sharding is None else list(sharding.split(value))


def joined_like(variable: jg.Variable, stored: dict[str, Any]) -> Any:
    parts = [np.asarray(stored[shard.name]) for shard in variable.shards]
    return parts[0] if variable.spec.sharding is None else np.concatenate(parts)


# ---------------------------------------------------------------- nothing is lost

N = jg.Variable("n", np.eye(4, dtype=np.float32), device=PS[0])
M = jg.Variable("m", np.full((4, 4), 2, np.float32), device=PS[0])
FAR = jg.Variable("far", np.ones((4, 4), np.float32), device=PS[1])


def _write(new: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def step(x: Any) -> None:
        N[...] = new(N[...], x)

    return step


def _while(n: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda v: v.max() < 9, lambda v: 2 * v + x[0], n)


def _cond(n: Any, x: Any) -> Any:
    return jax.lax.cond(n[0, 0] % 2 == 0, lambda: n + 1, lambda: 3 * n + x)


def _scan(n: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, row: (c + row, row.sum()), n, x)[0]


def _row(x: Any) -> None:
    N[1] = x[0] + 2 * N[1]


def _rows(x: Any) -> None:
    ids = np.array([0, 2])
    N[ids] = N[ids] @ x + 1


def _two_rows(x: Any) -> None:
    n = N[...]
    N[0] = (n @ x)[0] + 1
    N[1] = (x @ n)[1] + n[1]


def _row_after_row(x: Any) -> Any:
    N[0] = N[0] + 1
    N[1] = N[0] + N[1]
    return N[...].sum()


def _fetched(x: Any) -> Any:
    N[...] = x @ N[...] + 1
    with jg.device(DRIVER):
        return N[...].sum()


def _followed(x: Any) -> Any:
    N[...] = x @ N[...] + 1
    with jg.device(DRIVER):
        return N[0] + 1


def _both(x: Any) -> None:
    n, m = N[...], M[...]
    N[...] = n @ x + m
    M[...] = m + n.max()


def _trained(x: Any) -> Any:
    with jg.device(DRIVER):
        value, gradient = jax.value_and_grad(lambda n: (n * x).sum())(N[...])
    ratio = jnp.sqrt((N[...] ** 2).sum())
    N[...] = N[...] - jnp.floor(ratio) * gradient
    return value


def _far(x: Any) -> None:
    N[...] = N[...] @ x + FAR[...].sum()


def _blind_far(x: Any) -> None:
    FAR[...] = FAR[...] @ x + FAR[0]


UPDATES: dict[str, Callable[[Any], Any]] = {
    "matmul": _write(lambda n, x: x @ n + 1),
    "elementwise": _write(lambda n, x: 2 * n + x),
    "sorted": _write(lambda n, x: jnp.sort(n, axis=0)[::-1] + x),
    "scan": _write(_scan),
    "fori_loop": _write(lambda n, x: jax.lax.fori_loop(0, 3, lambda i, c: c + x, n)),
    "while": _write(_while),
    "cond": _write(_cond),
    "jit": _write(lambda n, x: jax.jit(lambda n: n @ x + 1)(n)),
    "a row": _row,
    "rows": _rows,
    "two rows": _two_rows,
    "a row of a row": _row_after_row,
    "fetched": _fetched,
    "read in part afterwards": _followed,
    "of two variables": _both,
    "of a gradient and a norm": _trained,
    "of a variable elsewhere": _far,
    "elsewhere": _blind_far,
}
X = np.tri(4, dtype=np.float32)
WRITERS = 4


def is_atomic(planned: Plan, name: str) -> bool:
    """Whether one segment takes a variable, and nothing else writes it."""
    updated = [s.updates for s in planned.segments if name in s.updates]
    return len(updated) == 1


@pytest.mark.parametrize("form", UPDATES)
def test_of_concurrent_updates_none_is_lost(form: str) -> None:
    """All steps read what they read early before any of them goes on."""
    update = UPDATES[form]
    graph = graph_of(update, X)
    planned = plan(graph, tasks=TASKS[:3], driver=DRIVER)
    found = Tasks(DRIVER, *PS)
    stored = {v.key: np.asarray(value) for v, value in _start(planned).items()}
    for partition in planned.program.partitions:
        store = found.runtimes[partition.task].store
        for v in partition.variables:
            store.write([v], [stored[v.container, v.name]])
    found.register("step", planned.program)
    steps = [found.start("step", n, {"x": X}) for n in range(WRITERS)]
    found.deliver_all()
    for step in steps:
        assert found.outcomes[DRIVER, step] is not None
        assert not isinstance(found.outcomes[DRIVER, step], BaseException)
    wanted = {v.name: np.asarray(value) for v, value in _start(planned).items()}
    for _ in range(WRITERS):
        _, wanted = simulated(planned, wanted, (X,), FAST)
    for spec in graph.variables:
        task = planned.task_of(spec.name)
        kept = StoredVariable(spec.name, value_type(spec.aval))
        (value,) = found.runtimes[task].store.read([kept])
        np.testing.assert_array_equal(value, wanted[spec.name])


def _start(planned: Plan) -> dict[Any, Any]:
    values = initial_values([N, M, FAR])
    return {v: values[v.name] for v in planned.graph.variables}


@pytest.mark.parametrize("form", UPDATES)
def test_an_update_that_nobody_placed_loses_nothing_and_the_plan_says_nothing(
    form: str,
) -> None:
    planned = plan(graph_of(UPDATES[form], X), tasks=TASKS[:3], driver=DRIVER)
    assert "may be lost" not in str(planned)


def test_the_plan_says_which_updates_may_be_lost_where_somebody_placed_them() -> None:
    def step(x: Any) -> None:
        with jg.device(DRIVER):
            new = x @ N[...]
        N[...] = new + 1
        M[...] = x @ M[...]

    planned = plan(graph_of(step, X), tasks=TASKS[:3], driver=DRIVER)
    (note,) = [line for line in str(planned).splitlines() if "may be lost" in line]
    assert note.startswith("of steps that run at once, updates of 'n' may be lost: ")
    assert f"{DRIVER} computes them from the old values ('dot_general' at" in note
    assert __file__ in note
    assert note.endswith(f"; on {PS[0]} none would be")


def test_what_mixes_variables_of_several_tasks_is_on_none_of_them_for_all() -> None:
    """Each is still updated at once from what it is; only the sum is of old values."""

    def step() -> None:
        total = N[...].sum() + FAR[...].sum()
        N[...] = N[...] * total
        FAR[...] = FAR[...] + total

    planned = check_plan(step, variables=[N, FAR])
    assert is_atomic(planned, "n")
    assert is_atomic(planned, "far")
    assert "may be lost" not in str(planned)


def test_what_another_task_computes_from_in_between_does_not_hold_up_the_rest() -> None:
    def step(x: Any) -> Any:
        with jg.device(PS[0]):
            y = jnp.tanh(x @ N[...])
        with jg.device(DRIVER):
            z = y + 1
        N[...] = N[...] + y + z

    planned = check_plan(step, X, variables=[N], exact=False)
    assert is_atomic(planned, "n")


def test_a_gradient_is_computed_where_the_loss_was_placed() -> None:
    planned = plan(graph_of(_trained, X), tasks=TASKS[:3], driver=DRIVER)
    on_worker = [s for s in planned.segments if s.task == DRIVER]
    assert any("mul" in s.label for s in on_worker)
    assert "may be lost" not in str(planned)
