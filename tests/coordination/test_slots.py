import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.slots import Lease, Part, SlotPlan, epoch_order
from jgraph.errors import DataError

PARTS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@given(
    sizes=PARTS,
    batch=st.integers(1, 7),
    per=st.integers(1, 4),
    seed=st.integers(0, 2**70),
)
def test_slots_cover_every_whole_batch_of_every_part_once(
    sizes: list[int], batch: int, per: int, seed: int
) -> None:
    if all(size < batch for size in sizes):
        return
    parts = [Part(str(i), size) for i, size in enumerate(sizes)]
    plan = SlotPlan(parts, batch, seed, shuffle="slots", slot_batches=per)
    numbers, rows = [], set()
    for slot in plan.order(3).tolist():
        span = plan.span(slot)
        numbers += [plan.number(3, slot, index) for index in range(span.batches)]
        mine = plan.rows(3, slot).tolist()
        assert len(mine) == span.batches * batch
        rows |= {(span.part, row) for row in mine}
        assert max(mine) < sizes[span.part]
    first = 3 * plan.batches_per_epoch
    assert sorted(numbers) == list(range(first, first + plan.batches_per_epoch))
    assert len(rows) == plan.batches_per_epoch * batch


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        plan = SlotPlan([Part("a", 999)], 3, seed, shuffle="slots", slot_batches=2)
        return [row for slot in plan.order(epoch) for row in plan.rows(epoch, slot)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_order_is_the_same_on_every_machine() -> None:
    assert epoch_order(6, 0, 0).tolist() == [3, 2, 5, 4, 0, 1]


def test_what_is_left_out_changes_from_epoch_to_epoch() -> None:
    plan = SlotPlan([Part("a", 7)], 4, seed=0, shuffle="slots")
    kept = {tuple(np.sort(plan.rows(epoch, 0))) for epoch in range(8)}
    assert len(kept) > 1


def test_plan_survives_as_plain_data() -> None:
    plan = SlotPlan([Part("a", 9), Part("b", 4)], 2, 5, shuffle="slots", slot_batches=3)
    again = SlotPlan.from_dict(plan.to_dict())
    assert again.to_dict() == plan.to_dict()
    assert again.rows(1, 0).tolist() == plan.rows(1, 0).tolist()


def test_slot_is_named_by_its_file_and_examples() -> None:
    parts = [Part("a", 4), Part("b.parquet", 100)]
    plan = SlotPlan(parts, 2, 0, shuffle="slots", slot_batches=4)
    assert plan.name(2) == "data slot 2 (b.parquet, 8 to 15)"


def test_deadly_batch_is_named_with_its_examples_however_they_are_shuffled() -> None:
    plan = SlotPlan([Part("the arrays", 40)], 10, seed=0)
    error = plan.deadly(Lease(2, 0, 1, 1), 3)
    examples = plan.rows(2, 0)[10:20].tolist()
    assert error.details["examples"] == examples
    assert "batch 1 of data slot 0 (the arrays) of epoch 2 ended 3" in error.message
    assert f"({', '.join(map(str, examples[:8]))} and 2 more)" in error.message


def test_data_without_a_whole_batch_is_refused() -> None:
    with pytest.raises(DataError, match="no file of the data has more than 3"):
        SlotPlan([Part("a", 3), Part("b", 2)], 4, 0)


def test_examples_are_shuffled_over_the_whole_of_the_data_or_not_at_all() -> None:
    parts = [Part("a", 11)]
    mixed = SlotPlan(parts, 2, 0, slot_batches=2)
    plain = SlotPlan(parts, 2, 0, slot_batches=2, shuffle="none")

    def rows(plan: SlotPlan) -> list[int]:
        return [r for s in plan.order(4) for r in plan.rows(4, s).tolist()]

    assert rows(mixed) == epoch_order(11, 0, 4)[:10].tolist()
    assert rows(plain) == list(range(10))
