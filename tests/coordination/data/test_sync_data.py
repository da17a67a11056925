"""The ledger of synchronous training: each batch counts once, whatever happens."""

import json
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.dispatch import Asked, Deal, Dispatch, Progressed
from jgraph.coordination.data.slots import DEATHS, Part, Shuffle, SlotPlan
from jgraph.coordination.data.sync_data import SyncData
from jgraph.errors import DataSlotError

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
)
def test_rounds_are_neighbours_in_the_order_of_the_epoch_whoever_asks_first(
    shuffle: Shuffle, asks: list[tuple[int, int]]
) -> None:
    order = BatchOrder(plan(shuffle=shuffle))
    data = SyncData(order.plan, REPLICAS)
    dealt: dict[str, list[int]] = {name: [] for name in REPLICAS}
    for who, count in asks:
        name = REPLICAS[who]
        dealt[name] += deal(data, name, count, together=True)
    for who, name in enumerate(REPLICAS):
        rounds = range(len(dealt[name]))
        assert dealt[name] == [order.number(3 * n + who) for n in rounds]


EVENTS = st.lists(
    st.tuples(st.sampled_from("ddcclx"), st.integers(0, 2), st.integers(1, 6)),
    max_size=80,
)


@given(
    events=EVENTS, together=st.booleans(), shuffle=st.sampled_from(["slots", "none"])
)
def test_whatever_is_late_or_lost_every_batch_counts_once_or_is_known_to_be_left(
    events: list[tuple[str, int, int]], together: bool, shuffle: Shuffle
) -> None:
    order = BatchOrder(plan(13, shuffle))
    data = SyncData(order.plan, REPLICAS)
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
            (data.counted if kind == "c" else data.late)(number)
            counted[number] += kind == "c"
            assert not data.holds(name, number)
    assert set(counted.values()) <= {0, 1}
    end, unfinished = left(data)
    before = {order.number(place) for place in range(end)}
    assert +counted == Counter(before - set(map(order.number, unfinished)))
    assert data.done == counted.total()


def test_late_batch_goes_to_another_replica_and_before_anything_new() -> None:
    data = SyncData(plan(), REPLICAS)
    (late,) = deal(data, "a")
    deal(data, "b")
    data.late(late)
    assert deal(data, "a") != (late,)
    assert deal(data, "b") == (late,)


def test_late_batch_goes_back_to_a_replica_that_is_alone() -> None:
    data = SyncData(plan(), ["a"])
    (late,) = deal(data, "a")
    data.late(late)
    assert deal(data, "a") == (late,)


def test_what_is_computed_of_a_lost_replica_is_not_dealt_again() -> None:
    data = SyncData(plan(), REPLICAS)
    first, second = deal(data, "a", 2)
    data.lost("a", {first})
    assert deal(data, "b") == (second,)
    data.counted(first)
    assert data.done == 1
    assert not data.holds("a", second)


def test_reserved_batches_of_a_lost_replica_are_dealt_without_blame() -> None:
    data = SyncData(plan(), REPLICAS)
    assert deal(data, "a", together=True)
    data.lost("b", set())
    # Not alone: nobody was dealt what is given back.
    assert len(deal(data, "c", 4, together=True)) == 4


def test_nobody_holds_more_than_its_share_of_half_an_epoch() -> None:
    data = SyncData(plan(40), REPLICAS)
    assert len(deal(data, "a", 1000)) == 40 // 6
    assert len(deal(SyncData(plan(3), REPLICAS), "a", 1000)) == 1


def test_what_a_lost_replica_held_is_dealt_alone() -> None:
    data = SyncData(plan(), REPLICAS)
    first, second = deal(data, "a", 2)
    (other,) = deal(data, "b")
    data.lost("a", set())
    assert deal(data, "b", 2) == ()  # it holds something else
    data.counted(other)
    assert deal(data, "b", 2) == (first,)
    assert deal(data, "b", 2) == ()
    assert deal(data, "c", 2) == (second,)
    data.counted(first)
    assert len(deal(data, "b", 2)) == 2


def test_idle_replica_is_dealt_something_before_its_last_batch_is_told_of() -> None:
    data = SyncData(plan(), REPLICAS)
    (first,) = deal(data, "a")
    data.lost("a", set())
    assert deal(data, "b") == (first,)
    assert deal(data, "b") == ()
    assert len(deal(data, "b", idle=True)) == 1


def test_batch_that_ends_three_workers_ends_the_run_with_its_name() -> None:
    data = SyncData(plan(40, "examples"), ["a", "b", "c", "d"])
    harmless, deadly, _ = deal(data, "a", 3)
    assert data.lost("a", set()) is None
    data.counted(harmless if deal(data, "d") == (harmless,) else -1)
    assert deal(data, "b", 3) == (deadly,)
    assert data.lost("b", set()) is None
    assert deal(data, "c", 3) == (deadly,)
    error = data.lost("c", set())
    assert error is not None
    with pytest.raises(
        DataSlotError, match=r"batch 1 of data slot 0 .*ended 3 workers"
    ):
        raise error
    assert error.details["slot"] == 0


@given(batches=st.integers(0, 45), shuffle=st.sampled_from(["examples", "slots"]))
def test_restart_from_a_position_goes_on_in_the_same_order(
    batches: int, shuffle: Shuffle
) -> None:
    order = BatchOrder(plan(13, shuffle))
    data = SyncData(order.plan, REPLICAS)
    for turn in range(batches):
        data.counted(*deal(data, REPLICAS[turn % 3], together=True))
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
    data.counted(order.number(batches))
    after = Dispatch(order.plan, budget=1, workers=1, position=data.state())
    (answer,) = after.handle(Asked("w", 0, 1), 0.0)
    assert isinstance(answer, Deal)
    assert answer.leases == (order.batch(batches + 1),)
    assert after.done == batches + 1


def test_batch_that_ended_workers_is_known_where_another_loop_goes_on() -> None:
    data, said = SyncData(plan(13), ["a", "b"]), None
    for _ in range(DEATHS):
        deal(data, "a")
        said = data.lost("a", ())
        data = SyncData(plan(13), ["a", "b"], json.loads(json.dumps(data.state())))
    assert isinstance(said, DataSlotError)
    assert f"ended {DEATHS} workers" in said.message
    data.counted(*deal(data, "a"))
    assert "deaths" not in data.state()


def test_position_of_other_data_begins_the_next_epoch() -> None:
    data = SyncData(plan(13), REPLICAS)
    for _ in range(15):
        data.counted(*deal(data, "a"))
    other = SyncData(plan(12), REPLICAS, data.state())
    assert other.deal("a", 1, together=True)[0].epoch == 2
    assert other.done == 15


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
