"""Synchronous steps: one set for all ps, each slot once, nobody waits for ever."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.coordination.data.sync_data import SyncData
from jgraph.coordination.sync.aggregation import (
    Applied,
    Arbiter,
    Contributed,
    DataAsked,
    End,
    Event,
    Failed,
    Instruction,
    NotApplied,
    TimeIsUp,
)
from jgraph.errors import NonFiniteError
from jgraph.graph.ir import TaskName
from tests.support.gates_world import World

ERROR = NonFiniteError("the loss is NaN")


@pytest.mark.parametrize("outcome", [NotApplied(ERROR), Failed(ERROR), TimeIsUp(9.0)])
def test_batches_of_an_update_that_was_not_applied_come_again(outcome: Event) -> None:
    ps, worker = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
    plan = SlotPlan([Part("data", 9)], batch_size=1, seed=0)
    data = SyncData(plan, ["a"])
    machine = Arbiter([ps], {"a": worker}, data, wanted=1, version=0, steps=9)
    said: list[Instruction] = []
    for update, then in enumerate([Applied(), outcome]):
        machine.handle(DataAsked("a", 1))
        machine.handle(Contributed(ps, (("a", update),), update, slots=(update,)))
        said += machine.handle(then)
    assert [type(one) for one in said] == [End]
    assert BatchOrder(plan).restored(data.state()) == (1, [])
    assert (data.state()["done"], data.state()["again"]) == (1, 0)


@given(
    shards=st.integers(1, 3),
    replicas=st.integers(1, 4),
    backups=st.integers(0, 2),
    lost=st.integers(0, 2),
    turns=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_whatever_the_order_all_ps_average_the_same_set(
    shards: int, replicas: int, backups: int, lost: int, turns: bool, order: Any
) -> None:
    wanted = max(1, replicas - backups)
    world = World(shards, replicas, wanted=wanted, steps=6, turns=turns)
    leaving = list(range(min(lost, replicas - 1)))
    while world.pending:
        if leaving and order.random() < 0.02:
            world.lose(leaving.pop())
        world.deliver(order.choice(world.pending))
    world.check(done=6, least=max(1, wanted - lost))


@pytest.mark.parametrize("turns", [False, True])
def test_hundreds_of_workers_finish_with_stragglers_left_out(turns: bool) -> None:
    world = World(shards=2, replicas=300, wanted=280, steps=3, turns=turns)
    rank = 0
    while pending := world.pending:
        rank = (rank * 7919 + 13) % len(pending)
        world.deliver(pending[rank])
    world.check(done=3, least=280)
    assert {len(steps) for _, steps in world.decided} == {280}
