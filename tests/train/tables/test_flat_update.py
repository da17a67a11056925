"""Slices of an update: small where parameters have nothing to do with each other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.train.model.optimizer import CalledOptimizer
from jgraph.train.tables.flat_update import FlatUpdate, followed
from jgraph.train.tables.row_update import probe


def chained(a: Any, b: Any, c: Any, gradient: Any) -> list[Any]:
    """``c`` follows from ``b`` and this from the gradient; ``a`` from itself."""
    return [a + 1, b + gradient, c * b]


def test_what_follows_from_an_operand_in_any_number_of_steps_is_found() -> None:
    flat = FlatUpdate.traced(chained, [1.0, 2.0, 3.0, 4.0])
    assert followed([flat], [3]) == [1, 2]
    assert followed([flat], [2]) == [1, 2]  # c is made of b
    assert followed([flat], [0]) == [0]


def test_a_slice_gives_what_the_whole_gives() -> None:
    flat = FlatUpdate.traced(chained, [1.0, 2.0, 3.0, 4.0])
    assert [float(x) for x in flat.of([2, 0])([1.0, 2.0, 3.0, 4.0])] == [6.0, 2.0]
    assert len(flat.slice([0]).eqns) == 1


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (lambda x, y: [jnp.sin(x) * 2, y], True),
        (lambda x, y: [2 * jnp.sin(x), y], False),
        (lambda x, y: [jnp.sin(x) * 3, y], False),
        (lambda x, y: [jnp.cos(x) * 2, y], False),
        (lambda x, y: [jnp.sin(y) * 2, y], False),
        (lambda x, y: [jnp.sin(x) * 2, y * y], True),
    ],
)
def test_only_equal_operations_on_equal_operands_are_alike(
    other: Any, *, is_alike: bool
) -> None:
    one = FlatUpdate.traced(lambda x, y: [jnp.sin(x) * 2, y], [1.0, 2.0])
    assert one.computes_alike(FlatUpdate.traced(other, [1.0, 2.0]), [0]) == is_alike


def test_captured_arrays_are_compared_by_their_elements() -> None:
    def plus(values: Any) -> FlatUpdate:
        array = np.asarray(values, np.float32)
        return FlatUpdate.traced(lambda x: [x + array], [jnp.zeros(3)])

    assert plus([1, 2, 3]).computes_alike(plus([1, 2, 3]), [0])
    assert not plus([1, 2, 3]).computes_alike(plus([1, 2, 4]), [0])


@pytest.mark.parametrize("name", ["adam", "clipped"])
def test_a_trial_computes_only_what_a_table_goes_into(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {}
    for others in (4, 40):
        computed: list[int] = []
        of = FlatUpdate.of

        def noted(
            self: FlatUpdate, results: Any, of: Any = of, to: Any = computed
        ) -> Any:
            to.append(len(self.slice(results).eqns))
            return of(self, results)

        monkeypatch.setattr(FlatUpdate, "of", noted)
        params = {
            "t": jnp.zeros((9, 2)),
            **{f"w{n}": jnp.zeros(2) for n in range(others)},
        }
        tx = {
            "adam": optax.adam(0.1),
            "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
        }[name]
        places = list(range(len(params)))
        owners = [None, *places, *places] if name == "adam" else []
        probe(CalledOptimizer(tx), params, [0], owners)
        monkeypatch.undo()
        counts[others] = computed
    if name == "adam":  # a parameter has nothing to do with another one
        assert counts[4] == counts[40]
    else:  # the norm is of all
        assert counts[4][0] < counts[40][0]


def test_an_optimizer_that_counts_the_rows_of_a_table_is_found_out() -> None:
    """No number goes from the table to the others, and yet they hang on its size."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        return jax.tree.map(lambda u: u / size, updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    params = {"t": jnp.zeros((9, 2)), "w": jnp.zeros(2)}
    assert not probe(CalledOptimizer(tx), params, [0], []).exact
