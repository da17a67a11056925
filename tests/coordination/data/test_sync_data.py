"""The ledger of synchronous training: each batch counts once, whatever happens."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.dispatch import Asked, Deal, Dispatch, Progressed
from jgraph.coordination.data.slots import Part, Shuffle, SlotPlan
from jgraph.coordination.data.sync_data import SyncData

REPLICAS = ["a", "b", "c"]


def plan(batches: int = 40, shuffle: Shuffle = "slots") -> SlotPlan:
    parts = [Part("data", batches)] if shuffle == "examples" else []
    parts = parts or [Part("one", batches // 3), Part("two", batches - batches // 3)]
    return SlotPlan(parts, 1, seed=7, shuffle=shuffle, slot_batches=4)


def deal(
    data: SyncData, replica: str, batches: int = 1, **options: bool
) -> tuple[int, ...]:
    """Returns the numbers of what the replica is dealt."""
    options.setdefault("together", False)
    leases = data.deal(replica, batches, **options)
    number = SlotPlan.from_dict(data.state()["plan"]).number
    return tuple(
        number(lease.epoch, lease.slot, index)
        for lease in leases
        for index in range(lease.first, lease.first + lease.batches)
    )


def left(data: SyncData) -> tuple[int, list[int]]:
    """Returns (batches before the next new one, those of them that are not done)."""
    state = json.loads(json.dumps(data.state()))
    return BatchOrder(SlotPlan.from_dict(state["plan"])).restored(state)


@given(
    shuffle=st.sampled_from(["examples", "slots"]),
    asks=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=30),
    rounds=st.integers(1, 4),
)
def test_rounds_are_neighbours_in_the_order_of_the_epoch_whoever_asks_first(
    shuffle: Shuffle, asks: list[tuple[int, int]], rounds: int
) -> None:
    order = BatchOrder(plan(shuffle=shuffle))
    data = SyncData(order.plan, REPLICAS, rounds=rounds)
    dealt: dict[str, list[int]] = {name: [] for name in REPLICAS}
    for who, count in asks:
        name = REPLICAS[who]
        dealt[name] += deal(data, name, count, together=True)
    for who, name in enumerate(REPLICAS):
        expected = [order.number(3 * n + who) for n in range(len(dealt[name]))]
        assert dealt[name] == expected


EVENTS = st.lists(
    st.tuples(st.sampled_from("ddcclx"), st.integers(0, 2), st.integers(1, 6)),
    max_size=80,
)


@given(
    events=EVENTS,
    together=st.booleans(),
    shuffle=st.sampled_from(["slots", "none"]),
    rounds=st.integers(1, 3),
    many=st.sampled_from([1, 64]),
)
def test_whatever_is_late_or_lost_every_batch_counts_once_or_is_known_to_be_left(
    events: list[tuple[str, int, int]],
    together: bool,
    shuffle: Shuffle,
    rounds: int,
    many: int,
) -> None:
    order = BatchOrder(plan(13, shuffle))
    data = SyncData(order.plan, REPLICAS, rounds=rounds, many=many)
    held: dict[str, list[int]] = {name: [] for name in REPLICAS}
    counted: Counter[int] = Counter()
    for kind, who, count in events:
        name = sorted(held)[who % len(held)]
        if kind == "d":
            held[name] += deal(data, name, count, together=together)
        elif kind == "x" and len(held) > 1:
            assert data.lost(name, set()) is None
            del held[name]
        elif held[name]:
            number = held[name].pop(0)
            assert data.holds(name, number)
            if kind == "c":
                data.counted([number])
            else:
                data.late(number)
            counted[number] += kind == "c"
            assert not data.holds(name, number)
        for other, numbers in held.items():
            batches = [b for lease in data.held(other) for b in lease.each()]
            assert sorted(order.plan.number(*b) for b in batches) == sorted(numbers)
            assert data.is_idle(other) == (not numbers)
    assert set(counted.values()) <= {0, 1}
    end, unfinished = left(data)
    before = {order.number(place) for place in range(end)}
    assert +counted == Counter(before - set(map(order.number, unfinished)))
    assert data.done == counted.total()


class Both:
    """Two ledgers of the same run: one keeps rows, the other one by one."""

    def __init__(self, rounds: int) -> None:
        slots = plan(90, "examples")
        self.each = [
            SyncData(slots, NAMES, rounds=rounds, many=many) for many in (1, 64)
        ]
        self.held: dict[str, list[int]] = {name: [] for name in NAMES}

    def deal(self, who: int) -> None:
        name = sorted(self.held)[who % len(self.held)]
        one, other = (deal(data, name, together=True) for data in self.each)
        assert one == other
        self.held[name] += one

    def deal_all(self, first: int) -> None:
        for who in range(len(self.held)):
            self.deal(first + who)

    def count(self, _who: int) -> None:
        if all(self.held.values()):  # an update
            numbers = sorted(batches[0] for batches in self.held.values())
            is_row = numbers == [*range(numbers[0], numbers[-1] + 1)]
            update = range(numbers[0], numbers[-1] + 1) if is_row else numbers
            one, other = (list(data.counted(update)) for data in self.each)
            assert one == other
            for batches in self.held.values():
                del batches[0]

    def hold(self, who: int) -> None:
        numbers = [n for n, name in enumerate(NAMES) if self.held.get(name)]
        replicas = np.array(numbers, np.int64)
        batches = [self.held[NAMES[n]][who % 2 - 1] for n in numbers]
        first = batches[0] - numbers[0] if numbers else 0
        neighbours = np.array([NAMES.index(name) for name in self.held], np.int64)
        row = [first + int(n) for n in neighbours]
        one, other = (data.all_hold(neighbours, row) for data in self.each)
        assert one == other
        for data in self.each:
            assert data.all_hold(replicas, batches)
            if numbers:
                assert not data.all_hold(replicas, [b + 1 for b in batches])
                assert not data.all_hold(replicas, [b + 600 for b in batches])

    def late(self, who: int) -> None:
        name = sorted(self.held)[who % len(self.held)]
        if self.held[name]:
            number = self.held[name].pop(0)
            for data in self.each:
                data.late(number)

    def lose(self, who: int) -> None:
        if len(self.held) > 1:
            name = sorted(self.held)[who % len(self.held)]
            del self.held[name]
            assert [data.lost(name, set()) for data in self.each] == [None, None]

    def compare(self, _who: int) -> None:
        one, other = (data.state() for data in self.each)
        assert one == other
        for name in self.held:
            one_, other_ = (data.is_idle(name) for data in self.each)
            assert one_ == other_ == (not self.held[name])


NAMES = "abcdef"
USUAL = [Both.deal_all, Both.deal, *[Both.count] * 3, Both.hold, Both.compare]
ODD = [Both.deal, Both.late, Both.lose]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_kept_as_rows_is_what_is_kept_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        both = Both(rounds=chance.randint(1, 4))
        for _ in range(40):
            act = chance.choice(USUAL if chance.random() < 0.9 else ODD)
            act(both, chance.randrange(6))
        both.compare(0)
        for name in both.held:
            one, other = (data.held(name) for data in both.each)
            assert one == other


@given(batches=st.integers(0, 45), shuffle=st.sampled_from(["examples", "slots"]))
def test_restart_from_a_position_goes_on_in_the_same_order(
    batches: int, shuffle: Shuffle
) -> None:
    order = BatchOrder(plan(13, shuffle))
    data = SyncData(order.plan, REPLICAS)
    for turn in range(batches):
        data.counted(deal(data, REPLICAS[turn % 3], together=True))
    deal(data, "b", 2, together=True)  # held, and not done
    again = SyncData(order.plan, ["x"], json.loads(json.dumps(data.state())))
    assert again.done == batches
    dealt = [*deal(again, "x"), *deal(again, "x"), *deal(again, "x")]
    assert dealt == [order.number(batches + n) for n in range(3)]


@given(batches=st.integers(0, 45), shuffle=st.sampled_from(["examples", "slots"]))
def test_position_of_asynchronous_training_is_gone_on_from_and_back(
    batches: int, shuffle: Shuffle
) -> None:
    order = BatchOrder(plan(13, shuffle))
    before = Dispatch(order.plan, budget=batches, workers=1)
    done = 0
    while done < batches:
        (answer,) = before.handle(Asked("w", done, 5), 0.0)
        assert isinstance(answer, Deal)
        done += sum(lease.batches for lease in answer.leases)
        before.handle(Progressed("w", done), 0.0)
    data = SyncData(order.plan, ["a"], before.state())
    assert deal(data, "a") == (order.number(batches),)
    data.counted((order.number(batches),))
    after = Dispatch(order.plan, budget=1, workers=1, position=data.state())
    (answer,) = after.handle(Asked("w", 0, 1), 0.0)
    assert isinstance(answer, Deal)
    assert answer.leases == (order.batch(batches + 1),)
    assert after.done == batches + 1


@pytest.mark.parametrize("shuffle", ["examples", "slots", "none"])
def test_each_place_of_the_order_has_a_batch_of_its_own(shuffle: Shuffle) -> None:
    order = BatchOrder(plan(13, shuffle))
    for place in range(100):
        lease = order.batch(place)
        assert lease.epoch == place // 13
        assert order.place(lease.epoch, lease.slot, lease.first) == place
    for epoch in range(7):
        places = range(13 * epoch, 13 * (epoch + 1))
        assert sorted(map(order.number, places)) == list(places)
