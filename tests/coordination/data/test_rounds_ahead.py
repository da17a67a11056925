"""Columns of rounds: who asks for many batches is told three numbers."""

import pytest
from hypothesis import given, strategies as st

from jgraph.cluster.loop_messages import deal_of, dealt_of
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.batch_order import BatchOrder, Leases
from jgraph.coordination.data.rounds_ahead import RoundsAhead
from jgraph.coordination.data.slots import Part, Shuffle, SlotPlan
from jgraph.coordination.data.sync_data import SyncData
from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb


def plan(batches: int, shuffle: Shuffle = "examples") -> SlotPlan:
    return SlotPlan([Part("a", batches)], 1, seed=3, shuffle=shuffle, slot_batches=4)


@given(
    asks=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=120),
    between=st.sets(st.integers(0, 119)),
)
def test_each_batch_of_each_row_is_taken_once_or_left_to_its_replica(
    asks: list[tuple[int, int]], between: set[int]
) -> None:
    book, rows = BatchBook(plan(5000)), RoundsAhead([7, 8, 9])
    taken: dict[int, list[int]] = {7: [], 8: [], 9: []}
    others: list[int] = []
    for number, (who, count) in enumerate(asks):
        if number in between:  # somebody is dealt one that is of no row
            others += book.take_new(1)
        taken[who + 7] += rows.take(who + 7, count, book)
    for replica, places in rows.left():
        taken[replica] += places
    everything = [*others, *(place for each in taken.values() for place in each)]
    assert sorted(everything) == list(range(book.end))
    assert len({len(places) for places in taken.values()}) == 1
    for row in zip(*taken.values(), strict=True):
        assert row == (row[0], row[0] + 1, row[0] + 2)
    assert list(rows.left()) == []


@pytest.mark.parametrize("shuffle", ["examples", "slots"])
def test_what_is_dealt_of_many_rounds_travels_as_a_column(shuffle: Shuffle) -> None:
    slots = plan(90, shuffle)
    data = SyncData(slots, ["a", "b", "c"], rounds=16)
    for name, first in (("b", 1), ("a", 0), ("c", 2)):
        leases = data.deal(name, 1, together=True)
        deal = deal_of(leases)
        assert deal.column == pb.DataColumn(first=first, apart=3, batches=15)
        assert not deal.leases
        there = BatchOrder(SlotPlan.from_dict(slots.to_dict()))
        assert dealt_of(deal, there) == leases
        assert tuple(data.held(name)) == tuple(leases)
    held = [b for lease in data.held("c") for b in lease.each()]
    assert [BatchOrder(slots).place(*b) for b in held] == [*range(2, 47, 3)]


def test_what_is_dealt_of_one_place_travels_as_a_lease() -> None:
    order = BatchOrder(plan(90))
    for places in ((), (4,), range(4, 5, 3), range(3, 6)):
        deal = deal_of(Leases(order, places), number=7)
        assert not deal.HasField("column")
        assert deal.sum == (7 if places else 0)
        assert tuple(dealt_of(deal, order)) == tuple(order.leases(places))


@pytest.mark.parametrize(("batches", "apart"), [(0, 3), (91, 1), (2, 0)])
def test_a_column_of_more_than_there_is_is_refused(batches: int, apart: int) -> None:
    deal = pb.DataDeal(column=pb.DataColumn(first=1, apart=apart, batches=batches))
    said = f"{batches} batches, {apart} apart, were dealt of data with 90"
    with pytest.raises(MalformedMessageError, match=said):
        dealt_of(deal, BatchOrder(plan(90)))
