"""Shares of an update: as many pieces as there are, by speed, and seldom changed."""

from collections import Counter

from hypothesis import given, strategies as st

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.shares import Cut, Shares, pieces_of
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.coordination.data.sync_data import SyncData

NAMES = [f"w{n}" for n in range(6)]
SPEEDS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


@given(speeds=SPEEDS, each=st.integers(1, 8), most=st.integers(1, 4))
def test_no_other_shares_of_all_pieces_make_the_slowest_step_shorter(
    speeds: list[float], each: int, most: int
) -> None:
    cut = Cut(each, most=each * most, measured=True)
    shares, names = Shares(cut), NAMES[: len(speeds)]
    for name, piece_s in zip(names, speeds, strict=True):
        shares.learn(name, piece_s)
    now = shares.next(names)
    assert sum(now.values()) == cut.of(len(names))
    assert all(1 <= count <= cut.most for count in now.values())
    took = {name: now[name] * s for name, s in zip(names, speeds, strict=True)}
    slowest = max(took, key=took.__getitem__)
    # It could give one away only to somebody who would then take as long.
    for name, piece_s in zip(names, speeds, strict=True):
        is_full = now[name] == cut.most or now[slowest] == 1
        assert is_full or took[name] + piece_s >= took[slowest] - 1e-9


@given(workers=st.integers(1, 6), total=st.integers(6, 48))
def test_even_shares_have_the_remainder_first(workers: int, total: int) -> None:
    shares = Shares(Cut(each=1, total=total, most=total))
    counts = list(shares.next(NAMES[:workers]).values())
    least, more = divmod(total, workers)
    assert counts == [least + (n < more) for n in range(workers)]


def test_shares_change_when_all_speeds_are_known_and_then_seldom() -> None:
    shares = Shares(Cut(each=4, most=8, measured=True))
    assert list(shares.next("ab").values()) == [4, 4]
    shares.learn("a", 1.0)
    shares.learn("b", 0.0)  # too early to say
    assert list(shares.next("ab").values()) == [4, 4]
    shares.learn("b", 3.0)
    assert list(shares.next("ab").values()) == [6, 2]
    shares.learn("b", 1.0)
    seen = [list(shares.next("ab").values()) for _ in range(20)]
    assert seen == [*[[6, 2]] * 19, [4, 4]]
    shares.learn("b", 1.1)  # less than a tenth would be gained
    assert all(list(shares.next("ab").values()) == [4, 4] for _ in range(50))


def test_who_joins_is_taken_for_one_like_the_others() -> None:
    shares = Shares(Cut(each=4, total=8, most=8, measured=True))
    shares.learn("a", 1.0)
    shares.learn("b", 3.0)
    assert dict(shares.next("ab")) == {"a": 6, "b": 2}
    assert dict(shares.next("abc")) == {"a": 5, "b": 1, "c": 2}


@given(st.integers(1, 500), st.integers(1, 40))
def test_pieces_are_of_one_size(batch_size: int, least: int) -> None:
    pieces = pieces_of(batch_size, least)
    assert batch_size % pieces == 0
    assert pieces >= min(least, batch_size)


EVENTS = st.lists(
    st.tuples(st.sampled_from("ddcclxm"), st.integers(0, 2), st.integers(1, 9)),
    max_size=80,
)


@given(EVENTS)
def test_pieces_of_every_step_count_once_or_are_known_to_be_left(
    events: list[tuple[str, int, int]],
) -> None:
    order = BatchOrder(SlotPlan([Part("data", 29)], 1, seed=7, slot_batches=4))
    shares = Shares(Cut(each=3, most=9, measured=True))
    data = SyncData(order.plan, NAMES[:3], shares=shares)
    held: dict[str, list[list[int]]] = {name: [] for name in NAMES[:3]}
    counted: Counter[int] = Counter()
    for kind, who, count in events:
        name = sorted(held)[who % len(held)]
        if kind == "d":
            leases = data.deal(name, 1, together=True)
            step = [order.plan.number(*b) for lease in leases for b in lease.each()]
            held[name] += [step] if step else []
            assert len(step) <= 9
        elif kind == "m":
            data.learn(name, count / 10)
        elif kind == "x" and len(held) > 1:
            error = data.lost(name, ())
            del held[name]
            if error is not None:
                return
        elif kind in "cl" and held[name]:
            step = held[name].pop(0)
            assert data.holds(name, step[0])
            if kind == "c":
                places = data.counted((step[0],))
                assert [order.number(place) for place in places] == step
                counted.update(step)
            else:
                data.late(step[0])
    assert set(counted.values()) <= {1}
    end, unfinished = order.restored(data.state())
    before = Counter(map(order.number, range(end)))
    assert counted == before - Counter(map(order.number, unfinished))
    assert data.done == counted.total()
