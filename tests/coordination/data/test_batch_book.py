"""A client knows from reports alone where its run is."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.dispatch import Asked, Deal, Dispatch
from jgraph.coordination.data.slots import Part, SlotPlan

BUDGET = 30


def plan(seed: int = 3) -> SlotPlan:
    parts = [Part("data", 13)]
    return SlotPlan(parts, 1, seed, shuffle="slots", slot_batches=4)


@given(st.data())
def test_whenever_masters_are_lost_each_batch_is_trained_on_and_repeats_are_counted(
    data: st.DataObject,
) -> None:
    """Two workers; some of what each did is not told when the next master begins."""
    trained: Counter[tuple[int, int, int]] = Counter()
    book = BatchBook(plan(), budget=BUDGET)
    for last in (False, False, True):
        position = book.position(sum(trained.values()))
        master = Dispatch(plan(), budget=book.remaining, workers=2, position=position)
        done = Counter[str]()
        while master.done < BUDGET and (last or data.draw(st.booleans())):
            worker = data.draw(st.sampled_from("ab"))
            (answer, *_) = master.handle(Asked(worker, done[worker], 3), now=0.0)
            if not isinstance(answer, Deal):
                continue
            for lease in answer.leases:
                trained.update(lease.each())
                done[worker] += lease.batches
                if last or data.draw(st.booleans()):
                    book.add([lease])
    order = BatchOrder(plan())
    assert (book.done, book.remaining) == (BUDGET, 0)
    end, unfinished = order.restored(book.position(sum(trained.values())))
    assert (end, unfinished) == (BUDGET, [])
    times = [trained[next(order.batch(place).each())] for place in range(BUDGET)]
    assert min(times) == 1
    again = book.position(sum(trained.values()))["again"]
    assert again == sum(trained.values()) - BUDGET


@pytest.mark.parametrize(("dealt", "epoch"), [(0, 0), (1, 1), (13, 1), (14, 2)])
def test_other_data_begins_the_first_epoch_that_was_not_begun(
    dealt: int, epoch: int
) -> None:
    position = BatchBook(plan(), skip=dealt).position()
    assert BatchBook(plan(seed=4), position).position()["epoch"] == epoch


def test_a_lease_of_a_position_ends_with_its_slot() -> None:
    position = BatchBook(plan(), skip=13).position()
    position["unfinished"] = [[0, 0, 2, 2**60]]
    assert len(BatchBook(plan(), position).given_back) == 2
