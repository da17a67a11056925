import pytest

from jgraph.coordination.run.survivors import Given, NotGiven, gift, made, unread
from jgraph.graph.device import TaskName

A, B, C = (TaskName(f"/job:worker/task:{n}") for n in range(3))


@pytest.mark.row(62)
def test_only_what_is_of_the_last_update_that_was_told_of_is_given() -> None:
    """A worker has read once before the first update, so once more than there were."""
    assert gift(3, [A], {B: 3, C: 3}, {B: {A: 4}, C: {A: 4}}) == Given({A: B})
    for reads in (3, 5, 0):
        found = gift(3, [A], {B: 3}, {B: {A: reads}})
        assert found == NotGiven(f"no worker has read the newest parameters of {A}")


@pytest.mark.row(62)
@pytest.mark.parametrize("others", [2, 4, None])
def test_nothing_is_given_beside_owners_of_another_update(others: int | None) -> None:
    """An update that was decided is on some owners, and was lost with another one."""
    found = gift(3, [A], {B: 3, C: others}, {B: {A: 4}, C: {A: 4}})
    assert isinstance(found, NotGiven)
    assert found.why.startswith(C)


@pytest.mark.row(62)
def test_each_lost_owner_needs_somebody_who_has_its_part() -> None:
    assert gift(3, [A, B], {C: 3}, {C: {A: 4, B: 4}}) == Given({A: C, B: C})
    found = gift(3, [A, B], {C: 3}, {C: {A: 4, B: 3}})
    assert found == NotGiven(f"no worker has read the newest parameters of {B}")


def test_an_update_is_made_when_all_that_it_writes_is_written() -> None:
    before, writings = {"w": 5, "m": 1}, {"w": 1, "m": 1}
    assert made(before, {"w": 8, "m": 4}, writings) == 3
    assert made(before, {"w": 8, "m": 3}, writings) is None
    assert made(before, {"w": 8}, writings) is None  # it was lost, and is another


def test_what_changes_and_nobody_reads_cannot_be_given() -> None:
    written = ["params/w", "opt/0/mu/w", "global_step", "state/mean"]
    assert unread(written, ["params/w", "state/mean"], "global_step") is None
    assert unread(written, ["params/w"], "global_step") == "state/mean"
