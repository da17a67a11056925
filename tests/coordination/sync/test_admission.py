"""Bounded staleness: no gradient older than the bound, and everybody's turn comes."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.sync.admission import Admission, LetIn, StepAsked, StepEnded
from jgraph.coordination.sync.aggregation import Step
from jgraph.graph.ir import TaskName

PS = [TaskName(f"/job:ps/task:{i}") for i in range(3)]


class Run:
    """Workers, an admission, and ps that read and apply in any order."""

    def __init__(self, workers: int, shards: int, bound: int) -> None:
        self.machine = Admission(PS[:shards], bound=bound)
        self.versions = [0] * shards
        self.staleness: Counter[int] = Counter()
        self.reads: dict[tuple[Step, int], int] = {}
        self.left: dict[Step, set[int]] = {}
        self.waiting: set[Step] = set()
        self.unread: set[tuple[Step, int]] = set()
        for i in range(workers):
            self.ask((f"w{i}", 1))

    def ask(self, step: Step) -> None:
        self.waiting.add(step)
        self.let_in(self.machine.handle(StepAsked(step)))

    def let_in(self, instructions: list[LetIn]) -> None:
        for step in (i.step for i in instructions):
            self.waiting.remove(step)
            self.left[step] = set(range(len(self.versions)))
            self.unread |= {(step, shard) for shard in self.left[step]}

    def moves(self) -> list[Any]:
        reads = [(self.read, *key) for key in sorted(self.unread)]
        waiting_for = {step for step, _ in self.unread}
        applies = [
            (self.apply, step, shard)
            for step, shards in sorted(self.left.items())
            if step not in waiting_for
            for shard in sorted(shards)
        ]
        return [*reads, *applies]

    def read(self, step: Step, shard: int) -> None:
        self.unread.remove((step, shard))
        self.reads[step, shard] = self.versions[shard]

    def apply(self, step: Step, shard: int) -> None:
        self.staleness[self.versions[shard] - self.reads.pop((step, shard))] += 1
        self.versions[shard] += 1
        self.left[step].remove(shard)
        if not self.left[step]:
            del self.left[step]
        self.let_in(self.machine.handle(StepEnded(PS[shard], step)))
        if step not in self.left:
            self.ask((step[0], step[1] + 1))


@given(
    workers=st.integers(1, 5),
    shards=st.integers(1, 3),
    bound=st.integers(0, 4),
    order=st.randoms(use_true_random=False),
)
def test_no_gradient_is_older_than_the_bound_and_work_goes_on(
    workers: int, shards: int, bound: int, order: Any
) -> None:
    run = Run(workers, shards, bound)
    for _ in range(120):
        moves = run.moves()
        assert moves, "everybody waits"
        move, *arguments = order.choice(moves)
        move(*arguments)
    assert max(run.staleness, default=0) <= bound


@pytest.mark.parametrize("bound", [0, 3])
def test_every_worker_gets_its_turn(bound: int) -> None:
    run = Run(4, 1, bound)
    for _ in range(400):
        move, *arguments = run.moves()[0]
        move(*arguments)
    reached = [step[1] for step in [*run.waiting, *run.left]]
    assert max(reached) - min(reached) <= 2
