from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import Lease, Part, Shuffle, SlotPlan, epoch_order
from jgraph.errors import DataError
from jgraph.runtime.data.batches import Field, LeasedBatches

PARTS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@given(
    sizes=PARTS,
    batch=st.integers(1, 50),
    per=st.integers(1, 4),
    seed=st.integers(0, 2**70),
    shuffle=st.sampled_from(["examples", "slots", "none"]),
)
def test_an_epoch_has_every_example_but_the_last_partial_batch_of_all(
    sizes: list[int], batch: int, per: int, seed: int, shuffle: Any
) -> None:
    if sum(sizes) < batch:
        return
    parts = [Part(str(i), size, first=i) for i, size in enumerate(sizes)]
    plan = SlotPlan(parts, batch, seed, shuffle=shuffle, slot_batches=per)
    numbers, found = [], list[tuple[int, int]]()
    for slot in plan.order(3).tolist():
        lease = Lease(3, slot, 0, plan.span(slot).batches)
        for index in range(lease.batches):
            numbers.append(plan.number(3, slot, index))
            pieces = plan.where(lease, index)
            places = np.concatenate([piece.places for piece in pieces])
            assert sorted(places.tolist()) == list(range(batch))
            found += [(p.part, row) for p in pieces for row in p.rows.tolist()]
    first = 3 * plan.batches_per_epoch
    assert sorted(numbers) == list(range(first, first + plan.batches_per_epoch))
    assert len({*found}) == len(found) == sum(sizes) // batch * batch
    for part, row in found:
        assert parts[part].first <= row < parts[part].first + sizes[part]


@given(sizes=PARTS, batch=st.integers(1, 9), seed=st.integers(0, 9))
def test_batches_across_parts_are_read_in_the_order_of_their_examples(
    sizes: list[int], batch: int, seed: int
) -> None:
    if sum(sizes) < batch:
        return
    for shuffle in get_args(Shuffle):
        reader = Files(sizes, shuffle)
        plan = SlotPlan(reader.parts, batch, seed, shuffle=shuffle, slot_batches=2)
        batches = LeasedBatches(reader, plan)
        for slot in range(len(plan)):
            lease = Lease(1, slot, 0, plan.span(slot).batches)
            due = plan.rows(1, slot).reshape(-1, batch)
            read = [batches.read(lease, n)["x"] for n in range(lease.batches)]
            assert np.array_equal(read, due)


class Files:
    """Files of examples that are their own numbers."""

    def __init__(self, sizes: list[int], shuffle: Shuffle) -> None:
        self.parts = tuple(Part(str(n), size) for n, size in enumerate(sizes))
        self.fields = {"x": Field(np.dtype(np.int64), ())}
        self.shuffle: Shuffle = shuffle
        self._firsts = np.cumsum([0, *sizes])

    def read(self, part: int, rows: Any) -> dict[str, Any]:
        assert len(rows)
        assert rows.max() < self.parts[part].examples
        return {"x": self._firsts[part] + rows}


def test_position_of_files_that_had_slots_of_their_own_tells_only_the_epoch() -> None:
    def position(*parts: Part) -> tuple[SlotPlan, dict[str, Any]]:
        plan = SlotPlan(parts, 2, seed=0, slot_batches=2, data="other")
        told = BatchOrder(plan).position(3, [])
        del told["plan"]["data"]
        return plan, told

    plan, told = position(Part("a", 12))
    assert BatchOrder(plan).restored(told) == (3, [])
    plan, told = position(Part("a", 8), Part("b", 4))
    assert BatchOrder(plan).restored(told) == (6, [])


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
    assert plan.name(0) == "data slot 0 (a, 0 to 3; b.parquet, 0 to 3)"
    assert plan.name(2) == "data slot 2 (b.parquet, 12 to 19)"
    error = plan.deadly(Lease(0, 2, 0, 1), 3)
    first = plan.rows(0, 2)[0] - 4
    assert f"({first} of b.parquet, " in error.message


def test_deadly_batch_is_named_with_its_examples_however_they_are_shuffled() -> None:
    plan = SlotPlan([Part("the arrays", 40)], 10, seed=0)
    error = plan.deadly(Lease(2, 0, 1, 1), 3)
    examples = plan.rows(2, 0)[10:20].tolist()
    assert error.details["examples"] == examples
    assert "batch 1 of data slot 0 (the arrays) of epoch 2 ended 3" in error.message
    assert f"({', '.join(map(str, examples[:8]))} and 2 more)" in error.message


def test_data_without_a_whole_batch_is_refused() -> None:
    with pytest.raises(DataError, match="the data has only 5 examples"):
        SlotPlan([Part("a", 3), Part("b", 2)], 6, 0)


def test_examples_are_shuffled_over_the_whole_of_the_data_or_not_at_all() -> None:
    parts = [Part("a", 11)]
    mixed = SlotPlan(parts, 2, 0, slot_batches=2)
    plain = SlotPlan(parts, 2, 0, slot_batches=2, shuffle="none")

    def rows(plan: SlotPlan) -> list[int]:
        return [r for s in plan.order(4) for r in plan.rows(4, s).tolist()]

    assert rows(mixed) == epoch_order(11, 0, 4)[:10].tolist()
    assert rows(plain) == list(range(10))
