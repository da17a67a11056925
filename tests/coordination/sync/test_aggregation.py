"""Synchronous steps: one set for all ps, each slot once, nobody waits for ever."""

from collections import Counter
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
    DealData,
    Decide,
    End,
    GoOnAsked,
    Halt,
    Instruction,
    MasterHeard,
    MasterSilent,
    NotApplied,
    ReplicaLost,
    StopAsked,
    TimeIsUp,
    Void,
)
from jgraph.coordination.sync.sync_gate import (
    Closed,
    ContributionCame,
    StepAsked,
    SyncGate,
    Tell,
)
from jgraph.errors import (
    CancelledStepError,
    DataSlotError,
    DeadlineError,
    NonFiniteError,
)
from jgraph.graph.ir import TaskName
from tests.support.sync_world import World

PS = [TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")]
A, B, C = ("a", 1), ("b", 1), ("c", 1)
PLAN = SlotPlan([Part("data", 100)], batch_size=1, seed=0)


def arbiter(
    replicas: str = "abc",
    wanted: int = 2,
    steps: int = 9,
    shards: int = 1,
    halt_every: int = 0,
) -> Arbiter:
    names = {r: TaskName(f"/job:worker/task:{i}") for i, r in enumerate(replicas)}
    data = SyncData(PLAN, replicas)
    for replica in replicas:  # the first one has the number of its letter
        data.deal(replica, 1, together=True)
    return Arbiter(
        *(PS[:shards], names, data),
        wanted=wanted,
        version=5,
        steps=steps,
        halt_every=halt_every,
    )


def deal(machine: Arbiter, replica: str) -> int:
    """Returns the number of a batch that the replica is dealt."""
    (answer,) = machine.handle(DataAsked(replica, 1, idle=True))
    assert isinstance(answer, DealData)
    assert answer.leases
    return PLAN.number(0, answer.leases[0].slot, answer.leases[0].first)


def give(machine: Arbiter, *steps: tuple[str, int], version: int = 5) -> Any:
    """Reports contributions from the only ps, each of the next batch of its replica."""
    told: list[Instruction] = []
    for step in steps:
        first = step[1] == 1
        slot = "abc".index(step[0]) if first else deal(machine, step[0])
        told += machine.handle(Contributed(PS[0], step, version, slot))
    return told


def test_nothing_is_decided_at_a_multiple_until_it_may_go_on() -> None:
    machine = arbiter("a", wanted=1, halt_every=3)
    assert give(machine, A) == [Decide(5, (A,))]
    assert machine.handle(Applied()) == [Halt(6)]
    assert give(machine, ("a", 2), version=6) == []
    assert machine.handle(GoOnAsked(3)) == [], "that of an earlier halt"
    assert machine.handle(GoOnAsked(6)) == [Decide(6, (("a", 2),))]
    assert machine.handle(Applied()) == []


@pytest.mark.parametrize("pause", [False, True])
def test_a_halt_does_not_keep_anybody_from_stopping(pause: bool) -> None:
    machine = arbiter("a", wanted=1, halt_every=3)
    give(machine, A)
    machine.handle(Applied())
    assert machine.handle(StopAsked(pause)) == [End("paused" if pause else "stopped")]
    assert machine.halted is None


def test_the_last_update_ends_the_run_also_at_a_multiple() -> None:
    machine = arbiter("a", wanted=1, steps=1, halt_every=3)
    give(machine, A)
    assert machine.handle(Applied()) == [End("done")]


def test_first_contributions_count_and_are_summed_in_slot_order() -> None:
    machine = arbiter()
    assert give(machine, C, A) == [Decide(5, (A, C))]


def test_late_contribution_is_dropped_and_counted() -> None:
    machine = arbiter()
    give(machine, A, C, B)
    machine.handle(Applied())
    assert give(machine, ("b", 2)) == []
    assert machine.dropped == Counter(b=2)


def test_update_that_was_not_applied_ends_the_loop_and_its_batches_come_again() -> None:
    machine, error = arbiter(steps=2), NonFiniteError("the loss is NaN")
    give(machine, A, B)
    machine.handle(Applied())
    before = machine._data.state()
    give(machine, ("b", 2), ("a", 2), version=6)
    assert machine._data.done == 4
    assert machine.handle(NotApplied(error)) == [End("failed", error)]
    after = machine._data.state()
    assert after["done"] == before["done"] == 2
    end, again = BatchOrder(PLAN).restored(after)
    assert after["again"] == 0
    assert end - len(again) == 2  # so what comes next are all but those two


def test_contribution_counts_when_every_ps_has_it_at_one_version() -> None:
    machine = arbiter("a", wanted=1, shards=2)
    assert machine.handle(Contributed(PS[0], A, 5, 0)) == []
    assert machine.handle(Contributed(PS[1], A, 5, 0)) == [Decide(5, (A,))]


def test_contribution_read_at_two_versions_is_void() -> None:
    machine = arbiter("a", wanted=1, shards=2)
    machine.handle(Contributed(PS[0], A, 5, 0))
    assert machine.handle(Contributed(PS[1], A, 6, 0)) == [Void(A)]
    assert machine.dropped == Counter(a=1)


def test_slot_that_is_computed_twice_is_one_contribution() -> None:
    machine = arbiter()
    assert give(machine, A) == []
    assert machine.handle(Contributed(PS[0], ("a", 2), 5, slot=0)) == []
    assert give(machine, B) == [Decide(5, (A, B))]
    assert not machine.dropped


def test_batch_of_a_late_contribution_is_dealt_again_to_another() -> None:
    machine = arbiter(wanted=2)
    give(machine, A, B, C)
    assert deal(machine, "c") == 3
    assert deal(machine, "a") == 2


def test_what_a_lost_replica_had_not_contributed_is_dealt_again_and_counts_once() -> (
    None
):
    machine = arbiter("ab", wanted=2)
    give(machine, B)
    assert machine.handle(ReplicaLost("a")) == [Decide(5, (B,))]
    machine.handle(Applied())
    assert deal(machine, "b") == 0
    # What was on its way from the lost one is not taken beside it.
    assert machine.handle(Contributed(PS[0], A, 6, slot=0)) == []
    assert machine.handle(Contributed(PS[0], ("b", 2), 6, slot=0)) == [
        Decide(6, (("b", 2),))
    ]


def test_contribution_of_a_lost_replica_that_counts_is_not_dealt_again() -> None:
    machine = arbiter("ab", wanted=2)
    give(machine, A)
    assert machine.handle(ReplicaLost("a")) == [Decide(5, (A,))]
    assert give(machine, B) == []
    machine.handle(Applied())
    assert deal(machine, "b") == 1


def test_batch_that_ends_three_replicas_ends_the_run_with_its_name() -> None:
    machine = arbiter("abcd", wanted=4)
    assert machine.handle(ReplicaLost("a")) == []
    assert deal(machine, "b") == 0  # before anything new
    assert machine.handle(ReplicaLost("b")) == []
    assert deal(machine, "c") == 0
    (end,) = machine.handle(ReplicaLost("c"))
    assert isinstance(end, End)
    assert isinstance(end.error, DataSlotError)
    assert "batch 0 of data slot 0" in end.error.message


def test_replica_that_asks_after_the_end_hears_that_it_is_over() -> None:
    machine = arbiter("ab", wanted=2)
    machine.handle(ReplicaLost("a"))
    assert machine.handle(DataAsked("a", 1)) == [DealData("a", None)]
    machine.handle(StopAsked())
    assert machine.handle(DataAsked("b", 1)) == [DealData("b", None)]


def test_replica_that_leaves_is_waited_for_no_longer() -> None:
    machine = arbiter(wanted=3)
    assert give(machine, A, B) == []
    assert machine.handle(ReplicaLost("c")) == [Decide(5, (A, B))]


def test_last_contribution_of_a_lost_replica_counts() -> None:
    machine = arbiter(wanted=3)
    give(machine, A, C)
    assert machine.handle(ReplicaLost("c")) == [Decide(5, (A, C))]
    machine.handle(Applied())
    assert give(machine, ("a", 2), ("b", 2), version=6) == [
        Decide(6, (("a", 2), ("b", 2)))
    ]


def test_loop_without_a_replica_ends_for_another_to_go_on() -> None:
    machine = arbiter("a", wanted=1)
    assert machine.handle(ReplicaLost("a")) == [End("alone")]


def test_loop_that_is_to_pause_ends_after_the_update_under_way() -> None:
    machine = arbiter("ab")
    give(machine, A, B)
    assert machine.handle(StopAsked(pause=True)) == []
    assert machine.handle(Applied()) == [End("paused")]


def test_wait_that_is_too_long_names_who_is_missing() -> None:
    machine = arbiter("ab")
    give(machine, A)
    (end,) = machine.handle(TimeIsUp(60))
    assert isinstance(end, End)
    assert isinstance(end.error, DeadlineError)
    assert "global step 5 was not done after 60 s: it has 1 of 2" in end.error.message
    assert "still to come: /job:worker/task:1." in end.error.message


@pytest.mark.parametrize("applying", [True, False])
def test_stop_waits_for_the_update_under_way(applying: bool) -> None:
    machine = arbiter("a", wanted=1)
    if applying:
        give(machine, A)
        assert machine.handle(StopAsked()) == []
        assert machine.handle(Applied()) == [End("stopped")]
    else:
        assert machine.handle(StopAsked()) == [End("stopped")]
    assert machine.handle(Contributed(PS[0], ("a", 2), 6, slot=1)) == []


@given(
    shards=st.integers(1, 3),
    replicas=st.integers(1, 4),
    backups=st.integers(0, 2),
    lost=st.integers(0, 2),
    order=st.randoms(use_true_random=False),
)
def test_whatever_the_order_all_ps_average_the_same_set(
    shards: int, replicas: int, backups: int, lost: int, order: Any
) -> None:
    wanted = max(1, replicas - backups)
    world = World(shards, replicas, wanted=wanted, steps=6)
    leaving = list(range(min(lost, replicas - 1)))
    while world.pending:
        if leaving and order.random() < 0.02:
            world.lose(leaving.pop())
        world.deliver(order.choice(world.pending))
    world.check(done=6, least=max(1, wanted - lost))


def test_hundreds_of_workers_finish_with_stragglers_left_out() -> None:
    world = World(shards=2, replicas=300, wanted=280, steps=3)
    rank = 0
    while pending := world.pending:
        rank = (rank * 7919 + 13) % len(pending)
        world.deliver(pending[rank])
    world.check(done=3, least=280)
    assert {len(steps) for _, steps in world.decided} == {280}


def test_gate_keeps_nothing_once_it_is_closed() -> None:
    gate = SyncGate(version=0)
    gate.handle(StepAsked(("w0", 1)))
    gate.handle(Closed(CancelledStepError("over")))
    (told,) = gate.handle(ContributionCame(("w0", 1), slot=0))
    assert told == Tell(("w0", 1), version=0, slot=0)


def test_row_22_no_update_begins_while_the_master_is_silent() -> None:
    machine = arbiter("ab")
    assert machine.handle(MasterSilent()) == []
    assert give(machine, A, B) == []
    assert machine.handle(MasterHeard()) == [Decide(5, (A, B))]


def test_row_22_update_that_was_decided_before_is_applied_and_the_loop_can_end() -> (
    None
):
    machine = arbiter("ab", steps=3)
    assert give(machine, A, B) == [Decide(5, (A, B))]
    assert machine.handle(MasterSilent()) == []
    assert machine.handle(Applied()) == []
    assert machine.handle(StopAsked()) == [End("stopped")]
