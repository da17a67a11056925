"""All ps go on from one version, whatever each has made, kept or heard of by then."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.run.same_version import (
    Ask,
    Differ,
    GoOn,
    HeldBack,
    Progress,
    meet,
)
from jgraph.graph.ir import TaskName

A, B, C = (TaskName(f"/job:ps/task:{n}") for n in range(3))
DUE, LOST = frozenset({1, 3}), range(0)


@pytest.mark.row(13)
@pytest.mark.parametrize(
    ("held", "kept", "version", "again"),
    [
        pytest.param(
            {A: range(5, 6), B: range(5, 6)},
            {},
            5,
            set(),
            id="nothing but a link was lost",
        ),
        pytest.param(
            *({A: LOST, B: range(5, 6)}, {A: range(4, 7)}, 5, {A}),
            id="the first ps logged an update and died before it was decided elsewhere",
        ),
        pytest.param(
            *({A: LOST, B: range(5, 6)}, {A: range(5, 7)}, 5, {A}),
            id="its copy has an update that others never heard of",
        ),
        pytest.param(
            *({A: LOST, B: range(6, 7)}, {A: range(5, 7)}, 6, {A}),
            id="it died when all had the update",
        ),
        pytest.param(
            *({A: LOST, B: range(6, 7)}, {A: range(4, 6), B: range(5, 7)}, 5, {A, B}),
            id="it died before it logged what the other has made",
        ),
        pytest.param(
            *({A: LOST, B: LOST}, {A: range(5, 7), B: range(4, 6)}, 5, {A, B}),
            id="both died, one of them with more in its log",
        ),
        pytest.param(
            *(
                {A: LOST, B: LOST, C: range(5, 6)},
                {A: range(5, 7), B: range(4, 6)},
                5,
                {A, B},
            ),
            id="two of three died",
        ),
        pytest.param(
            *(
                {A: range(6, 7), B: range(5, 6)},
                {A: range(5, 7), B: range(4, 6)},
                5,
                {A},
            ),
            id="none died, and one had heard of the update",
        ),
        pytest.param(
            *({A: LOST, B: range(5, 7)}, {A: range(4, 6)}, 5, {A}),
            id="who lives can undo what the copy of the lost one does not have",
        ),
    ],
)
def test_ps_go_on_from_the_newest_version_that_all_can_have(
    held: dict[TaskName, range],
    kept: dict[TaskName, range],
    version: int,
    again: set[TaskName],
) -> None:
    assert meet(held, kept) == GoOn(version, frozenset(again))


def test_those_that_live_are_asked_for_copies_only_where_they_are_ahead() -> None:
    assert meet({A: LOST, B: range(6, 7)}, {}) == Ask((A,))
    assert meet({A: LOST, B: range(6, 7)}, {A: range(4, 6)}) == Ask((B,))


def test_ps_without_a_common_version_are_told_apart() -> None:
    """The log of one began anew with an update that the other does not have."""
    met = meet({A: LOST, B: range(6, 7)}, {A: range(4, 6), B: range(6, 7)})
    assert met == Differ({A: (4, 5), B: (6,)})


@dataclass
class Ps:
    """What one ps has made, and its log or copy."""

    made: Progress = field(default_factory=Progress)
    log: HeldBack[tuple[int, int]] = field(default_factory=HeldBack)
    applied: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0  # of the newest update: its nodes ran and then were logged


@given(st.data())
def test_no_update_that_all_had_is_lost_whoever_dies_and_whenever(
    data: st.DataObject,
) -> None:
    """Each ps makes an update, and then logs it, node by node, in any order of all."""
    every = {task: Ps() for task in (A, B, C)[: data.draw(st.integers(1, 3))]}
    told = 0
    for _ in range(data.draw(st.integers(0, 40))):
        if all(ps.steps == 0 and ps.made.version == told + 1 for ps in every.values()):
            told += 1  # nobody decides the next before
        busy = [ps for ps in every.values() if ps.made.version == told or ps.steps]
        ps = data.draw(st.sampled_from(busy))
        if ps.steps == 0:
            ps.made.begins(DUE)
        node = sorted(DUE)[ps.steps // 2]
        if ps.steps % 2 == 0:
            ps.made.ran(node)
        else:
            ps.applied += ps.log.update((told + 1, node), told + 1, node, DUE)
        ps.steps = (ps.steps + 1) % 4
    lost = data.draw(st.sets(st.sampled_from(sorted(every))))
    held = {
        task: LOST
        if task in lost or ps.made.is_torn
        else range(ps.made.version, ps.made.version + 1)
        for task, ps in every.items()
    }
    kept: dict[TaskName, range] = {}
    while isinstance(met := meet(held, kept), Ask):
        kept |= {task: every[task].log.versions for task in met.tasks}
    assert isinstance(met, GoOn)
    assert told <= met.version <= told + 1
    for task in met.again:
        ps = every[task]
        ps.applied += ps.log.end(met.version)
        due = [(n, node) for n in range(1, met.version + 1) for node in sorted(DUE)]
        assert ps.applied == due
