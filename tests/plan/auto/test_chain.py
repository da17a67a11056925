"""Cuts of a chain of layers: the best of all, under limits of memory."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.errors import MemoryLimitError
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.chain import Balance, Bounds, Chain, LayerCost, least_bounds
from jgraph.plan.auto.cost_model import Link
from jgraph.plan.auto.work import Work
from jgraph.plan.schedule import schedule
from tests.support.balances import NO_TIME, of_speeds
from tests.support.costs import model
from tests.support.plans import WORKERS

LAYER = LayerCost(
    Work(flops=1e6),
    output_nbytes=1000,
    returned_nbytes=1000,
    stored_nbytes=10,
    held_nbytes=5,
)


def every_cut(layers: int, stages: int) -> list[Bounds]:
    inner = itertools.combinations(range(1, layers), stages - 1)
    return [(0, *cuts, layers) for cuts in inner]


def prices_of(price: Any, bounds: Bounds) -> list[float]:
    pairs = itertools.pairwise(bounds)
    return [price(stage, first, end) for stage, (first, end) in enumerate(pairs)]


def balance(
    layers: Sequence[LayerCost],
    speeds: Sequence[float],
    *,
    link: Link = NO_TIME,
    held: Sequence[int] | None = None,
    limits: Sequence[int] = (),
) -> Balance:
    placement = of_speeds(speeds, link=link)
    tasks = placement.planner.tasks
    by_task = dict(zip(tasks, limits, strict=False))
    most = held or [1] * len(tasks)
    return Chain(layers, tasks, most, placement.cost_model, by_task).balance()


@given(st.data())
def test_no_cut_has_a_cheaper_dearest_stage_and_none_that_has_as_cheap_a_one_is_evener(
    data: st.DataObject,
) -> None:
    layers = data.draw(st.integers(1, 7))
    stages = data.draw(st.integers(1, layers))
    number = st.one_of(st.integers(0, 6).map(float), st.just(math.inf))
    table = data.draw(
        st.lists(number, min_size=stages * 64, max_size=stages * 64), label="prices"
    )

    def price(stage: int, first: int, end: int) -> float:
        return table[64 * stage + 8 * first + end]

    found = least_bounds(layers, stages, price)
    cuts = [prices_of(price, bounds) for bounds in every_cut(layers, stages)]
    possible = [prices for prices in cuts if math.isfinite(max(prices))]
    if not possible:
        assert found is None
        return
    assert found is not None
    assert found in every_cut(layers, stages)
    best = min((max(p), sum(x * x for x in p)) for p in possible)
    prices = prices_of(price, found)
    assert (max(prices), sum(x * x for x in prices)) == best


@given(
    works=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    speeds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 20), min_size=7, max_size=7),
    limits=st.lists(st.integers(1, 150), min_size=4, max_size=4),
    microbatches=st.integers(1, 5),
    name=st.sampled_from(["1f1b", "gpipe"]),
)
def test_a_balance_is_the_best_of_all_cuts_that_memory_allows(
    works: list[int],
    speeds: list[int],
    sizes: list[int],
    limits: list[int],
    microbatches: int,
    name: str,
) -> None:
    speeds = speeds[: len(works)]
    stages = len(speeds)
    layers = [
        LayerCost(
            Work(flops=w),
            output_nbytes=s,
            returned_nbytes=s,
            stored_nbytes=s,
            held_nbytes=s + 1,
            extra_nbytes=s,
        )
        for w, s in zip(works, sizes, strict=False)
    ]

    def seconds(stage: int, first: int, end: int) -> float:
        crossing = 0 if stage == stages - 1 else 2 * sizes[end - 1]
        return sum(works[first:end]) / speeds[stage] + crossing

    def nbytes(stage: int, first: int, end: int) -> int:
        part = sizes[first:end]
        under_way = microbatches if name == "gpipe" else stages - stage
        held = min(under_way, microbatches) * (sum(part) + len(part))
        return sum(part) + held + max(part)

    table = schedule(name, stages=stages, tasks=stages, microbatches=microbatches)
    allowed = [
        bounds
        for bounds in every_cut(len(works), stages)
        if all(n <= m for n, m in zip(prices_of(nbytes, bounds), limits, strict=False))
    ]
    link = Link(0.0, 1.0)
    held = table.most_held()
    if not allowed:
        with pytest.raises(MemoryLimitError):
            balance(layers, speeds, link=link, held=held, limits=limits)
        return
    found = balance(layers, speeds, link=link, held=held, limits=limits)
    assert found.bounds in allowed
    best = min(max(prices_of(seconds, bounds)) for bounds in allowed)
    assert found.slowest_s == pytest.approx(best)
    told = [stage.nbytes for stage in found.stages]
    assert told == prices_of(nbytes, found.bounds)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_equal_tasks_get_equal_numbers_of_equal_layers(stages: int) -> None:
    found = balance([LAYER] * 8, [1e9] * stages)
    assert found.bounds == tuple(range(0, 9, 8 // stages))
    assert found.slowest_s == pytest.approx(found.even_s)


def test_a_task_that_is_half_as_fast_gets_half_as_many_layers() -> None:
    found = balance([LAYER] * 10, [1e9, 0.5e9, 1e9])
    assert found.bounds == (0, 4, 6, 10)
    assert found.slowest_s == pytest.approx(4e-3)
    assert found.even_s == pytest.approx(6e-3)


def test_a_layer_with_the_work_of_all_others_is_alone() -> None:
    wide = replace(LAYER, work=Work(flops=5e6))
    found = balance([*[LAYER] * 5, wide], [1e9, 1e9])
    assert found.bounds == (0, 5, 6)


def test_a_cut_is_where_few_bytes_cross() -> None:
    small = replace(LAYER, output_nbytes=0, returned_nbytes=0)
    layers = [LAYER, small, LAYER, LAYER]
    assert balance(layers, [1e9, 1e9], link=Link(0.0, 1e6)).bounds == (0, 2, 4)
    layers = [small, LAYER, LAYER, LAYER]
    assert balance(layers, [1e9, 1e9], link=Link(0.0, 1e6)).bounds == (0, 1, 4)


def test_tasks_of_a_host_compute_slower_together_and_none_gets_less_for_it() -> None:
    tasks = WORKERS[:2]
    crowded = model(tasks, crowding=2.0)
    found = Chain([LAYER] * 4, tasks, [2, 1], crowded, {}).balance()
    assert found.bounds == (0, 2, 4)
    assert found.stages[0].computing_s == pytest.approx(4e-3)


def test_a_limit_of_memory_leaves_a_task_fewer_layers() -> None:
    free = balance([LAYER] * 8, [1e9, 1e9])
    nbytes = free.stages[0].nbytes
    tight = balance([LAYER] * 8, [1e9, 1e9], limits=[nbytes - 1])
    assert (free.bounds, tight.bounds) == ((0, 4, 8), (0, 3, 8))
    assert tight.stages[0].nbytes < nbytes


def test_an_early_stage_keeps_more_microbatches_and_so_takes_fewer_layers() -> None:
    layers = [replace(LAYER, stored_nbytes=0)] * 8
    limits = [20 * LAYER.held_nbytes] * 3
    found = balance(layers, [4e9, 1e9, 1e9], held=[8, 2, 1], limits=limits)
    assert found.bounds == (0, 2, 5, 8)
    assert balance(layers, [4e9, 1e9, 1e9]).bounds == (0, 6, 7, 8)


def test_what_waits_of_a_batch_is_memory_of_the_first_task() -> None:
    costs = of_speeds([1e9, 1e9]).cost_model
    tasks = WORKERS[:2]
    found = Chain([LAYER] * 4, tasks, [2, 1], costs, {}, waiting=100).balance()
    assert [stage.nbytes for stage in found.stages] == [20 + 2 * 10 + 100, 20 + 10]


def test_a_limit_that_nothing_keeps_is_one_sentence_with_bytes_and_a_code() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        balance([LAYER] * 8, [1e9, 1e9], limits=[59, 50])
    assert caught.value.code == "JG-235"
    told = str(caught.value)
    assert "8 layers do not fit 2 tasks" in told
    assert "task:0 needs 60 B of the 59 B that it may use" in told
    assert "task:1 needs 60 B of the 50 B that it may use" in told
    assert caught.value.details["limits"] == [f"{WORKERS[0]} 59", f"{WORKERS[1]} 50"]


def test_a_balance_tells_layers_times_bytes_and_what_equal_parts_would_take() -> None:
    found = balance([LAYER] * 3, [2e9, 1e9], limits=[100])
    lines = str(found).splitlines()
    assert lines == [
        "3 layers on 2 tasks: the slowest stage takes 1 ms for a microbatch, and 2 ms "
        "if all had as many layers",
        "  /job:worker/task:0: layers 0-1, 2.0 MFLOP at 2.0 GFLOP/s, computes 1 ms, "
        "sends 0 ms, 30 B of 100 B",
        "  /job:worker/task:1: layer 2, 1.0 MFLOP at 1.0 GFLOP/s, computes 1 ms, "
        "sends 0 ms, 15 B",
    ]
    assert repr(found) == "<Balance of 2, 1 layers; print it to see why>"


def test_a_hundred_layers_are_cut_for_sixteen_tasks_at_once() -> None:
    tasks = [TaskName(f"/job:worker/task:{n}") for n in range(16)]
    held = list(range(16, 0, -1))
    found = Chain([LAYER] * 100, tasks, held, model(tasks), {}).balance()
    assert max(s.end - s.first for s in found.stages) == 7
