"""Programs made up at random, on clusters of any shape, against one process of JAX.

``make fuzz`` tries thousands; the tests a few. What was found once is an example.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from tests.support.fuzz.equivalence import CASES, check, recipes
from tests.support.fuzz.recipes import OPS, VARIABLES, Recipe, Step

SHAPES = (1, 2, 3, 4)


def everything(tasks: int, turn: int) -> Recipe:
    """Every instruction once, each on the next task."""
    return Recipe(
        tasks,
        tuple((n + turn) % tasks for n in range(len(VARIABLES))),
        tuple(Step(op, n, n + turn, (n + turn) % tasks) for n, op in enumerate(OPS)),
        sharded=bool(turn % 2),
    )


LARGE = {"everything, each instruction on another task"}
# Cases that were wrong once come here, as they were found.
KEPT = {
    "everything on one task": everything(1, 0),
    "everything, each instruction on another task": everything(4, 1),
    "two variables swapped, and then made of each other": Recipe(
        2, (1, 1, 1, None, None, 1), (Step("swap"), Step("leap", 0, 0, 0))
    ),
    "rows of three variables": Recipe(
        3, (1, 1, 1, None, None, 1), (Step("rotate", 1, 2), Step("swap rows", 0, 0, 0))
    ),
    "a number that is read, as rows of a table": Recipe(
        2,
        (None, None, None, 0, None, None),
        (
            *([Step("add")] * 4),
            Step("read count"),
            Step("read rows", 0, 1),
        ),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in LARGE else ())
        for name in KEPT
    ],
)
def test_a_kept_case_computes_what_jax_computes_alone(name: str) -> None:
    check(KEPT[name])


@pytest.mark.slow
@pytest.mark.timeout(600 + 4 * CASES)
@pytest.mark.parametrize("tasks", SHAPES)
@settings(
    max_examples=max(1, CASES // len(SHAPES)),
    suppress_health_check=list(HealthCheck),
    # Each try compiles anew; `make fuzz` also looks for the smallest case.
    phases=[Phase.explicit, Phase.reuse, Phase.generate]
    + ([Phase.shrink] if CASES > 100 else []),
)
@given(data=st.data())
def test_a_program_computes_on_a_cluster_what_jax_computes_alone(
    tasks: int, data: st.DataObject
) -> None:
    check(data.draw(recipes(tasks)))
