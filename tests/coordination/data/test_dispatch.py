import json
from collections import Counter
from typing import Any

from hypothesis import given, strategies as st

from jgraph.coordination.data.dispatch import (
    Asked,
    Deal,
    Dispatch,
    Event,
    Expel,
    Fail,
    Instruction,
    Over,
    Progressed,
    WorkerLost,
)
from jgraph.coordination.data.slots import Lease, Part, SlotPlan


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


@given(skip=st.integers(0, 60))
def test_skipping_is_as_if_the_batches_had_been_dealt(skip: int) -> None:
    done = Dispatch(plan(13, 3), budget=skip, workers=1)
    crew = Crew(done, 1)
    crew.finish()
    after = Dispatch(plan(13, 3), budget=1, workers=1, position=done.state())
    skipped = Dispatch(plan(13, 3), budget=1, workers=1, skip=skip)
    assert ask(skipped, "a") == ask(after, "a")


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
