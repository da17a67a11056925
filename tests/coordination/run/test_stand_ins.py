"""Stand-ins of lost owners: who has which part, whatever is lost in whichever order."""

from random import Random

import pytest

from jgraph.coordination.run.stand_ins import ring, stand_ins
from jgraph.graph.device import TaskName

OWNERS = [TaskName(f"/job:worker/task:{n}") for n in range(4)]
PS = TaskName("/job:ps/task:0")


class Parts:
    """Which task has the part of each owner, and which has the copy of each task.

    Copies are made anew after each change, as a run does before it goes on.
    """

    def __init__(self, holders: list[TaskName]) -> None:
        self.there = set(holders)
        self.holders = holders
        self.by: dict[TaskName, TaskName] = {}
        self.on = {task: {task} for task in holders if task in OWNERS}

    @property
    def copies(self) -> dict[TaskName, TaskName]:
        return ring(task for task in self.holders if task not in self.by)

    def lose(self, *lost: TaskName) -> bool:
        """Loses tasks at once; returns whether the run goes on without them."""
        copies, there = self.copies, self.there - set(lost)
        holders = [task for task in lost if task not in self.by]
        by = stand_ins(holders, copies, self.by, there) if holders else self.by
        if by is None:
            return False
        for task in holders:
            self.on.setdefault(copies[task], set()).update(self.on.pop(task, set()))
        self.there, self.by = there, dict(by)
        return True

    def return_home(self, owner: TaskName) -> None:
        self.there.add(owner)
        heir = self.by.pop(owner)
        self.on[heir].discard(owner)
        self.on[owner] = {owner}

    def check(self) -> None:
        """Each part is on one task that is there: the one that is named."""
        for owner in OWNERS:
            (task,) = [task for task, parts in self.on.items() if owner in parts]
            assert task == self.by.get(owner, owner)
            assert task in self.there
        assert not set(self.by.values()) & self.by.keys()


@pytest.mark.row(13)
@pytest.mark.parametrize("holders", [OWNERS, [PS, *OWNERS]], ids=["workers", "ps"])
@pytest.mark.parametrize("seed", range(50))
def test_each_part_is_on_the_task_that_is_named_after_losses_and_returns(
    holders: list[TaskName], seed: int
) -> None:
    chance, parts, refused = Random(seed), Parts(holders), 0
    for _ in range(40):
        away = sorted(set(OWNERS) - parts.there)
        if away and chance.random() < 0.5:
            parts.return_home(chance.choice(away))
        else:
            count = chance.choice([1, 1, 2])
            there = sorted(parts.there - {PS})
            lost = chance.sample(there, min(count, len(there)))
            refused += not parts.lose(*lost)
        parts.check()
    assert refused < 40


def test_a_task_that_is_lost_with_its_copy_is_waited_for() -> None:
    parts = Parts(OWNERS)
    assert not parts.lose(OWNERS[1], OWNERS[2])
    assert parts.lose(OWNERS[1], OWNERS[3])
    assert parts.by == {OWNERS[1]: OWNERS[2], OWNERS[3]: OWNERS[0]}


def test_the_last_one_holds_everything_and_nobody_stands_in_for_it() -> None:
    parts = Parts(OWNERS)
    for owner in OWNERS[1:]:
        assert parts.lose(owner)
    assert set(parts.by.values()) == {OWNERS[0]}
    assert parts.copies == {}
    assert not parts.lose(OWNERS[0])


def test_nobody_stands_in_for_a_ps() -> None:
    assert stand_ins([PS], ring([PS, *OWNERS]), {}, OWNERS) is None
