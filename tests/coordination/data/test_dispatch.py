import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.data.dispatch import (
    SETTLE_S,
    Asked,
    Deal,
    Dispatch,
    Event,
    Expel,
    Fail,
    Instruction,
    Over,
    Progressed,
    TimePassed,
    WorkerEnded,
    WorkerLost,
)
from jgraph.coordination.data.slots import Lease, Part, SlotPlan
from jgraph.errors import DataSlotError


def plan(batches: int = 20, slot_batches: int = 4, seed: int = 0) -> SlotPlan:
    parts = [Part("data", batches)]
    return SlotPlan(parts, 1, seed, shuffle="slots", slot_batches=slot_batches)


def ask(
    dispatch: Dispatch, worker: str, done: int = 0, batches: int = 4, now: float = 0.0
) -> tuple[Lease, ...]:
    """Returns what the worker is dealt at once."""
    for instruction in dispatch.handle(Asked(worker, done, batches), now):
        if isinstance(instruction, Deal) and instruction.worker == worker:
            return instruction.leases
    raise AssertionError


def batches_of(leases: Any) -> list[tuple[int, int, int]]:
    return [
        (lease.epoch, lease.slot, index)
        for lease in leases
        for index in range(lease.first, lease.first + lease.batches)
    ]


class Crew:
    """Workers that do what they are dealt, in order, until they are lost."""

    def __init__(self, dispatch: Dispatch, workers: int) -> None:
        self.dispatch = dispatch
        self.held: dict[str, list[tuple[int, int, int]]] = {}
        self.done: dict[str, int] = {}
        self.trained: Counter[tuple[int, int, int]] = Counter()
        self.over: set[str] = set()
        self.failed: list[Fail] = []
        self.hired, self.now = 0, 0.0
        for _ in range(workers):
            self.hire()

    def hire(self) -> None:
        name = f"w{self.hired}"
        self.hired += 1
        self.held[name], self.done[name] = [], 0

    def tell(self, event: Event) -> None:
        self.now += 0.01
        self.perform(self.dispatch.handle(event, self.now))

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Deal(worker, leases):
                    self.held[worker] += batches_of(leases)
                case Over(worker):
                    self.over.add(worker)
                case Fail():
                    self.failed.append(instruction)
                case Expel():
                    raise AssertionError(instruction)

    def ask(self, name: str, batches: int) -> None:
        idle = not self.held[name]
        event = Asked(name, self.done[name], batches, idle=idle)
        self.tell(event)

    def train(self, name: str, batches: int, *, tell: bool) -> None:
        for _ in range(min(batches, len(self.held[name]))):
            self.trained[self.held[name].pop(0)] += 1
            self.done[name] += 1
        if tell:
            self.tell(Progressed(name, self.done[name]))

    def lose(self, name: str) -> None:
        del self.held[name], self.done[name]
        self.tell(WorkerLost(name))
        self.hire()

    def finish(self) -> None:
        for _ in range(2000):
            for name in list(self.held):
                self.train(name, 3, tell=False)
                if name not in self.over:
                    self.ask(name, 3)
            if self.over >= set(self.held):
                return
        raise AssertionError("the run does not end")


STEPS = st.lists(
    st.tuples(st.sampled_from("atsl"), st.integers(0, 2), st.integers(1, 9)),
    max_size=40,
)


@given(steps=STEPS, batches=st.integers(1, 30), per=st.integers(1, 5))
def test_whatever_is_lost_every_batch_of_every_epoch_is_done_once_or_counted(
    steps: list[tuple[str, int, int]], batches: int, per: int
) -> None:
    budget = 3 * batches
    dispatch = Dispatch(plan(batches, per), budget=budget, workers=3)
    crew = Crew(dispatch, 3)
    lost = 0
    for kind, who, count in steps:
        name = sorted(crew.held)[who]
        if kind == "a":
            crew.ask(name, count)
        elif kind == "t":
            crew.train(name, count, tell=True)
        elif kind == "s":
            crew.train(name, count, tell=False)
        elif lost < 2:  # a third death of one slot ends the run, on purpose
            lost += 1
            crew.lose(name)
    crew.finish()
    assert not crew.failed
    wanted = {
        (epoch, slot, index)
        for epoch in range(3)
        for slot in range(len(dispatch.plan))
        for index in range(dispatch.plan.span(slot).batches)
    }
    assert set(crew.trained) == wanted
    assert dispatch.done == budget
    repeats = sum(crew.trained.values()) - len(wanted)
    assert 0 <= repeats <= dispatch.again
    assert dispatch.state()["unfinished"] == []


@given(first=st.integers(0, 50), second=st.integers(1, 50), asked=st.integers(1, 9))
def test_restart_from_a_position_goes_on_in_the_same_order(
    first: int, second: int, asked: int
) -> None:
    def order(dispatch: Dispatch) -> list[tuple[int, int, int]]:
        crew = Crew(dispatch, 1)
        seen = []
        while not crew.over:
            crew.ask("w0", asked)
            seen += crew.held["w0"]
            crew.train("w0", 100, tell=False)
        return seen

    whole = Dispatch(plan(13, 3), budget=first + second, workers=1)
    part = Dispatch(plan(13, 3), budget=first, workers=1)
    expected = order(whole)
    begun = order(part)
    position = json.loads(json.dumps(part.state()))
    rest = Dispatch(plan(13, 3), budget=second, workers=1, position=position)
    assert begun + order(rest) == expected
    assert rest.done == first + second


def test_slow_worker_gets_less() -> None:
    dispatch = Dispatch(plan(400), budget=400, workers=2)
    crew = Crew(dispatch, 2)
    turn = 0
    while not crew.over >= {"w0", "w1"}:
        turn += 1
        for name, every in (("w0", 1), ("w1", 4)):
            if turn % every == 0:
                crew.train(name, 2, tell=False)
                if len(crew.held[name]) < 4 and name not in crew.over:
                    crew.ask(name, 4)
    assert crew.done["w0"] + crew.done["w1"] == 400
    assert 3 < crew.done["w0"] / crew.done["w1"] < 5


def test_lost_workers_batches_go_to_the_next_one_who_asks() -> None:
    dispatch = Dispatch(plan(), budget=20, workers=1)
    held = ask(dispatch, "a", batches=8)
    dispatch.handle(Progressed("a", 3), 0.0)
    assert dispatch.handle(WorkerLost("a"), 0.0) == []
    assert dispatch.again == len(batches_of(held)) - 3
    assert batches_of(ask(dispatch, "b", batches=1))[0] == batches_of(held)[3]


def test_suspects_are_dealt_alone() -> None:
    dispatch = Dispatch(plan(40), budget=40, workers=1)
    held = ask(dispatch, "a", batches=8)
    assert len(held) == 2
    dispatch.handle(WorkerLost("a"), 0.0)
    assert ask(dispatch, "b", batches=8) == held[:1]
    assert ask(dispatch, "b", batches=8) == ()  # nothing beside a suspect


def test_last_batches_of_a_run_are_those_that_came_back() -> None:
    dispatch = Dispatch(plan(40), budget=16, workers=1)
    ask(dispatch, "a", batches=8)
    held = ask(dispatch, "b", batches=8)
    dispatch.handle(WorkerLost("a"), 0.0)
    while more := ask(dispatch, "b", batches=8):
        held += more
    crew = Crew(dispatch, 0)
    crew.held["b"], crew.done["b"] = batches_of(held), 0
    crew.finish()
    assert dispatch.done == 16
    assert dispatch.state()["unfinished"] == []


def test_worker_that_was_dead_before_it_was_dealt_a_batch_was_not_ended_by_it() -> None:
    """One dies, then both: that they are lost is known one after the other."""
    dispatch = Dispatch(plan(1, slot_batches=1), budget=1, workers=2)
    (lease,) = ask(dispatch, "a", batches=1)
    idle = [Asked(name, 0, 1, idle=True) for name in "bcd"]
    dispatch.handle(WorkerLost("a"), 0.0)
    assert dispatch.handle(idle[0], 1.0) == [Deal("b", (lease,))]
    assert dispatch.handle(idle[1], 2.0) == []
    assert dispatch.handle(WorkerLost("b"), 5.0) == []  # c is dead already
    assert dispatch.handle(WorkerLost("c"), 5.1) == []
    assert dispatch.handle(idle[2], 5.2) == []
    assert dispatch.handle(TimePassed(), 5.1 + SETTLE_S) == [Deal("d", (lease,))]
    dispatch.handle(Progressed("d", 1), 7.0)
    assert dispatch.done == 1


def test_slot_that_ends_three_workers_ends_the_run_with_its_name() -> None:
    dispatch = Dispatch(plan(40), budget=40, workers=1)
    *_, deadly, _, _ = batches_of(ask(dispatch, "w", batches=8))
    answers = dispatch.handle(WorkerLost("w"), 0.0)
    lost, held = 1, [deadly]
    for turn in range(40):
        worker = f"w{turn}"
        now = turn * SETTLE_S
        held = batches_of(ask(dispatch, worker, batches=8, now=now))
        if deadly in held:
            lost += 1
            answers = dispatch.handle(WorkerLost(worker), now)
            if answers:
                break
        else:  # whatever else of its slot is done meanwhile
            dispatch.handle(Progressed(worker, len(held)), now)
    (fail,) = answers
    assert isinstance(fail, Fail)
    assert (lost, held) == (3, [deadly])
    epoch, slot, index = deadly
    (example,) = dispatch.plan.rows(epoch, slot)[index : index + 1]
    what = rf"batch {index} of data slot {slot} \(data, .*ended 3 .* \({example}\)"
    with pytest.raises(DataSlotError, match=what):
        raise fail.error
    assert fail.error.details["examples"] == [example]
    assert dispatch.handle(Asked("again", 0, 1), 0.0) == []


def test_worker_without_work_waits_until_all_is_done_or_something_comes_back() -> None:
    dispatch = Dispatch(plan(4), budget=4, workers=1)
    while dispatch.handle(Asked("a", 0, 4), 0.0) != [Deal("a", ())]:
        pass
    assert dispatch.handle(Asked("b", 0, 4, idle=True), 0.0) == []
    back = dispatch.handle(WorkerLost("a"), 0.0)
    assert [type(answer) for answer in back] == [Deal]
    crew = Crew(dispatch, 0)
    crew.held["b"], crew.done["b"] = [], 0
    crew.perform(back)
    crew.train("b", 9, tell=False)
    while not crew.over:
        crew.ask("b", 9)
        crew.train("b", 9, tell=False)
    assert dispatch.done == 4


def test_lease_of_a_silent_worker_passes() -> None:
    dispatch = Dispatch(plan(), budget=20, workers=1, lease_s=10)
    held = ask(dispatch, "a")
    dispatch.handle(Progressed("a", 1), 5.0)
    assert dispatch.handle(TimePassed(), 14.0) == []
    (expel,) = dispatch.handle(TimePassed(), 15.0)
    assert isinstance(expel, Expel)
    assert "silent for 10 s" in expel.error.message
    assert batches_of(ask(dispatch, "b", batches=1))[0] == batches_of(held)[1]
    (late,) = dispatch.handle(Asked("a", 2, 1), 16.0)
    assert isinstance(late, Expel)


def test_worker_that_ends_in_order_gives_back_without_blame() -> None:
    dispatch = Dispatch(plan(40), budget=40, workers=1)
    held = ask(dispatch, "a", batches=8)
    dispatch.handle(WorkerEnded("a"), 0.0)
    assert ask(dispatch, "b", batches=8) == held
    assert dispatch.again == 0


def test_reports_that_are_lost_or_come_twice_change_nothing() -> None:
    dispatch = Dispatch(plan(), budget=20, workers=1)
    ask(dispatch, "a", batches=8)
    for done in (2, 2, 1, 5, 5):
        dispatch.handle(Progressed("a", done), 0.0)
    assert dispatch.done == 5


def test_position_of_other_data_begins_the_next_epoch() -> None:
    old = Dispatch(plan(8), budget=30, workers=1)
    crew = Crew(old, 1)
    crew.finish()
    new = Dispatch(plan(9), budget=5, workers=1, position=old.state())
    assert ask(new, "a")[0].epoch == 4
    assert new.done == 30


@given(skip=st.integers(0, 60))
def test_skipping_is_as_if_the_batches_had_been_dealt(skip: int) -> None:
    done = Dispatch(plan(13, 3), budget=skip, workers=1)
    crew = Crew(done, 1)
    crew.finish()
    after = Dispatch(plan(13, 3), budget=1, workers=1, position=done.state())
    skipped = Dispatch(plan(13, 3), budget=1, workers=1, skip=skip)
    assert ask(skipped, "a") == ask(after, "a")


def test_no_answer_has_more_batches_than_can_be_dealt_in_a_moment() -> None:
    plan = SlotPlan([Part("data", 8)], batch_size=2, seed=0)
    dispatch = Dispatch(plan, budget=2**63, workers=1)
    (deal,) = dispatch.handle(Asked("a", done=0, batches=2**32 - 1), now=0.0)
    assert isinstance(deal, Deal)
    assert sum(lease.batches for lease in deal.leases) == 4096


def test_row_22_leases_whose_answer_was_lost_are_dealt_to_the_same_worker() -> None:
    dispatch = Dispatch(plan(), budget=20, workers=1)
    first = ask(dispatch, "a", batches=3)

    def again(done: int, received: int, batches: int = 2) -> tuple[Lease, ...]:
        asked = Asked("a", done, batches, received=received)
        (deal,) = dispatch.handle(asked, 0.0)
        assert isinstance(deal, Deal)
        return deal.leases

    second = again(done=1, received=3)
    assert again(done=1, received=3) == second  # this one had not arrived
    assert batches_of(again(2, received=4, batches=0)) == batches_of(second)[1:]
    assert again(done=5, received=5, batches=0) == ()
    assert dispatch.done == 5
    assert len({*batches_of(first), *batches_of(second)}) == 5


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=40))
def test_whatever_answers_are_lost_each_batch_is_done_once(
    turns: list[tuple[str, bool]],
) -> None:
    """Who asks, and whether the answer arrives; in the end all do."""
    dispatch = Dispatch(plan(), budget=30, workers=2)
    got: dict[str, list[tuple[int, int, int]]] = {"a": [], "b": []}
    for worker, arrives in [*turns, *[("a", True), ("b", True)] * 30]:
        count = len(got[worker])
        for answer in dispatch.handle(Asked(worker, count, 3, received=count), 0.0):
            if isinstance(answer, Deal) and arrives:
                got[answer.worker] += batches_of(answer.leases)
    counts = Counter([*got["a"], *got["b"]])
    assert len(counts) == dispatch.done == 30
    assert set(counts.values()) == {1}
