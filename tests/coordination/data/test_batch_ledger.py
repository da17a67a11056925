"""A client knows from reports alone where its run is."""

from collections import Counter

from hypothesis import given, strategies as st

from jgraph.coordination.data.batch_ledger import BatchLedger
from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.dispatch import Asked, Deal, Dispatch
from jgraph.coordination.data.slots import Part, SlotPlan

BUDGET = 30


def plan() -> SlotPlan:
    parts = [Part("data", 13)]
    return SlotPlan(parts, 1, seed=3, shuffle="slots", slot_batches=4)


@given(st.data())
def test_whenever_masters_are_lost_each_batch_is_trained_on_and_repeats_are_counted(
    data: st.DataObject,
) -> None:
    """Two workers; some of what each did is not told when the next master begins."""
    trained: Counter[tuple[int, int, int]] = Counter()
    begin = Dispatch(plan(), budget=0, workers=1).state()
    ledger = BatchLedger(plan(), begin, updates=0)
    for last in (False, False, True):
        position = ledger.position(sum(trained.values()))
        master = Dispatch(
            plan(), budget=BUDGET - ledger.done, workers=2, position=position
        )
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
                    ledger.add([lease])
    order = BatchOrder(plan())
    assert ledger.done == BUDGET
    end, unfinished = order.restored(ledger.position(sum(trained.values())))
    assert (end, unfinished) == (BUDGET, [])
    times = [trained[next(order.batch(place).each())] for place in range(BUDGET)]
    assert min(times) == 1
    again = ledger.position(sum(trained.values()))["again"]
    assert again == sum(trained.values()) - BUDGET
