"""Faults that are put in on purpose: random programs find each within some cases."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from jgraph.plan.analysis.flow import _Walk
from jgraph.plan.partition.segments import _Links
from tests.support.fuzz.equivalence import check, recipes
from tests.support.fuzz.recipes import Recipe

WITHIN = 20


def reads_miss_writes(patch: pytest.MonkeyPatch) -> None:
    """A read after a write of rows finds what an earlier read found."""

    def wrote(walk: Any, variable: int, index: int) -> None:
        del index  # the variable keeps its version
        walk._value.pop(variable, None)

    patch.setattr(_Walk, "_wrote", wrote)


def reads_and_writes_have_no_order(patch: pytest.MonkeyPatch) -> None:
    """Segments that read or write one variable run as their values allow."""
    patch.setattr(_Links, "_order_state", lambda _: None)


def the_first_of_two_writes_stays(patch: pytest.MonkeyPatch) -> None:
    """Of two writes of a whole variable the later one is lost."""
    write: Any = _Walk._whole_write

    def once(walk: Any, index: int, equation: Any) -> None:
        write(walk, index, equation)
        variable = walk._variables[equation.invars[0]]
        if any(op.writes == (variable,) for n, op in walk.ops.items() if n != index):
            del walk.ops[index]

    patch.setattr(_Walk, "_whole_write", once)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        reads_and_writes_have_no_order,
        pytest.param(reads_miss_writes, marks=pytest.mark.nightly),
        pytest.param(the_first_of_two_writes_stays, marks=pytest.mark.nightly),
    ],
)
def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(
        max_examples=WITHIN,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
    )
    @given(recipes(3, 10))
    def fuzz(recipe: Recipe) -> None:
        check(recipe)

    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        fuzz()
